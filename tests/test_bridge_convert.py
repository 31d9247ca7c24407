"""Checkpoint -> draft directory: every number arrives, under the engines' names, and nothing is overwritten."""

import dataclasses
import json
import shlex

import bridge_fixture as fixture
import jax
import numpy as np
import pytest
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from bridge import convert, fields, weight_map
from eagle3_jax import commands, tensors
from eagle3_jax.draft import model
from eagle3_jax.errors import CheckpointError, ConfigError, WeightError
from eagle3_jax.layers import rope_frequencies
from eagle3_jax.train import checkpoint


@pytest.mark.parametrize("name", fixture.SHAPES)
def test_every_parameter_has_one_row_and_every_row_a_parameter(name):
    shape = fixture.draft(name).shape
    _, params, _ = model.abstract(shape)
    rows = weight_map.rows(shape)
    assert sorted(weight_map.flatten(params)) == sorted(row.ours for row in rows)
    assert len({row.theirs for row in rows}) == len(rows)


@pytest.mark.parametrize("name", fixture.SHAPES)
def test_a_draft_survives_the_file_bit_for_bit(name, tmp_path):
    draft = fixture.draft(name, "float32")
    convert.write(draft, "run", tmp_path / "out")
    found = tensors.read(tmp_path / "out")
    assert {k: v.shape for k, v in found.items()} == weight_map.their_shapes(draft.shape)
    own = {k: v for k, v in found.items() if k not in weight_map.BESIDE}
    back = weight_map.flatten(weight_map.load(own, draft.shape))
    for path, x in weight_map.flatten(draft.params).items():
        np.testing.assert_array_equal(back[path], x, err_msg=path)
    assert found["embed_tokens.weight"].tobytes() == draft.embedding.tobytes()
    assert found["d2t"].dtype == np.int64 and found["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(np.flatnonzero(found["t2d"]), draft.d2t + np.arange(len(draft.d2t)))


def test_heads_merge_in_order_and_weights_are_out_by_in(tmp_path):
    draft = fixture.draft()
    shape, x = draft.shape, np.random.default_rng(0).standard_normal(48).astype(np.float32)
    theirs = weight_map.export(draft.params, shape)["midlayer.self_attn.k_proj.weight"]
    heads = np.stack([x @ draft.params["midlayer"]["k"]["kernel"][:, g] for g in range(2)])
    np.testing.assert_allclose((theirs @ x).reshape(2, shape.head_dim), heads, rtol=1e-5)


def test_all_that_does_not_fit_is_named_at_once():
    draft = fixture.draft()
    flat = weight_map.flatten(draft.params)
    params = {"fc": {"kernel": flat["fc/kernel"].T}, "strange": {"kernel": flat["fc/kernel"]}}
    with pytest.raises(WeightError) as caught:
        weight_map.export(params, draft.shape)
    text = str(caught.value)
    assert "unknown parameter 'strange/kernel'" in text
    assert "no parameter 'lm_head/kernel'" in text and "no parameter 'midlayer/o/kernel'" in text
    assert "'fc/kernel' is [24, 72], [72, 24] wanted" in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_have_the_dtype_that_the_features_were_computed_in(dtype, tmp_path):
    report = convert.write(fixture.draft(dtype=dtype), "run", tmp_path / "out")
    found = tensors.read(tmp_path / "out")
    assert {str(x.dtype) for name, x in found.items() if name not in weight_map.BESIDE} == {dtype}
    config = convert.read_config(tmp_path / "out")
    assert config["torch_dtype"] == config["dtype"] == dtype == report["dtype"]
    words = shlex.split(report["launch"])
    assert words[words.index("--dtype") + 1] == dtype


@pytest.mark.parametrize("name", ["plain", "llama3", "yarn", "linear"])
def test_transformers_reads_the_config_as_meant(name, tmp_path):
    draft = fixture.draft(name)
    convert.write(draft, "run", tmp_path / "out")
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert isinstance(read, LlamaConfig) and not read.tie_word_embeddings and not read.attention_bias
    for key in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
        "draft_vocab_size", "max_position_embeddings", "rms_norm_eps", "fc_norm", "norm_output",
    ):  # fmt: skip
        assert getattr(read, key, False) == getattr(draft.shape, key), key
    written = convert.read_config(tmp_path / "out")
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == draft.shape.rope_theta
    scaling = dict(draft.shape.rope_scaling or {"rope_type": "default"})
    assert read.rope_parameters == scaling | {"rope_theta": draft.shape.rope_theta}
    if scaling["rope_type"] != "default":
        theirs, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](read, "cpu")
        ours = rope_frequencies(draft.shape.head_dim, draft.shape.rope_theta, scaling)
        np.testing.assert_allclose(ours[0], theirs.numpy(), rtol=1e-6)
        assert ours[1] == pytest.approx(factor)


def test_aux_layers_are_written_as_outputs_for_sglang_and_as_inputs_for_vllm(tmp_path):
    convert.write(fixture.draft(), "run", tmp_path / "out")
    config = convert.read_config(tmp_path / "out")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["num_aux_hidden_states"] == 3


def test_the_config_alone_gives_the_draft_back(tmp_path):
    for name in fixture.SHAPES:
        draft = fixture.draft(name)
        convert.write(draft, "run", tmp_path / name)
        assert fields.draft_shape(convert.read_config(tmp_path / name), name) == draft.shape


def test_provenance_tells_run_data_and_the_accept_length_of_this_step_only(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    for step, expected in ((30, 1.75), (20, None)):
        (run / "evaluate.json").write_text(json.dumps(fixture.evaluated(1.75, step)))
        report = convert.write(fixture.draft(), run, tmp_path / "out")
        provenance = convert.read_config(tmp_path / "out")["provenance"]
        assert report["accept_length"] == provenance["predicted_accept_length"] == expected
    assert provenance["target"] == "some/target" and provenance["target_weights_digest"] == "abc"
    assert provenance["data_fingerprint"] == "def" and provenance["tokenizer_hash"] == "123"
    assert provenance["step"] == 30 and provenance["run"] == str(run)
    (run / "evaluate.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"evaluate\.json: not a result"):
        convert.write(fixture.draft(), run, tmp_path / "out")


def test_the_targets_special_tokens_are_copied_where_it_can_be_read(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 7]}))
    convert.write(fixture.draft(target=str(target)), "run", tmp_path / "out")
    config = convert.read_config(tmp_path / "out")
    assert config["bos_token_id"] == 1 and config["eos_token_id"] == [2, 7]


def test_an_earlier_export_is_replaced_and_nothing_else_is(tmp_path):
    out = tmp_path / "out"
    convert.write(fixture.draft(seed=0), "run", out)
    convert.write(fixture.draft(seed=1), "run", out)
    assert tensors.read(out)["d2t"].tolist() == fixture.draft(seed=1).d2t.tolist()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]

    (out / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"it holds 'notes\.txt'"):
        convert.write(fixture.draft(), "run", out)
    assert (out / "notes.txt").read_text() == "mine"
    convert.write(fixture.draft(), "run", out, force=True)
    assert not (out / "notes.txt").exists()

    fixture.edit_config(out, provenance=...)
    with pytest.raises(ConfigError, match="not an earlier export of ours"):
        convert.write(fixture.draft(), "run", out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="a file is in the way"):
        convert.write(fixture.draft(), "run", tmp_path / "file", force=True)
    with pytest.raises(ConfigError, match="holds the run"):
        convert.write(fixture.draft(), out / "runs" / "a", out, force=True)


def test_a_failed_export_leaves_the_earlier_one(tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert.write(fixture.draft(), "run", out)
    before = (out / "model.safetensors").read_bytes()
    monkeypatch.setattr(tensors, "save", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        convert.write(fixture.draft(seed=1), "run", out)
    assert (out / "model.safetensors").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_impossible_vocabulary_map_or_width_is_refused(tmp_path):
    draft = fixture.draft()
    for d2t, text in (
        (draft.d2t + 61, "distinct ids within"),
        (np.where(np.arange(17) == 1, draft.d2t[0] - 1, draft.d2t), "distinct ids within"),
        (draft.d2t.astype(np.int32), "int32"),
    ):
        broken = fixture.draft()
        broken.d2t = d2t
        with pytest.raises(WeightError, match=text):
            convert.write(broken, "run", tmp_path / "out")
    draft.embedding = draft.embedding[:, :20]
    with pytest.raises(WeightError, match="another width"):
        convert.write(draft, "run", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_trained_embedding_is_refused_because_the_engine_would_not_use_it(tmp_path):
    draft = fixture.draft()
    draft.meta["manifest"]["leaves"]["embedding/embedding"]["label"] = "train"
    with pytest.raises(WeightError, match="embedding/embedding was trained, but SGLang"):
        convert.write(draft, "run", tmp_path / "out")


def test_a_run_is_exported_from_its_checkpoint_path_alone(tmp_path):
    draft, run = fixture.draft("fc_norm"), tmp_path / "run"
    meta = draft.meta | {"shape": dataclasses.asdict(draft.shape)}
    frozen = {"embedding": {"embedding": draft.embedding}, "d2t": draft.d2t}
    checkpoint.start(run, frozen, {"draft": fixture.draft("fc_norm", seed=1).params}, meta)
    with checkpoint.Steps(run, keep=2) as steps:
        steps.save(30, {"draft": draft.params}, {"count": np.zeros(())}, {}, meta)
    (run / "evaluate.json").write_text(json.dumps(fixture.evaluated(1.5, 30)))
    wanted = convert.weights_of(draft)
    for path in (run, run / "steps" / "30"):
        report = convert.convert(path, tmp_path / "out")
        assert report["step"] == 30 and report["accept_length"] == 1.5
        found = tensors.read(tmp_path / "out")
        for name, x in wanted.items():
            assert found[name].tobytes() == np.ascontiguousarray(x).tobytes(), name
    assert convert.convert(run, tmp_path / "start", step=0)["accept_length"] is None
    assert not np.array_equal(tensors.read(tmp_path / "start")["fc.weight"], wanted["fc.weight"])


def test_the_launch_line_drafts_as_was_evaluated(tmp_path):
    result = fixture.evaluated(1.5, 30)
    result["settings"] |= dict(steps=4, topk=3, tokens=10)
    (tmp_path / "evaluate.json").write_text(json.dumps(result))
    launch = convert.write(fixture.draft(), tmp_path, tmp_path / "out")["launch"]
    assert "--speculative-num-steps 4 --speculative-eagle-topk 3 --speculative-num-draft-tokens 10" in launch


def test_options_are_only_written_where_they_are_on(tmp_path):
    """SpecForge takes a `norm_output` of false for a head without a norm."""
    for name in ("plain", "fc_norm", "norm_output"):
        convert.write(fixture.draft(name), "run", tmp_path / name)
        config = convert.read_config(tmp_path / name)
        assert {k: v for k, v in config.items() if k in ("fc_norm", "norm_output")} == (
            {} if name == "plain" else {name: True}
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_evaluated_is_what_is_exported(dtype):
    """Whatever dtype it is then computed in."""
    draft = fixture.draft("fc_norm", dtype)
    ours = weight_map.export(jax.tree.map(np.asarray, commands.serving_draft(draft).params), draft.shape)
    theirs = convert.weights_of(draft)
    assert ours.keys() <= theirs.keys()
    for name, x in ours.items():
        assert x.dtype == theirs[name].dtype and x.tobytes() == theirs[name].tobytes(), name
