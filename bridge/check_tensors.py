"""The tensors of a draft directory against what an engine builds from its config: names, shapes, dtypes, the map."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bridge import engines, weight_map
from bridge.engines import Engine
from bridge.finding import Finding, field
from bridge.weight_map import D2T, EMBEDDING, T2D
from eagle3_jax import tensors
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import WeightError
from eagle3_jax.tensors import LazyTensor

HEAD = "lm_head.weight"


def check(files: dict[str, LazyTensor], shape: DraftShape, config: dict, engine: Engine) -> Iterator[Finding]:
    """Everything wrong with the tensors, for a config that builds `shape`."""
    wanted = weight_map.their_shapes(shape)
    named, found = names(files, wanted, shape, engine)
    yield from named
    for name, tensor in found.items():
        yield from _shape(name, tensor, wanted[name], shape, config)
        yield from _dtype(name, tensor, config)
        yield from _values(name, tensor)
    yield from _vocabulary(found, shape)


def names(
    files: dict[str, LazyTensor], wanted: dict, shape: DraftShape, engine: Engine
) -> tuple[list[Finding], dict[str, LazyTensor]]:
    """Findings, and the tensors under the names that they should have."""
    found = {name: files[name] for name in files if name in wanted}
    findings = []
    for name in sorted(set(files) - set(wanted)):
        ours, loaded = engines.spelled(name), engine.loads(name)
        known = loaded in wanted and loaded not in found
        if known or (ours in wanted and ours not in found):
            ours = loaded if known else ours
            found[ours] = files[name]
            severity = "warning" if known else "error"
            findings.append(Finding(severity, name, "this name", ours, f"rename it: {engine.effect(known)}"))
        else:
            findings.append(Finding("error", name, *_extra(name, shape, engine)))
    optional = {D2T, T2D} if shape.draft_vocab_size == shape.vocab_size else set()
    for name in wanted:
        if name not in found and name not in optional:
            findings.append(_missing(name, wanted[name], shape, engine))
    return findings, found


def _extra(name: str, shape: DraftShape, engine: Engine) -> tuple[str, str, str]:
    """found, wanted and fix for a tensor without a destination."""
    option = (
        "fc_norm"
        if name.startswith("fc_norm.")
        else "norm_before_fc"
        if name == "input_norm.weight"
        else None
    )
    if option and not getattr(shape, option):
        return "no such option in config.json", f"{option}: true", f"set it: else {engine.effect(False)}"
    return "a tensor that the draft has not", "none", f"remove it: {engine.effect(False)}"


def _missing(name: str, wanted: tuple[int, ...], shape: DraftShape, engine: Engine) -> Finding:
    severity = "error"
    if name == EMBEDDING:
        severity, fix = (
            "warning",
            f"{engine.title} uses the target's, but parity and other tools read this one",
        )
    elif name == D2T:
        fix = "export it into this file: without it the engine takes draft ids for target ids"
    elif name == T2D:
        fix = "export it: engines do without, trainers and converters do not"
    elif engine.missing == "refuses":
        fix = f"export it: {engine.title} refuses the file without"
    else:
        fix = f"export it: {engine.title} leaves that parameter uninitialised" + (
            ", without a word" if engine.missing == "leaves" else ""
        )
    if name == HEAD and shape.draft_vocab_size == shape.vocab_size:
        fix += "; with the whole vocabulary the target's head could be copied"
    return Finding(severity, name, "missing", str(list(wanted)), fix)


def _shape(
    name: str, tensor: LazyTensor, wanted: tuple[int, ...], shape: DraftShape, config: dict
) -> Iterator[Finding]:
    found = tensor.shape
    if found == wanted:
        return
    fix = "its sizes do not fit config.json"
    if len(found) == 2 and found == wanted[::-1]:
        yield Finding(
            "error", name, f"{list(found)}, the transpose", str(list(wanted)), "transpose it: [out, in]"
        )
        return
    if name == HEAD and found[1:] == wanted[1:]:
        yield field(
            "error", "draft_vocab_size", shape.draft_vocab_size, found[0], f"{HEAD} has that many rows"
        )
        return
    if name == "fc.weight" and len(found) == 2 and found[0] == wanted[0]:
        count = shape.num_aux_hidden_states
        if found[1] % shape.hidden_size == 0:
            fix = f"it takes {found[1] // shape.hidden_size} states, config.json says {count}: which layers are meant?"
        elif found[1] % count == 0:
            fix = (
                f"it takes {count} states of width {found[1] // count}: hidden_size is {shape.hidden_size} and "
                f"target_hidden_size {config.get('target_hidden_size', 'absent')}; a draft narrower than its target "
                "is not supported here"
            )
    yield Finding("error", name, str(list(found)), str(list(wanted)), fix)


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


def _values(name: str, tensor: LazyTensor) -> Iterator[Finding]:
    if name in (D2T, T2D) or tensor.dtype is None or not tensor.shape:
        return
    bad, low, high = 0, np.inf, -np.inf
    for x in tensor.blocks():
        x = x.astype(np.float32)
        bad += int(np.sum(~np.isfinite(x)))
        low, high = min(low, float(np.min(x))), max(high, float(np.max(x)))
    if bad:
        yield Finding(
            "error", name, f"{bad} values are NaN or infinite", "finite values", "export a healthy step"
        )
    elif low == high and tensor.shape != (1,):
        norm = len(tensor.shape) == 1
        fix = (
            "never trained, or in a dtype whose steps around 1 are larger than an update"
            if norm
            else "a placeholder"
        )
        yield Finding("warning" if norm else "error", name, f"every value is {low:g}", "trained values", fix)


def _vocabulary(found: dict[str, LazyTensor], shape: DraftShape) -> Iterator[Finding]:
    d2t, t2d = found.get(D2T), found.get(T2D)
    if d2t is None or d2t.shape != (shape.draft_vocab_size,) or "int" not in str(d2t.dtype):
        return
    offsets = d2t[...].astype(np.int64)
    ids, full = offsets + np.arange(len(offsets)), shape.vocab_size
    listed = None
    if t2d is not None and t2d.shape == (full,):
        listed = np.flatnonzero(t2d[...].astype(np.float32))
    agree = listed is not None and np.array_equal(np.sort(ids), listed)
    if not offsets.any() and len(ids) < full:
        severity = "warning" if agree else "error"
        yield Finding(severity, D2T, "zeros", "offsets: target id - draft id",
                      f"draft ids would be the first {len(ids)} target ids: was the map never loaded?")  # fmt: skip
        return
    if agree:
        return
    in_range = ids.min() >= 0 and ids.max() < full
    if absolute(offsets, listed, full):
        yield Finding("error", D2T, "absolute target ids", "offsets: target id - draft id",
                      "subtract arange(len(d2t))")  # fmt: skip
    elif not in_range:
        at = np.flatnonzero((ids < 0) | (ids >= full))
        said = f"draft id {at[0]} stands for target id {ids[at[0]]} ({len(at)} such)"
        fix = "d2t holds offsets: target id = draft id + d2t"
        yield Finding("error", D2T, said, f"within 0 .. {full - 1}", fix)
    elif len(np.unique(ids)) != len(ids):
        twice = int(np.sort(ids)[1:][np.diff(np.sort(ids)) == 0][0])
        which = np.flatnonzero(ids == twice)[:2].tolist()
        yield Finding("error", D2T, f"target id {twice} twice, for draft ids {which}", "distinct target ids",
                      "give each draft id its own")  # fmt: skip
    elif listed is not None:
        differ = len(np.setxor1d(ids, listed))
        yield Finding("error", T2D, f"disagrees with d2t on {differ} target ids", "true exactly at d2t's ids",
                      "derive it: t2d[arange(len(d2t)) + d2t] = True")  # fmt: skip


def absolute(d2t: np.ndarray, listed: np.ndarray | None, full: int) -> bool:
    """Whether d2t holds target ids: those of t2d or, where that says nothing, ids that as offsets lead too far."""
    if listed is not None and len(listed) == len(d2t):
        return np.array_equal(np.sort(d2t), listed)
    ids = d2t + np.arange(len(d2t))
    in_range = ids.min() >= 0 and ids.max() < full
    return bool(not in_range and d2t.min() >= 0 and d2t.max() < full and len(np.unique(d2t)) == len(d2t))


def embedding(files: dict[str, LazyTensor], engine: Engine, target: str | Path) -> Iterator[Finding]:
    """The draft's embedding beside the target's."""
    ours = next((t for name, t in files.items() if engines.spelled(name) == EMBEDDING), None)
    try:
        there = tensors.open_tensors(target)
        theirs = next((t for name, t in there.items() if name.endswith("embed_tokens.weight")), None)
    except WeightError as error:
        theirs, why = None, str(error)
    else:
        why = f"{target} has no embed_tokens.weight"
    if theirs is None:
        fix = "give a target with weights"
        yield Finding("note", EMBEDDING, f"not verified: {why}", "the target's embedding", fix)
        return
    if ours is None or ours.shape != theirs.shape or None in (ours.dtype, theirs.dtype):
        return
    pairs = zip(ours.blocks(), theirs.blocks(), strict=True)
    differ = sum(int(np.sum(np.any(a != b.astype(a.dtype), axis=-1))) for a, b in pairs)
    if differ:
        rows = ours.shape[0]
        used = "serves with this one" if engine.embedding == "file" else "uses the target's"
        fix = f"{engine.title} {used}: " + (
            "it looks untrained" if differ == rows else "the draft was trained with another one"
        )
        yield Finding("error", EMBEDDING, f"{differ} of {rows} rows differ", "the target's embedding", fix)
