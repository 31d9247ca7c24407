"""Failures that people reported in public, planted in a tiny draft directory: `bridge check` gives the right finding.

A case's name is its number in the collection that this project started from. Where it is a matter of an engine's
version or of the launch line, the case says which.
"""

import json

import bridge_fixture as fixture
import numpy as np
import pytest
from test_bridge_check import TARGET, absolute, edit_tensors, renamed_layer, replace

from bridge import convert
from bridge.check import check
from eagle3_jax import tensors
from eagle3_jax.errors import UserError

IDS, AUX = "eagle_aux_hidden_state_layer_ids", "eagle_config.eagle_aux_hidden_state_layer_ids"
Q, FC, HEAD = "midlayer.self_attn.q_proj.weight", "fc.weight", "lm_head.weight"
SERVER = "python -m sglang.launch_server --model-path T --dtype bfloat16 --speculative-num-steps 3 " \
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens 4"  # fmt: skip
DRAFT = "--speculative-draft-model-path out/draft"


class Case:
    """`tensors` edits the tensors, `fields` config.json, `target` the target's config; the rest goes to `check`."""

    def __init__(
        self, where, *words, severity="error", tensors=None, fields=None, target=None, shape=None, **kwargs
    ):
        self.where, self.words, self.severity, self.shape = where, words, severity, shape or {}
        self.tensors, self.fields, self.target, self.kwargs = tensors, fields, target, kwargs


def drop(*names):
    return lambda t: [t.pop(name) for name in names]


def add(name, *shape):
    x = np.linspace(0.5, 1.5, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    return lambda t: t.update({name: x.astype(t[FC].dtype)})


def aux(*outputs, top=None):
    return {"eagle_config": {IDS: list(outputs)}, IDS: [k + 1 for k in outputs] if top is None else top}


def decoding_to(draft_id, target_id):
    def change(d2t):
        return np.where(np.arange(len(d2t)) == draft_id, target_id - draft_id, d2t)

    return lambda t: (t.pop("t2d"), t.update(d2t=change(t["d2t"])))


FULL = dict(draft_vocab_size=61)
OLD = dict(engine="sglang:0.5.11")
CASES = {
    # names and shapes
    "NS-01": Case("layers.0.", "rename it", "0.5.11 drops it", tensors=renamed_layer("layers.0."), **OLD),
    "NS-01 sglang-jax": Case("layers.0.", "sglang-jax", tensors=renamed_layer("layers.0."), engine="sglang-jax"),
    "NS-01 tpu-inference": Case("layers.0.", "refuses", tensors=renamed_layer("layers.0."), engine="tpu-inference"),
    "NS-01 newest": Case("layers.0.", "other engines do not", severity="warning", tensors=renamed_layer("layers.0.")),
    "NS-02": Case("architectures", "Qwen3ForCausalLM", fields={"architectures": ["Qwen3ForCausalLM"]}),
    "NS-02 absent": Case("architectures", "LlamaForCausalLMEagle3", fields={"architectures": ...}),
    "NS-04": Case(HEAD, "missing", "head could be copied", tensors=drop(HEAD), shape=FULL),
    "NS-04 reduced": Case(HEAD, "missing", "uninitialised", tensors=drop(HEAD)),
    "NS-05": Case("embed_tokens.weight", "61 of 61 rows differ", "untrained", target={},
                  tensors=replace("embed_tokens.weight", lambda x: x + np.ones_like(x))),
    "NS-05 vllm": Case("embed_tokens.weight", "serves with this one", target={}, engine="vllm",
                       tensors=replace("embed_tokens.weight", lambda x: x + np.ones_like(x))),
    "NS-06": Case(FC, "3 states of width 36", "target_hidden_size absent", target={"hidden_size": 36},
                  tensors=replace(FC, lambda x: np.concatenate([x, x[:, :36]], 1))),
    "NS-08": Case("tie_word_embeddings", "beyond its end", fields={"tie_word_embeddings": True}),
    "NS-09": Case("tie_word_embeddings", "True", fields={"tie_word_embeddings": True}, shape=FULL),
    "NS-10": Case("tie_word_embeddings", "leave lm_head.weight out", fields={"tie_word_embeddings": True}),
    "NS-11": Case(Q, "[40, 48]", fields={"head_dim": ...}),
    "NS-13": Case("num_hidden_layers", "48", "1 decoder layer", fields={"num_hidden_layers": 48}),
    "NS-14": Case("num_hidden_layers", "SGLang", "vLLM", "[N, H]", fields={"num_hidden_layers": 2},
                  tensors=add("layers.1.self_attn.q_proj.weight", 40, 24)),
    "NS-16": Case("midlayer.self_attn.q_proj.bias", "has not", "drops it",
                  tensors=add("midlayer.self_attn.q_proj.bias", 40)),
    "NS-16 config": Case("attention_bias", "uninitialised", fields={"attention_bias": True}),
    "NS-17": Case("midlayer.self_attn.q_norm.weight", "has not", tensors=add("midlayer.self_attn.q_norm.weight", 10)),
    "NS-21": Case("midlayer.hidden_norm.weight", "missing",
                  tensors=drop(FC, "midlayer.hidden_norm.weight", "d2t")),
    "NS-23": Case("midlayer.mlp.gate_proj.weight", "the transpose",
                  tensors=replace("midlayer.mlp.gate_proj.weight", lambda x: x.T)),
    # vocabulary maps
    "VM-03": Case("d2t", "zeros", "never loaded", tensors=replace("d2t", np.zeros_like)),
    "VM-04": Case("d2t", "absolute target ids", "subtract arange", tensors=replace("d2t", absolute)),
    "VM-05": Case("d2t", "missing", "into this file", tensors=drop("d2t")),
    "VM-06": Case("d2t", "first 17 target ids", tensors=lambda t: t.update(d2t=np.zeros(17, np.int64)) or t.pop("t2d")),
    "VM-10": Case("draft_vocab_size", "0", fields={"draft_vocab_size": 0}),
    "VM-10 negative": Case("draft_vocab_size", "-1", fields={"draft_vocab_size": -1}),
    "VM-10 float": Case("draft_vocab_size", "4.0", fields={"draft_vocab_size": 4.0}),
    "VM-10 above": Case("draft_vocab_size", "at most", fields={"draft_vocab_size": 62}),
    "VM-12": Case("d2t", "int32", "int64", tensors=replace("d2t", lambda x: x.astype(np.int32))),
    "VM-13": Case("d2t", "draft id 3 stands for target id 70", tensors=decoding_to(3, 70)),
    "VM-13 twice": Case("d2t", "twice", "[0, 1]", tensors=lambda t: decoding_to(1, int(t["d2t"][0]))(t)),
    "VM-16": Case("vocab_size", "61", "32", target={"vocab_size": 32}),
    # hidden states
    "HS-01": Case(FC, "takes 9 states", tensors=replace(FC, lambda x: np.concatenate([x, x, x], 1))),
    "HS-02": Case(AUX, "first of 32", severity="warning", fields=aux(0, 1, 2), target={"num_hidden_layers": 32}),
    "HS-03": Case(AUX, "absent", "[1, 3, 4]", severity="warning", fields={"eagle_config": {}, IDS: ...}, target={}),
    "HS-05": Case(IDS, "one more than the nested one", fields=aux(1, 3, 5, top=[1, 3, 5])),
    "HS-05 vllm": Case(IDS, "as layer inputs", fields={"eagle_config": {IDS: [1, 3, 5]}, IDS: ...}, engine="vllm"),
    "HS-06": Case(AUX, "whatever it says", "SGLang, llama.cpp", fields=aux(1, 4, 6), target={}, engine="sglang-jax"),
    "HS-08": Case("fc_norm.1.weight", "fc_norm: true", shape=dict(fc_norm=True), fields={"fc_norm": ...}),
    "HS-08 reverse": Case("fc_norm.1.weight", "missing", fields={"fc_norm": True}),
    "HS-08 before": Case("input_norm.weight", "norm_before_fc: true", tensors=add("input_norm.weight", 72)),
    "HS-08 version": Case("norm_before_fc", "0.5.17 ignores", shape=dict(norm_before_fc=True), engine="sglang:0.5.17"),
    "HS-08 residual": Case("norm_before_residual", "SGLang 0.5.23 ignores", fields={"norm_before_residual": True}),
    "HS-09": Case("use_aux_hidden_state", "capture nothing",
                  fields={"eagle_config": {IDS: [1, 3, 4], "use_aux_hidden_state": False}}),
    "HS-10": Case(AUX, "collide in 3 layers", fields={"eagle_config": {}, IDS: ...}, target={"num_hidden_layers": 3}),
    # positions
    "PR-01": Case("max_position_embeddings", "16", "target's 256", fields={"max_position_embeddings": 16}, target={}),
    "PR-04": Case("--context-length", "trained on texts of at most 16", severity="note",
                  fields={"provenance": {"trained_length": 16}},
                  line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE3 --context-length 64"),
    "PR-05": Case("--context-length", "256", fields={},
                  line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE3 --context-length 512"),
    "PR-07": Case("rope_theta", "both names", severity="warning", fields={"rope_theta": ...}),
    "PR-08": Case("rope_theta", "both names", severity="warning", fields={"rope_theta": ..., "rope_scaling": ...},
                  shape={"rope_scaling": tuple(sorted(fixture.LLAMA3.items()))}),
    "PR-10": Case("rope_theta", "share one", severity="warning", target={"rope_theta": 5e5}),
    "PR-13": Case("rope_parameters", "set both alike", fields={"rope_scaling": fixture.YARN}),
    # dtypes and values
    "NU-01": Case("norm.weight", "every value is 1", severity="warning", tensors=replace("norm.weight", np.ones_like)),
    "NU-07": Case(Q, "NaN", tensors=replace(Q, lambda x: x * np.float32("nan").astype(x.dtype))),
    "NU-08": Case(FC, "float32", "bfloat16", tensors=replace(FC, lambda x: x.astype(np.float32))),
    "NU-08 target": Case("torch_dtype", "the target's float16", severity="note", target={"torch_dtype": "float16"}),
    "CR-11": Case(Q, "every value is 0", "placeholder", tensors=replace(Q, np.zeros_like)),
    # the launch line
    "LF-01": Case("--speculative-algorithm", "EAGLE-3", "accepts nothing",
                  line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE"),
    "LF-02": Case("--speculative-draft-model-path", "absent", "own draft",
                  line=f"{SERVER} --speculative-algorithm EAGLE3"),
    "LF-06": Case("--tp-size", "beyond one device", severity="warning",
                  line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE3 --tp-size 4".replace("sglang.", "sgl_jax.")),
    "VM-19": Case("--speculative-token-map", "several ranks", severity="warning",
                  line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE3 --tp 2 --speculative-token-map hot.pt"),
    # an engine refuses what another drops
    "IO-07": Case("midlayer.self_attn.q_norm.weight", "vLLM 0.32.0 refuses the file",
                  tensors=add("midlayer.self_attn.q_norm.weight", 10), engine="vllm"),
}  # fmt: skip


@pytest.fixture
def directories(tmp_path):
    def make(case: Case):
        draft = fixture.draft(**case.shape)
        directory = tmp_path / "draft"
        convert.write(draft, "run", directory)
        if case.tensors:
            edit_tensors(directory, case.tensors)
        if case.fields:
            fixture.edit_config(directory, **case.fields)
        if case.target is None:
            return directory, None
        target = tmp_path / "target"
        target.mkdir()
        (target / "config.json").write_text(json.dumps(TARGET | {"rope_theta": 1e4} | case.target))
        tensors.save(target / tensors.FILE, {"model.embed_tokens.weight": draft.embedding.astype(np.float32)})
        return directory, target

    return make


@pytest.mark.parametrize("name", CASES)
def test_a_reported_failure_is_found(name, directories):
    case = CASES[name]
    findings = check(*directories(case), **case.kwargs)
    said = [f for f in findings if case.where in f.where and f.severity == case.severity]
    assert said, findings
    text = [" | ".join((f.found, f.wanted, f.fix)) for f in said]
    assert any(all(word in line for word in case.words) for line in text), text


ACCEPTED = {
    "NS-24 theta at the top alone": Case(None, fields={"rope_parameters": ...}),
    "NS-24 ids null": Case(None, fields={"eagle_config": {IDS: None}}, target={}),
    "NS-24 no d2t": Case(None, tensors=drop("d2t", "t2d"), shape=FULL),
    "VM-03 whole vocabulary": Case(None, tensors=replace("d2t", np.zeros_like), shape=FULL),
    "VM-04 offsets": Case(None),
    "VM-15": Case(None, tensors=drop("d2t", "t2d"), shape=FULL),
    "NS-05 omitted": Case(None, tensors=drop("embed_tokens.weight"), target={}),
    "LF-01 right": Case(None, line=f"{SERVER} {DRAFT} --speculative-algorithm EAGLE3"),
    "IO-02": Case(None),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_engines_take_is_no_error(name, directories):
    case = ACCEPTED[name]
    assert [f for f in check(*directories(case), **case.kwargs) if f.severity == "error"] == []


def cut(directory):
    path = directory / tensors.FILE
    path.write_bytes(path.read_bytes()[:-100])


def pickled(directory):
    (directory / tensors.FILE).unlink()
    (directory / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def twice(directory):
    (directory / tensors.FILE).rename(directory / "a.safetensors")
    (directory / "b.safetensors").write_bytes((directory / "a.safetensors").read_bytes())


def shard_missing(directory):
    (directory / tensors.FILE).unlink()
    (directory / tensors.INDEX).write_text(
        json.dumps({"weight_map": {FC: "model-00001-of-00002.safetensors"}})
    )


UNREADABLE = {
    "IO-04": (cut, "truncated or not safetensors"),
    "pickle": (pickled, "a pickle, which is never opened"),
    "two files": (twice, "which one is meant?"),
    "no shard": (shard_missing, "names the shard 'model-00001-of-00002.safetensors', which is not there"),
    "no config": (lambda d: (d / "config.json").unlink(), "not found; a draft directory is wanted"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_is_one_line(name, directories):
    fault, words = UNREADABLE[name]
    directory, _ = directories(Case(None))
    fault(directory)
    with pytest.raises(UserError) as error:
        check(directory)
    assert words in str(error.value) and "\n" not in str(error.value)
