"""Hypotheses about how the tensors lie and what is computed with them: orders, halves, transposes, RoPE, head."""

import itertools
from collections.abc import Iterator

import numpy as np

from bridge import fields, weight_map
from bridge.doctor import hypotheses
from bridge.doctor.hypotheses import FC, HEAD, Hypothesis
from bridge.doctor.reading import Reading
from bridge.weight_map import EMBEDDING
from eagle3_jax.errors import UserError

LAYER = "midlayer."
QKV = [f"{LAYER}self_attn.{x}_proj.weight" for x in "qkv"]
KERNELS = [FC, *QKV, f"{LAYER}self_attn.o_proj.weight",
           *(f"{LAYER}mlp.{x}_proj.weight" for x in ("gate", "up", "down")), HEAD]  # fmt: skip
THETAS = (1e4, 5e5, 1e6)


def all_of(reading: Reading) -> list[Hypothesis]:
    """Every hypothesis that this reading leaves open, likely ones first."""
    found = [
        *hypotheses.certain(reading),
        *(h for h in hypotheses.maps(reading) if not h.certain),
        *hypotheses.options(),
        *hypotheses.aux_layers(reading),
        *_layouts(reading),
        *_rope(reading),
        *_others(),
    ]
    return [h for h in found if h.apply(reading) is not None]


def _layouts(reading: Reading) -> Iterator[Hypothesis]:
    count = reading.config.get("num_aux_hidden_states") or 3
    for order in itertools.permutations(range(count)) if count <= 3 else [tuple(range(count))[::-1]]:
        if order != tuple(range(count)):
            name = f"fc takes the aux states in another order: {', '.join(str(i + 1) for i in order)}"
            yield Hypothesis(name, "engines feed them low to high: reorder fc's columns",
                             lambda r, order=order: _reordered(r, order))  # fmt: skip
    yield Hypothesis("the halves of the [embedding, state] input are swapped",
                     "embedding first: swap the halves of q's, k's and v's columns", _swapped)  # fmt: skip
    yield Hypothesis("input_layernorm and hidden_norm are swapped", "swap them", _norms_swapped)
    yield Hypothesis("every kernel is transposed", "transpose: [out, in]", lambda r: _transposed(r, KERNELS))
    for name in KERNELS:
        yield Hypothesis(f"{name} is transposed", "transpose: [out, in]",
                         lambda r, name=name: _transposed(r, [name]))  # fmt: skip


def _reordered(reading: Reading, order: tuple[int, ...]) -> Reading | None:
    """fc as it would be had its states come low to high; `order` is how they came."""
    name = reading.find(FC)
    if name is None or reading.tensors[name].ndim != 2 or reading.tensors[name].shape[1] % len(order):
        return None
    came = np.argsort(order)
    blocks = np.split(reading.tensors[name], len(order), axis=1)
    changed = {name: np.concatenate([blocks[i] for i in came], axis=1)}
    norms = [reading.find(f"fc_norm.{i}.weight") for i in range(len(order))]
    if None not in norms:
        changed |= {norms[at]: reading.tensors[norms[i]] for at, i in enumerate(came)}
    return reading.change(tensors=changed)


def _swapped(reading: Reading) -> Reading | None:
    found = [reading.find(n) for n in QKV]
    if None in found or any(reading.tensors[n].ndim != 2 or reading.tensors[n].shape[1] % 2 for n in found):
        return None
    halves = {n: np.split(reading.tensors[n], 2, axis=1) for n in found}
    return reading.change(tensors={n: np.concatenate([b, a], axis=1) for n, (a, b) in halves.items()})


def _norms_swapped(reading: Reading) -> Reading | None:
    a, b = (reading.find(f"{LAYER}{n}.weight") for n in ("input_layernorm", "hidden_norm"))
    if None in (a, b) or np.array_equal(reading.tensors[a], reading.tensors[b]):
        return None
    return reading.change(tensors={a: reading.tensors[b], b: reading.tensors[a]})


def _transposed(reading: Reading, which: list[str]) -> Reading | None:
    """The buffer read for the other layout: of a square matrix, and of one of the wrong shape, the transpose."""
    try:
        wanted = weight_map.their_shapes(reading.shape)
    except UserError:
        return None
    changed = {}
    for ours in which:
        name = reading.find(ours)
        if name is None or ours not in wanted:
            continue
        x = reading.tensors[name]
        if x.ndim != 2 or sorted(x.shape) != sorted(wanted[ours]):
            return None
        changed[name] = np.ascontiguousarray(x.reshape(x.shape[::-1]).T if x.shape == wanted[ours] else x.T)
    return reading.change(tensors=changed) if changed else None


def _rope(reading: Reading) -> Iterator[Hypothesis]:
    try:
        shape, target = reading.shape, reading.served.shape
    except UserError:
        return
    scaling = dict(shape.rope_scaling) if shape.rope_scaling else None

    def turned(theta: float, scaling: dict | None):
        return lambda r: r.change(fields.rope_fields(theta, scaling))

    for theta in dict.fromkeys((target.rope_theta, *THETAS)):
        if theta != shape.rope_theta:
            whose = ", the target's" if theta == target.rope_theta else ""
            yield Hypothesis(f"RoPE base {shape.rope_theta:g}, trained with {theta:g}{whose}",
                             f"rope_theta: {theta:g}", turned(theta, scaling))  # fmt: skip
    others = ((target.rope_scaling, "the target's"), (None, "none"))
    for other, what in [(s, what) for s, what in others if s != scaling][:1]:
        yield Hypothesis(f"RoPE scaling {scaling}, trained with {what}", f"rope_scaling: {other}",
                         turned(shape.rope_theta, other))  # fmt: skip


def _others() -> Iterator[Hypothesis]:
    yield Hypothesis("a head that is not this draft's", "copy the target's rows of its tokens", _target_head)
    yield Hypothesis("served with another embedding than the target's", "bridge repair --target T",
                     lambda r: _embedding(r, "target"))  # fmt: skip
    yield Hypothesis("trained with another embedding than the target's",
                     "train with the target's, or take an engine that serves the file's",
                     lambda r: _embedding(r, "file"))  # fmt: skip
    for by, where in ((1, "ahead of"), (-1, "behind")):
        yield Hypothesis(f"drafted rows sit a position {where} those trained on", "positions go on row by row",
                         lambda r, by=by: r.change(late=r.late + by))  # fmt: skip


def _target_head(reading: Reading) -> Reading | None:
    if not reading.eagle3:
        return None
    d2t, name = hypotheses.d2t_of(reading), reading.find(HEAD) or HEAD
    count = reading.config.get("draft_vocab_size")
    if type(count) is not int:
        return None
    ids = np.arange(count) + (0 if d2t is None else d2t)
    if ids.min() < 0 or ids.max() >= reading.served.shape.vocab_size:
        return None
    rows, old = reading.served.rows(ids), reading.tensors.get(name)
    if old is not None and old.shape == rows.shape and np.array_equal(old, rows.astype(old.dtype)):
        return None
    return reading.change(tensors={name: rows})


def _embedding(reading: Reading, which: str) -> Reading | None:
    name = reading.find(EMBEDDING)
    used = reading.engine.embedding if reading.embedding == "engine" else reading.embedding
    if name is None or used == which:
        return None
    own, theirs = reading.tensors[name], reading.served.embedding
    if own.shape != theirs.shape or np.array_equal(own, theirs.astype(own.dtype)):
        return None
    return reading.change(embedding=which)
