"""Faults planted one at a time in a healthy draft directory: each is found, and called by its name."""

import json

import bridge_fixture as fixture
import ml_dtypes
import numpy as np
import pytest

from bridge import convert
from bridge.check import check
from eagle3_jax import tensors
from eagle3_jax.errors import ConfigError, WeightError

Q, LM_HEAD, FC = "midlayer.self_attn.q_proj.weight", "lm_head.weight", "fc.weight"
TARGET = {
    "model_type": "llama", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 8,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61, "max_position_embeddings": 256,
}  # fmt: skip


@pytest.fixture
def healthy(tmp_path):
    convert.write(fixture.draft(), "run", tmp_path / "draft")
    return tmp_path / "draft"


@pytest.fixture
def target(tmp_path):
    directory = tmp_path / "target"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(TARGET))
    tensors.save(
        directory / tensors.FILE, {"model.embed_tokens.weight": fixture.draft().embedding.astype(np.float32)}
    )
    return directory


def edit_tensors(directory, change) -> None:
    found = tensors.read(directory)
    change(found)
    tensors.save(directory / tensors.FILE, found)


def rename(old, new):
    return lambda t: t.update({new: t.pop(old)})


def replace(name, function):
    return lambda t: t.update({name: function(t[name])})


def renamed_layer(prefix):
    def change(t):
        for name in [n for n in t if n.startswith("midlayer.")]:
            t[name.replace("midlayer.", prefix)] = t.pop(name)

    return change


def all_renamed(t):
    for name in [n for n in t if n not in ("d2t", "t2d")]:
        t[f"model.{name}"] = t.pop(name)


def one_nan(x):
    x = x.copy()
    x.flat[3] = np.nan
    return x


def one_inf(x):
    x = x.copy()
    x.flat[0] = -np.inf
    return x


def absolute(d2t):
    return d2t + np.arange(len(d2t))


def moved(d2t):
    """One draft id taught to stand for a target id that t2d does not list."""
    ids = absolute(d2t)
    free = next(i for i in range(61) if i not in ids)
    return np.where(np.arange(len(ids)) == 16, free, ids) - np.arange(len(ids))


def twice(d2t):
    ids = absolute(d2t)
    return np.where(np.arange(len(ids)) == 1, ids[0], ids) - np.arange(len(ids))


# what is done to the tensors, where it shows, words that the finding must hold
TENSORS = {
    "transposed": (replace(Q, lambda x: x.T), Q, "the transpose"),
    "transposed head": (replace(LM_HEAD, lambda x: x.T), LM_HEAD, "the transpose"),
    "misshapen": (replace(FC, lambda x: x[:, :48]), FC, "[24, 48]"),
    "flat": (replace(FC, lambda x: x.reshape(-1)), FC, "[1728]"),
    "unfused heads": (replace(Q, lambda x: x.reshape(4, 10, 48)), Q, "[4, 10, 48]"),
    "rows missing in the head": (replace(LM_HEAD, lambda x: x[:9]), "config.json: draft_vocab_size", "9"),
    "float weights in another dtype": (replace(FC, lambda x: x.astype(np.float32)), FC, "float32"),
    "integer weights": (replace(FC, lambda x: (99 * x.astype(np.float32)).astype(np.int32)), FC, "int32"),
    "float8 weights": (replace(FC, lambda x: x.astype(ml_dtypes.float8_e4m3fn)), FC, "None"),
    "int32 d2t": (replace("d2t", lambda x: x.astype(np.int32)), "d2t", "int64"),
    "float d2t": (replace("d2t", lambda x: x.astype(np.float32)), "d2t", "int64"),
    "float t2d": (replace("t2d", lambda x: x.astype(np.float32)), "t2d", "bool"),
    "integer embedding": (replace("embed_tokens.weight", lambda x: x.astype(np.int8)), "embed_tokens.weight", "int8"),
    "NaN": (replace(Q, one_nan), Q, "1 values are NaN"),
    "inf in the embedding": (replace("embed_tokens.weight", one_inf), "embed_tokens.weight", "1 values are NaN"),
    "absolute d2t": (replace("d2t", absolute), "d2t", "absolute target ids"),
    "d2t out of range": (replace("d2t", lambda x: x + 61), "d2t", "within 0 .. 60"),
    "negative target ids": (replace("d2t", lambda x: x - 61), "d2t", "within 0 .. 60"),
    "target id twice": (replace("d2t", twice), "d2t", "twice"),
    "d2t and t2d disagree": (replace("d2t", moved), "t2d", "disagrees with d2t on 2"),
    "t2d inverted": (replace("t2d", lambda x: ~x), "t2d", "disagrees"),
    "d2t short": (replace("d2t", lambda x: x[:-1]), "d2t", "[16]"),
    "t2d short": (replace("t2d", lambda x: x[:-1]), "t2d", "[60]"),
    "a bias": (lambda t: t.update({"midlayer.self_attn.q_proj.bias": np.zeros(40, np.float32)}),
               "midlayer.self_attn.q_proj.bias", "drops it without a word"),
    "q_norm": (lambda t: t.update({"midlayer.self_attn.q_norm.weight": np.ones(10, np.float32)}),
               "midlayer.self_attn.q_norm.weight", "drops it"),
    "both spellings": (lambda t: t.update({"model.fc.weight": t[FC]}), "model.fc.weight", "none"),
    "fc called fcs": (rename(FC, "fcs.weight"), "fcs.weight", "rename it: SGLang 0.5.23 drops it"),
    "head under model.": (rename(LM_HEAD, "model.lm_head.weight"), "model.lm_head.weight", "0.5.23 drops it"),
}  # fmt: skip


def findings_of(directory, **kwargs):
    return [f"{f.severity} {f.where} | {f.found} | {f.wanted} | {f.fix}" for f in check(directory, **kwargs)]


def test_a_healthy_export_gives_no_finding(tmp_path, target):
    for name in fixture.SHAPES:
        convert.write(fixture.draft(name), "run", tmp_path / name)
        assert check(tmp_path / name) == []
        draft = fixture.draft(name)
        fixture.edit_config(target, rope_theta=draft.shape.rope_theta)
        tensors.save(target / tensors.FILE, {"model.embed_tokens.weight": draft.embedding})
        assert check(tmp_path / name, target) == []


def test_a_float32_export_gives_a_note_and_no_error(tmp_path):
    convert.write(fixture.draft(dtype="float32"), "run", tmp_path / "draft")
    (finding,) = check(tmp_path / "draft")
    assert finding.severity == "note" and "--dtype" in finding.wanted + finding.fix


@pytest.mark.parametrize("fault", TENSORS)
def test_a_fault_in_the_tensors_is_the_one_finding(fault, healthy):
    change, where, words = TENSORS[fault]
    edit_tensors(healthy, change)
    (finding,) = findings_of(healthy)
    assert finding.startswith(f"error {where} |") and words in finding


def test_every_missing_tensor_is_an_error(healthy):
    full = tensors.read(healthy)
    for name in full:
        tensors.save(healthy / tensors.FILE, {k: v for k, v in full.items() if k != name})
        (finding,) = check(healthy)
        severity = "warning" if name == "embed_tokens.weight" else "error"  # the engine has the target's
        assert (finding.severity, finding.where, finding.found) == (severity, name, "missing")


# prefix of the layer's tensors -> engines that find them under it (bridge/engines.py)
PREFIXES = {
    "layers.0.": {"sglang:0.5.12", "sglang:0.5.23", "vllm", "llama.cpp"},
    "model.layers.0.": {"sglang:0.5.12", "sglang:0.5.23"},
    "model.midlayer.": {"sglang:0.5.11", "sglang:0.5.12", "sglang:0.5.23"},
    "midlayer.0.": set(),
    "decoder.": set(),
}


@pytest.mark.parametrize(
    "engine",
    ["sglang:0.5.11", "sglang:0.5.12", "sglang:0.5.23", "vllm", "sglang-jax", "tpu-inference", "llama.cpp"],
)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_every_tensor_under_another_name_is_called_by_its_right_one(prefix, engine, healthy):
    edit_tensors(healthy, renamed_layer(prefix))
    findings = [f for f in check(healthy, engine=engine) if prefix in f.where]
    assert len(findings) == 10
    for f in findings:
        assert f.severity == ("warning" if engine in PREFIXES[prefix] else "error")
        assert f.wanted == "midlayer." + f.where.removeprefix(prefix)


def test_names_that_all_begin_with_model_load_in_sglang_but_for_the_head(healthy):
    edit_tensors(healthy, all_renamed)
    findings = check(healthy)
    assert len(findings) == 14
    assert [f.where for f in findings if f.severity == "error"] == ["model.lm_head.weight"]
    assert {f.where.removeprefix("model.") for f in findings} == {f.wanted for f in findings}
    assert {f.severity for f in check(healthy, engine="vllm")} == {"error"}


IDS = "eagle_aux_hidden_state_layer_ids"
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# fields changed (... deletes), the key of the finding, its severity, words that it must hold
CONFIG = {
    "architecture": (dict(architectures=["LlamaForCausalLM"]), "architectures", "error", "LlamaForCausalLMEagle3"),
    "no architecture": (dict(architectures=...), "architectures", "error", "absent"),
    "model type": (dict(model_type="eagle3"), "model_type", "error", "'llama'"),
    "two layers": (dict(num_hidden_layers=2), "num_hidden_layers", "error", "1"),
    "activation": (dict(hidden_act="gelu"), "hidden_act", "error", "silu"),
    "tied": (dict(tie_word_embeddings=True), "tie_word_embeddings", "error", "target's embedding"),
    "attention bias": (dict(attention_bias=True), "attention_bias", "error", "uninitialised"),
    "bias": (dict(bias=True), "bias", "error", "no biases"),
    "nextn": (dict(num_nextn_predict_layers=1), "num_nextn_predict_layers", "error", "multi-token"),
    "another width": (dict(target_hidden_size=32), "target_hidden_size", "error", "width"),
    "no draft vocabulary": (dict(draft_vocab_size=...), "draft_vocab_size", "error", "AttributeError"),
    "null draft vocabulary": (dict(draft_vocab_size=None), "draft_vocab_size", "error", "None"),
    "no eps": (dict(rms_norm_eps=...), "rms_norm_eps", "error", "absent"),
    "text as a size": (dict(hidden_size="24"), "hidden_size", "error", "'24'"),
    "heads": (dict(num_key_value_heads=3), "num_key_value_heads", "error", "divisor of 4"),
    "width": (dict(num_attention_heads=10), "num_attention_heads", "error", "divisor of hidden_size=24"),
    "dtypes disagree": (dict(dtype="float16"), "dtype", "error", "bfloat16"),
    "unknown dtype": (dict(dtype="int8", torch_dtype="int8"), "torch_dtype", "error", "int8"),
    "no dtype": (dict(dtype=..., torch_dtype=...), "torch_dtype", "warning", "float16"),
    "theta differs": (dict(rope_theta=5e5), "rope_parameters", "error", "500000"),
    "scaling differs": (dict(rope_scaling=LLAMA3 | {"original_max_position_embeddings": 64}),
                        "rope_parameters", "error", "llama3"),
    "unknown rope": (dict(rope_scaling={"rope_type": "spiral"}), "rope_theta", "error", "spiral"),
    "rope without a field": (dict(rope_scaling=LLAMA3), "rope_theta", "error", "original_max_position_embeddings"),
    "one rope schema": (dict(rope_parameters=...), "rope_parameters", "warning", "both names"),
    "no rope": (dict(rope_parameters=..., rope_theta=...), "rope_theta", "error", "10000"),
    "lists disagree": ({IDS: [1, 3, 4]}, IDS, "error", "[2, 4, 5]"),
    "no top-level list": ({IDS: ...}, IDS, "warning", "vLLM"),
    "no aux ids": (dict(eagle_config={}), f"eagle_config.{IDS}", "warning", "default"),
    "descending": (dict(eagle_config={IDS: [4, 3, 1]}), f"eagle_config.{IDS}", "error", "ascending"),
    "repeated": (dict(eagle_config={IDS: [1, 1, 4]}), f"eagle_config.{IDS}", "error", "ascending"),
    "negative": (dict(eagle_config={IDS: [-1, 3, 4]}), f"eagle_config.{IDS}", "error", "ascending"),
    "ids as text": (dict(eagle_config={IDS: "1,3,4"}), f"eagle_config.{IDS}", "error", "ascending"),
    "another count": (dict(eagle_config={IDS: [1, 3], "use_aux_hidden_state": True}, **{IDS: [2, 4]}),
                      "num_aux_hidden_states", "error", "2"),
    "no capture": (dict(eagle_config={IDS: [1, 3, 4], "use_aux_hidden_state": False}),
                   "eagle_config.use_aux_hidden_state", "error", "capture nothing"),
}  # fmt: skip


@pytest.mark.parametrize("fault", CONFIG)
def test_a_fault_in_the_config_is_the_one_finding(fault, healthy):
    fields, key, severity, words = CONFIG[fault]
    fixture.edit_config(healthy, **fields)
    findings = [f for f in findings_of(healthy) if " config.json: " in f]
    assert len(findings) == 1, findings
    assert findings[0].startswith(f"{severity} config.json: {key} |") and words in findings[0]


def test_sizes_that_contradict_the_tensors_are_errors(healthy):
    good = convert.read_config(healthy) | {"fc_norm": False}
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "head_dim",
        "vocab_size",
        "fc_norm",
    ):
        fixture.edit_config(healthy, **good | {key: 2 * good[key] or True})
        assert any(f.severity == "error" for f in check(healthy)), key
    fixture.edit_config(healthy, **good | {"draft_vocab_size": 9})
    assert any("draft_vocab_size | 9 | 17" in f for f in findings_of(healthy))
    fixture.edit_config(healthy, **good | {"norm_before_fc": True})
    assert [f.where for f in check(healthy)] == ["input_norm.weight"]


# change of the target's config, key of the finding, words
TARGETS = {
    "shorter context": (dict(max_position_embeddings=512), "max_position_embeddings", "512"),
    "another vocabulary": (dict(vocab_size=64), "vocab_size", "64"),
    "another width": (dict(hidden_size=32), "hidden_size", "32"),
    "too few layers": (dict(num_hidden_layers=5), f"eagle_config.{IDS}", "at most 3"),
    "states without residual": (dict(model_type="gemma3_text"), f"eagle_config.{IDS}", "residual"),
}


@pytest.mark.parametrize("fault", TARGETS)
def test_a_draft_that_does_not_fit_the_target_is_found(fault, healthy, target):
    fields, key, words = TARGETS[fault]
    fixture.edit_config(target, **fields)
    (finding,) = findings_of(healthy, target=target)
    assert finding.startswith(f"error config.json: {key} |") and words in finding


def test_ids_that_deepseek_targets_would_take_as_inputs_are_found(healthy, target):
    fixture.edit_config(target, model_type="deepseek_v3")
    assert check(healthy, target) == []
    fixture.edit_config(healthy, eagle_config={IDS: [0, 3, 4]}, **{IDS: [1, 4, 5]})
    assert check(healthy) == []
    (finding,) = findings_of(healthy, target=target)
    assert "as layer inputs on a deepseek_v3 target" in finding


def test_the_embedding_is_compared_with_the_targets(healthy, target):
    assert check(healthy, target) == []
    edit_tensors(target, replace("model.embed_tokens.weight", lambda x: np.concatenate([x[:1] + 1, x[1:]])))
    (finding,) = findings_of(healthy, target=target)
    assert finding.startswith("error embed_tokens.weight | 1 of 61 rows differ")
    (target / tensors.FILE).unlink()
    (finding,) = check(healthy, target)
    assert finding.severity == "note" and "not verified" in finding.found


def test_what_cannot_be_read_is_an_error_of_one_line(tmp_path, healthy):
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: not found"):
        check(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"nowhere/config\.json: not found"):
        check(healthy, tmp_path / "nowhere")
    for text in ("{", "[]"):
        (healthy / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json: "):
            check(healthy)
    (healthy / "config.json").write_text("{}")
    assert {f.severity for f in check(healthy)} == {"error", "warning"}
    (healthy / tensors.FILE).write_bytes(b"12345678901234567890")
    with pytest.raises(WeightError, match=r"model\.safetensors: truncated or not safetensors"):
        check(healthy)
