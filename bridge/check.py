"""The static contract: will SGLang load every tensor of a draft directory, and read the config as meant?

A square matrix cannot be seen transposed here, nor two norms swapped: `bridge parity` computes with them.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bridge import convert, engines, weight_map
from bridge.weight_map import D2T, EMBEDDING, T2D
from eagle3_jax import tensors
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import ConfigError, WeightError
from eagle3_jax.target import shape as target_shape
from eagle3_jax.target.shape import TargetShape
from eagle3_jax.tensors import LazyTensor


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be."""

    severity: str  # "error": SGLang fails or misreads, or the directory is incomplete; "warning"; "note"
    where: str  # "config.json: KEY" or a tensor's name
    found: str
    wanted: str
    fix: str


def check(directory: str | Path, target: str | Path | None = None) -> list[Finding]:
    """Everything wrong with a draft directory; an empty list is a healthy one.

    `target`, the Hugging Face directory of the model to be served, adds what can only be judged beside it.
    Raises ConfigError or WeightError where config.json, the tensors or the target's config cannot be read.
    """
    config, files = convert.read_config(directory), tensors.open_tensors(directory)
    served = None if target is None else target_shape.read(target)
    findings = [*_config(config), *_aux(config, served), *_rope(config)]
    try:
        shape = engines.draft_shape(config, convert.CONFIG)
    except ConfigError:
        return findings
    wanted = weight_map.their_shapes(shape) | engines.more_shapes(config, shape)
    named, found = _names(files, wanted)
    findings += named
    for name, tensor in found.items():
        findings += [
            *_shape(name, tensor, wanted[name], shape),
            *_dtype(name, tensor, config),
            *_finite(name, tensor),
        ]
    findings += _vocabulary(found, shape)
    if served is not None:
        findings += [*_beside(config, served), *_embedding(found.get(EMBEDDING), target)]
    return findings


def _key(severity: str, key: str, found: object, wanted: object, fix: str) -> Finding:
    return Finding(severity, f"{convert.CONFIG}: {key}", str(found), str(wanted), fix)


def _config(config: dict) -> Iterator[Finding]:
    for key in engines.unusable_sizes(config):
        fix = "without it SGLang stops with an AttributeError" if key == "draft_vocab_size" else "set it"
        yield _key("error", key, repr(config.get(key, "absent")), "a positive number", fix)
    for key, value, fix in (
        ("architectures", [engines.ARCHITECTURE], "SGLang picks the draft's class by it"),
        ("model_type", engines.MODEL_TYPE, "transformers has to know it; it also decides the MLP's width"),
        (
            "num_hidden_layers",
            1,
            "SGLang before 0.5.12 refuses more, and the extra layers are not in this layout",
        ),
    ):
        if config.get(key) != value:
            yield _key("error", key, repr(config.get(key, "absent")), repr(value), fix)
    for key, value, fix in (
        ("hidden_act", "silu", "SGLang knows no other"),
        ("tie_word_embeddings", False, "SGLang would use the target's embedding as the draft's head"),
        ("attention_bias", False, "SGLang drops q, k and v biases and leaves o's uninitialised"),
        ("bias", False, "the draft has no biases"),
        ("num_nextn_predict_layers", 0, "SGLang would count layers as for multi-token prediction"),
        ("target_hidden_size", config.get("hidden_size"), "a draft of another width is not supported here"),
    ):
        if (found := config.get(key)) is not None and found != value:
            yield _key("error", key, repr(found), repr(value), fix)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is type(groups) is int and groups > 0 and heads % groups:
        yield _key("error", "num_key_value_heads", groups, f"a divisor of {heads} heads", "set it")
    width = config.get("hidden_size")
    if type(heads) is type(width) is int and heads > 0 and width % heads:
        fix = "transformers refuses the config, whatever head_dim is, and SGLang does not start"
        yield _key("error", "num_attention_heads", heads, f"a divisor of hidden_size={width}", fix)
    draft, full = config.get("draft_vocab_size"), config.get("vocab_size")
    if type(draft) is type(full) is int and draft > full:
        yield _key(
            "error", "draft_vocab_size", draft, f"at most vocab_size={full}", "vocab_size is the target's"
        )
    yield from _config_dtype(config)


def _config_dtype(config: dict) -> Iterator[Finding]:
    old, new = config.get("torch_dtype"), config.get("dtype")
    known = ("bfloat16", "float16", "float32")
    if old is None and new is None:
        yield _key(
            "warning", "torch_dtype", "absent", " or ".join(known), "SGLang --dtype auto would take float16"
        )
    elif None not in (old, new) and old != new:
        yield _key("error", "dtype", repr(new), f"torch_dtype's {old!r}", "set both alike")
    elif (old or new) not in known:
        yield _key("error", "torch_dtype", repr(old or new), " or ".join(known), "set torch_dtype and dtype")
    elif (old or new) == "float32":
        yield _key("note", "torch_dtype", "float32", "a launch line with --dtype float32",
                   "SGLang --dtype auto would cast to float16")  # fmt: skip


def _aux(config: dict, served: TargetShape | None) -> Iterator[Finding]:
    key = "eagle_config.eagle_aux_hidden_state_layer_ids"
    layers, top = engines.aux_layers(config), config.get("eagle_aux_hidden_state_layer_ids")
    count = config.get("num_aux_hidden_states")
    if (
        isinstance(config.get("eagle_config"), dict)
        and config["eagle_config"].get("use_aux_hidden_state") is False
    ):
        yield _key("error", "eagle_config.use_aux_hidden_state", False, True, "SGLang would capture nothing")
    if layers is None:
        severity = "warning" if count in (None, 3) else "error"
        yield _key(
            severity, key, "absent", "the layer outputs", "SGLang would capture its three default states"
        )
        return
    ascending = isinstance(layers, list) and layers and all(type(i) is int and i >= 0 for i in layers)
    if not ascending or any(a >= b for a, b in itertools.pairwise(layers)):
        yield _key("error", key, layers, "ascending layer outputs",
                   "SGLang captures in the order of the layers, whatever the list says")  # fmt: skip
        return
    if count is not None and count != len(layers):
        yield _key("error", "num_aux_hidden_states", count, len(layers), f"{key} lists {len(layers)}")
    if len(layers) == 1:
        yield _key("error", key, layers, "two or more layers", "of a single state SGLang skips fc")
    inputs = [k + 1 for k in layers]
    if top != inputs:
        yield _key("warning" if top is None else "error", "eagle_aux_hidden_state_layer_ids", repr(top), inputs,
                   "vLLM and llama.cpp read this list, as layer inputs: one more than the nested one")  # fmt: skip
    if served is None:
        return
    if layers[-1] > served.num_hidden_layers - 2:
        yield _key("error", key, layers, f"at most {served.num_hidden_layers - 2}",
                   f"of {served.num_hidden_layers} layers the last output is never captured")  # fmt: skip
    if served.model_type in engines.AS_INPUTS and layers[0] != 1:
        yield _key("error", key, layers, "a list that begins with 1",
                   f"SGLang takes any other as layer inputs on a {served.model_type} target")  # fmt: skip
    if served.model_type in engines.OTHER_STATES:
        yield _key("error", key, served.model_type, "another family of targets",
                   "SGLang captures states without the residual on it")  # fmt: skip


def _rope(config: dict) -> Iterator[Finding]:
    found = {}
    for schema in ("rope_theta", "rope_parameters"):
        try:
            found[schema] = engines.rope_of(config, schema)
        except ConfigError as error:
            yield _key("error", schema, str(error).partition(": ")[2], "a RoPE that SGLang knows", "set it")
            return
    old, new = found.values()
    if old is None and new is None:
        yield _key("error", "rope_theta", "absent", "the draft's theta", "readers would take 10000")
    elif old is None or new is None:
        missing = "rope_theta" if old is None else "rope_parameters"
        yield _key(
            "warning", missing, "absent", old or new, "write RoPE under both names: each is read somewhere"
        )
    elif old != new:
        yield _key(
            "error", "rope_parameters", new, old, "rope_theta and rope_scaling say otherwise: set both alike"
        )


def _names(files: dict[str, LazyTensor], wanted: dict) -> tuple[list[Finding], dict[str, LazyTensor]]:
    """Findings, and the tensors under the names that they should have."""
    found = {name: files[name] for name in files if name in wanted}
    findings = []
    for name in sorted(set(files) - set(wanted)):
        meant = [
            (ours, effect) for ours, effect in engines.spelled(name) if ours in wanted and ours not in files
        ]
        if meant:
            ours, effect = meant[0]
            found[ours] = files[name]
            findings.append(Finding("error", name, "this name", ours, f"rename it: {effect}"))
        else:
            findings.append(
                Finding(
                    "error", name, "a tensor that the draft has not", "none", f"remove it: {engines.EXTRA}"
                )
            )
    findings += [
        Finding(
            "error", name, "missing", str(list(wanted[name])), engines.MISSING.get(name, engines.UNFILLED)
        )
        for name in wanted
        if name not in found
    ]
    return findings, found


def _shape(name: str, tensor: LazyTensor, wanted: tuple[int, ...], shape: DraftShape) -> Iterator[Finding]:
    found = tensor.shape
    if found == wanted:
        return
    if len(found) == 2 and found == wanted[::-1]:
        yield Finding(
            "error", name, f"{list(found)}, the transpose", str(list(wanted)), "transpose it: [out, in]"
        )
    elif name == "lm_head.weight" and found[1:] == wanted[1:]:
        yield _key(
            "error", "draft_vocab_size", shape.draft_vocab_size, found[0], "lm_head.weight has that many rows"
        )
    else:
        yield Finding("error", name, str(list(found)), str(list(wanted)), "its sizes do not fit config.json")


def _dtype(name: str, tensor: LazyTensor, config: dict) -> Iterator[Finding]:
    found, declared = str(tensor.dtype), config.get("torch_dtype") or config.get("dtype")
    if name == D2T:
        wanted, fix = "int64", "store the offsets as int64"
    elif name == T2D:
        wanted, fix = "bool", "store one bool a target token"
    elif name == EMBEDDING and found in ("float32", "bfloat16", "float16"):
        return  # the target's own bytes, whatever the draft's dtype
    else:
        wanted, fix = str(declared or found), "cast it, or declare its dtype in config.json"
    if found != wanted:
        yield Finding("error", name, found, wanted, fix)


def _finite(name: str, tensor: LazyTensor) -> Iterator[Finding]:
    if name in (D2T, T2D) or tensor.dtype is None or not tensor.shape:
        return
    if bad := sum(int(np.sum(~np.isfinite(x.astype(np.float32)))) for x in tensor.blocks()):
        yield Finding(
            "error", name, f"{bad} values are NaN or infinite", "finite values", "export a healthy step"
        )


def _vocabulary(found: dict[str, LazyTensor], shape: DraftShape) -> Iterator[Finding]:
    d2t, t2d = found.get(D2T), found.get(T2D)
    if d2t is None or d2t.shape != (shape.draft_vocab_size,) or "int" not in str(d2t.dtype):
        return
    offsets = d2t[...].astype(np.int64)
    ids, full = offsets + np.arange(len(offsets)), shape.vocab_size
    listed = None
    if t2d is not None and t2d.shape == (full,):
        listed = np.flatnonzero(t2d[...].astype(np.float32))
    if listed is not None and np.array_equal(np.sort(ids), listed):
        return
    in_range = ids.min() >= 0 and ids.max() < full
    if _absolute(offsets, listed, full, in_range):
        yield Finding("error", D2T, "absolute target ids", "offsets: target id - draft id",
                      "subtract arange(len(d2t))")  # fmt: skip
    elif not in_range:
        yield Finding("error", D2T, f"target ids {ids.min()} .. {ids.max()}", f"within 0 .. {full - 1}",
                      "d2t holds offsets: target id = draft id + d2t")  # fmt: skip
    elif len(np.unique(ids)) != len(ids):
        twice = int(np.sort(ids)[1:][np.diff(np.sort(ids)) == 0][0])
        yield Finding(
            "error", D2T, f"target id {twice} twice", "distinct target ids", "give each draft id its own"
        )
    elif listed is not None:
        differ = len(np.setxor1d(ids, listed))
        yield Finding("error", T2D, f"disagrees with d2t on {differ} target ids", "true exactly at d2t's ids",
                      "derive it: t2d[arange(len(d2t)) + d2t] = True")  # fmt: skip


def _absolute(d2t: np.ndarray, listed: np.ndarray | None, full: int, in_range: bool) -> bool:
    """Whether d2t holds target ids: those of t2d or, where that says nothing, ids that as offsets lead too far."""
    if listed is not None and len(listed) == len(d2t):
        return np.array_equal(np.sort(d2t), listed)
    return not in_range and d2t.min() >= 0 and d2t.max() < full and len(np.unique(d2t)) == len(d2t)


def _beside(config: dict, served: TargetShape) -> Iterator[Finding]:
    for key in ("vocab_size", "hidden_size"):
        if config[key] != (wanted := getattr(served, key)):
            yield _key("error", key, config[key], wanted, "it is the target's: another target was trained on")
    if config["max_position_embeddings"] < (wanted := served.max_position_embeddings):
        yield _key("error", "max_position_embeddings", config["max_position_embeddings"], f"the target's {wanted}",
                   "SGLang loads the draft with the target's context length and refuses a shorter one")  # fmt: skip


def _embedding(ours: LazyTensor | None, target: str | Path) -> Iterator[Finding]:
    try:
        files = tensors.open_tensors(target)
        theirs = next((t for name, t in files.items() if name.endswith("embed_tokens.weight")), None)
    except WeightError as error:
        theirs, why = None, str(error)
    else:
        why = f"{target} has no embed_tokens.weight"
    if theirs is None:
        yield Finding(
            "note", EMBEDDING, f"not verified: {why}", "the target's embedding", "give a target with weights"
        )
        return
    if ours is None or ours.shape != theirs.shape or None in (ours.dtype, theirs.dtype):
        return
    pairs = zip(ours.blocks(), theirs.blocks(), strict=True)
    differ = sum(int(np.sum(np.any(a != b.astype(a.dtype), axis=-1))) for a, b in pairs)
    if differ:
        yield Finding("error", EMBEDDING, f"{differ} of {ours.shape[0]} rows differ", "the target's embedding",
                      "SGLang uses the target's: the draft was trained with another one")  # fmt: skip
