"""Parity through the file: a right export agrees, a planted fault is caught at the stage where it first shows."""

import json
from pathlib import Path

import bridge_fixture as fixture
import numpy as np
import pytest

from bridge import convert, fields, parity
from bridge.reference import Reference
from eagle3_jax import tensors
from eagle3_jax.errors import ConfigError, WeightError

GOLDEN = Path(__file__).parent / "golden"
CASES = {c["name"]: c["config"] for c in json.loads((GOLDEN / "summary.json").read_text())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", fixture.SHAPES)
def test_export_and_checkpoint_agree(name, dtype, tmp_path):
    draft = fixture.draft(name, dtype)
    convert.write(draft, "run", tmp_path / "draft")
    report = parity.compare(draft, tmp_path / "draft")
    assert report.ok and report.steps == 7 and len(report.prompts) == 3
    assert set(report.largest) == set(parity.STAGES)
    assert max(report.largest.values()) <= 1e-4  # absolute: the states of these tiny drafts are small


@pytest.mark.parametrize("name", CASES)
def test_the_reference_computes_the_golden_prefill_and_drafting_steps(name, tmp_path):
    """Row t of unroll step k is what drafting computes k steps after a prefill that ends at row t."""
    case, found = CASES[name], np.load(GOLDEN / f"{name}.npz")
    weights = {k[2:]: found[k] for k in found if k.startswith("w/")}
    weights["embed_tokens.weight"] = weights.get(
        "embed_tokens.weight", np.zeros((case["vocab"], case["hidden"]))
    )
    tensors.save(tmp_path / tensors.FILE, weights | {"d2t": found["d2t"], "t2d": found["t2d"]})
    config = {
        "hidden_size": case["hidden"], "intermediate_size": case["intermediate"], "num_hidden_layers": 1,
        "num_attention_heads": case["heads"], "num_key_value_heads": case["kv"], "head_dim": case["head_dim"],
        "vocab_size": case["vocab"], "draft_vocab_size": case["draft_vocab"], "max_position_embeddings": 2048,
        "rms_norm_eps": case["eps"], "fc_norm": case["fc_norm"],
        **fields.rope_fields(case["rope_theta"], case["rope"]),
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    reference, depth = Reference(tmp_path), case["ttt"]
    for row in range(case["B"]):
        ids, aux, last = found["input_ids"][row], found["aux"][row], case["lens"][row] - 1
        for t in range(last - depth):
            stages = reference.prefill(ids[1 : t + 2], aux[: t + 1])
            for k in range(depth):
                if k:
                    stages = reference.draft(int(ids[t + 1 + k]))
                for stage, golden in (("carried", f"out/hidden_{k}"), ("logits", f"out/logits_{k}")):
                    np.testing.assert_allclose(
                        stages[stage][-1],
                        found[golden][row, t],
                        atol=2e-5,
                        rtol=2e-5,
                        err_msg=f"{t} {k} {stage}",
                    )


def swapped(a, b):
    return lambda t: t.update({a: t[b], b: t[a]})


def changed(name, function):
    return lambda t: t.update({name: function(t[name])})


NORM, MLP, ATTENTION = (
    "midlayer.{}.weight",
    "midlayer.mlp.{}_proj.weight",
    "midlayer.self_attn.{}_proj.weight",
)

# shape, what is done to the file, and the stage that has to be named
FAULTS = {
    "o transposed": ("square", changed(ATTENTION.format("o"), lambda x: x.T), "o"),
    "gate transposed": ("square", changed(MLP.format("gate"), lambda x: x.T), "mlp"),
    "down transposed": ("square", changed(MLP.format("down"), lambda x: x.T), "mlp"),
    "gate and up swapped": ("plain", swapped(MLP.format("gate"), MLP.format("up")), "mlp"),
    "k and v swapped": ("plain", swapped(ATTENTION.format("k"), ATTENTION.format("v")), "k"),
    "norms of embedding and state swapped":
        ("plain", swapped(NORM.format("input_layernorm"), NORM.format("hidden_norm")), "input_layernorm"),
    "norm after attention swapped with the last":
        ("plain", swapped(NORM.format("post_attention_layernorm"), "norm.weight"), "mlp"),
    "aux states in another order":
        ("plain", changed("fc.weight", lambda x: np.concatenate([x[:, 48:], x[:, :48]], axis=1)), "fc"),
    "norms of the aux states swapped": ("fc_norm", swapped("fc_norm.0.weight", "fc_norm.2.weight"), "fc"),
    "state before embedding":
        ("plain", changed(ATTENTION.format("q"), lambda x: np.concatenate([x[:, 24:], x[:, :24]], axis=1)), "q"),
    "heads in another order":
        ("plain", changed(ATTENTION.format("q"), lambda x: x.reshape(4, 10, 48)[::-1].reshape(-1, 48)), "q"),
    "rope halves interleaved":
        ("plain", changed(ATTENTION.format("k"), lambda x: x.reshape(2, 2, 5, 48).swapaxes(1, 2).reshape(20, 48)), "k"),
    "d2t absolute": ("plain", changed("d2t", lambda x: x + np.arange(len(x))), "token"),
    "head's rows rolled": ("plain", changed("lm_head.weight", lambda x: np.roll(x, 1, axis=0)), "logits"),
    "another embedding": ("plain", changed("embed_tokens.weight", lambda x: x[::-1]), "embedding"),
    "NaN in v": ("plain", changed(ATTENTION.format("v"), lambda x: np.where(np.arange(48) == 5, np.nan, x)), "v"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_file_is_named_by_its_first_stage(fault, tmp_path):
    name, change, stage = FAULTS[fault]
    draft = fixture.draft(name, "float32")
    convert.write(draft, "run", tmp_path)
    found = tensors.read(tmp_path)
    change(found)
    tensors.save(tmp_path / tensors.FILE, found)
    report = parity.compare(draft, tmp_path)
    assert not report.ok and report.first.stage == stage


THETA = fields.rope_fields(5e5, None)
CONFIGS = {
    "theta": ("plain", THETA, "q", "draft step 1"),  # position 0 is not turned
    "rope scaling lost": ("llama3", THETA, "q", "draft step 1"),
    "eps": ("plain", dict(rms_norm_eps=1e-2), "input_layernorm", "prefill"),
    "norm_output": ("plain", dict(norm_output=True), "carried", "prefill"),
}


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_fault_in_the_config_is_named_by_its_first_stage(fault, tmp_path):
    name, fields, stage, row = CONFIGS[fault]
    draft = fixture.draft(name, "float32")
    convert.write(draft, "run", tmp_path)
    fixture.edit_config(tmp_path, **fields)
    report = parity.compare(draft, tmp_path)
    assert not report.ok and (report.first.stage, report.first.row) == (stage, row)


def test_another_step_of_the_run_does_not_agree(tmp_path):
    convert.write(fixture.draft(seed=1), "run", tmp_path)
    assert parity.compare(fixture.draft(seed=0), tmp_path).first.stage == "embedding"


def test_a_single_aux_state_differs_because_engines_skip_fc(tmp_path):
    draft = fixture.draft("one_state", "float32")
    convert.write(draft, "run", tmp_path)
    assert parity.compare(draft, tmp_path).first.stage == "fc"


def test_a_directory_that_cannot_be_computed_with_is_refused(tmp_path):
    draft = fixture.draft()
    convert.write(draft, "run", tmp_path)
    good = convert.read_config(tmp_path)
    for changed, text in (
        (dict(head_dim=5), "self_attn.q_proj.weight' is"),
        (dict(torch_dtype="int8"), "torch_dtype='int8'"),
    ):
        fixture.edit_config(tmp_path, **good | changed)
        with pytest.raises(WeightError, match=text):
            parity.compare(draft, tmp_path)
    fixture.edit_config(tmp_path, **good | {"draft_vocab_size": 0})
    with pytest.raises(ConfigError, match="draft_vocab_size=0"):
        parity.compare(draft, tmp_path)
    fixture.edit_config(tmp_path, **good)
    with pytest.raises(WeightError, match="intermediate_size=40, the checkpoint's is 24"):
        parity.compare(fixture.draft("square"), tmp_path)
    found = tensors.read(tmp_path)
    found["layers.0.hidden_norm.weight"] = found.pop("midlayer.hidden_norm.weight")
    tensors.save(tmp_path / tensors.FILE, found)
    with pytest.raises(WeightError, match=r"no tensor 'midlayer\.hidden_norm\.weight'; `bridge check`"):
        parity.compare(draft, tmp_path)
