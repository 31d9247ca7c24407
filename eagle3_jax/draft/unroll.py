"""Training-time test: the draft is unrolled K steps on its own states, as it will run when serving.

Row t at step k reads the embedding of x[t+1+k], sits at position t+k and is taught the target's distribution
for x[t+2+k], which is softmax(W_lm h[t+1+k]). Step 0 takes the fused target states of row t, step k > 0 the
draft's own state of step k-1 at the same row. Every left shift stops at the end of its segment.

Only step-0 keys and values are read by other rows, so all else need only be computed at rows that some step
counts: `needed_rows` finds them on the host; R stands for those of the T rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax.axes import round_up
from eagle3_jax.draft.attention import unroll_attention
from eagle3_jax.draft.loss import Sums, acceptance_rate, soft_cross_entropy
from eagle3_jax.draft.model import Draft
from eagle3_jax.layers import causal_mask


class Batch(NamedTuple):
    """Packed rows and the target's features on them.

    ids       B T    int32    tokens
    segment   B T    int32    0 padding, 1.. one number per conversation of the row
    position  B T    int32    position within the conversation
    span      B T    int32    0, or the number of the assistant turn, unique within the row
    aux       B T M  compute  the aux layers' outputs, low to high
    final     B T D  compute  post-norm last state
    top       B T    int32    the target's argmax over the full vocabulary
    lse       B T    float32  log-sum-exp of its logits over the full vocabulary
    rows      B R    int32    the rows to compute, ascending, at least all that count; None: all
    """

    ids: jax.Array
    segment: jax.Array
    position: jax.Array
    span: jax.Array
    aux: jax.Array
    final: jax.Array
    top: jax.Array
    lse: jax.Array
    rows: jax.Array | None = None


class Vocabulary(NamedTuple):
    """The draft vocabulary on the device: `d2t` [U] offsets and `t2d` [V] membership."""

    d2t: jax.Array
    t2d: jax.Array


def shift(x: jax.Array, n: int, segment_BT: jax.Array) -> jax.Array:
    """x[t+n] where t+n is in t's segment, else 0. Axes after T come along. For arrays of jax and of numpy."""
    xp = segment_BT.__array_namespace__()

    def left(y):
        return xp.pad(y[:, n:], [(0, 0), (0, n)] + [(0, 0)] * (y.ndim - 2)) if n else y

    inside_BT = (left(segment_BT) == segment_BT) & (segment_BT > 0)
    return xp.where(inside_BT.reshape(inside_BT.shape + (1,) * (x.ndim - 2)), left(x), xp.zeros((), x.dtype))


def supervised(batch: Batch, k: int, mask: str) -> jax.Array:
    """[B, T] bool: which rows count at step k.

    "serve": x[t+1] .. x[t+2+k] all lie in one assistant span: the rows that drafting visits when serving.
    "eagle": x[t+k] lies in a span, as in EAGLE's and SpecForge's code (unshifted, so that the row before a
    turn is missing and rows at its end are taught what no server asks).
    """
    last = shift(batch.span, k + 2, batch.segment)
    if mask == "serve":
        return (last > 0) & (shift(batch.span, 1, batch.segment) == last)
    taught = shift(batch.segment, k + 1, batch.segment) > 0
    return taught & (shift(batch.span, k, batch.segment) > 0)


BUCKETS = 8  # different numbers of rows, each compiled when it first comes up


def needed_rows(batch: dict[str, np.ndarray], depth: int, mask: str) -> np.ndarray:
    """The rows that count at some step, [B, R] int32 ascending; rows that do not fill them up.

    `batch` holds numpy arrays of `Batch`. R is the same for all of a batch, and one of BUCKETS values.
    """
    batch = Batch(**{name: batch.get(name) for name in Batch._fields})
    counts_BT = np.any([supervised(batch, k, mask) for k in range(depth)], axis=0)
    T, most = counts_BT.shape[1], counts_BT.sum(axis=1).max()
    R = min(T, round_up(max(int(most), 1), -(-T // BUCKETS)))
    return np.sort(np.argsort(~counts_BT, axis=1, kind="stable")[:, :R], axis=1).astype(np.int32)


def _take(x: jax.Array, rows_BR: jax.Array | None) -> jax.Array:
    """x[b, rows[b]], or x where no rows are chosen."""
    if rows_BR is None:
        return x
    at = dict(unique_indices=True, indices_are_sorted=True, mode="promise_in_bounds")
    return jax.vmap(lambda x, rows: x.at[rows].get(**at))(x, rows_BR)


class Unrolled(NamedTuple):
    """One step: the layer's output before the final norm [B, R, D] and logits [B, R, U]."""

    state: jax.Array
    logits: jax.Array


def steps(
    draft: Draft, embedding_VD, ids_BT, position_BT, segment_BT, aux_BTM, depth: int, rows_BR=None, late: int = 0
):  # fmt: skip
    """Yield the unroll's steps; axes as in `Batch`. Drafted rows (k > 0) sit `late` positions behind."""
    compute = aux_BTM.dtype
    see, position, state = causal_mask(position_BT, segment_BT), position_BT, draft.fuse(aux_BTM)
    keys, values = [], []
    for k in range(depth):  # small and static
        ids = shift(ids_BT, k + 1, segment_BT)
        x = draft.inputs(embedding_VD[_take(ids, rows_BR) if k else ids].astype(compute), state)
        at = position + k - (late if k else 0)
        key, value = draft.key_value(x, at)
        keys.append(key)
        values.append(value)
        if k == 0:
            x, see, at, position, state = (_take(y, rows_BR) for y in (x, see, at, position, state))
        out_BRD = draft.finish(state, unroll_attention(draft.query(x, at), keys, values, see))
        logits_BRU, state = draft.head(out_BRD)
        yield Unrolled(out_BRD, logits_BRU)


def proposals(
    draft: Draft, embedding_VD, d2t, ids_BT, position_BT, segment_BT, aux_BTM, depth: int, late: int = 0
) -> jax.Array:
    """Target ids that every row would draft under teacher forcing, [K, B, T]; `late` as in `steps`."""
    best = [
        jnp.argmax(step.logits, axis=-1)
        for step in steps(draft, embedding_VD, ids_BT, position_BT, segment_BT, aux_BTM, depth, late=late)
    ]
    return jnp.stack([b + d2t[b] for b in best])


def unroll(
    draft: Draft, embedding_VD: jax.Array, head_UD: jax.Array, vocabulary: Vocabulary, batch: Batch, *,
    depth: int, mask: str, oov_rows: str,
) -> tuple[Sums, list[Unrolled]]:  # fmt: skip
    """The sums over a batch, and its steps for parity tests.

    embedding  V D  the draft's frozen embedding
    head       U D  the target head's rows of the draft vocabulary
    """
    compute = batch.aux.dtype
    taught_BTU = jnp.einsum(
        "btd,ud->btu", batch.final, head_UD.astype(compute), preferred_element_type=jnp.float32
    )

    def later(x_BT, n):
        return _take(shift(x_BT, n, batch.segment), batch.rows)

    totals, outputs = [], []
    chain_BR = _take(supervised(batch, 0, mask), batch.rows)
    run = steps(
        draft, embedding_VD, batch.ids, batch.position, batch.segment, batch.aux, depth, batch.rows
    )  # fmt: skip
    for k, step in enumerate(run):
        outputs.append(step)
        logits_BRU = step.logits
        top_BR = later(batch.top, k + 1)
        target_BRU = jax.lax.stop_gradient(later(taught_BTU, k + 1))
        counted_BR = _take(supervised(batch, k, mask), batch.rows)
        loss_BR = counted_BR & vocabulary.t2d[top_BR] if oov_rows == "drop" else counted_BR
        best_BR = jnp.argmax(logits_BRU, axis=-1)
        right_BR = (best_BR + vocabulary.d2t[best_BR] == top_BR) & counted_BR
        chain_BR &= counted_BR
        rate_BR = acceptance_rate(logits_BRU, target_BRU, later(batch.lse, k + 1))
        totals.append(
            (
                jnp.sum(soft_cross_entropy(logits_BRU, target_BRU), where=loss_BR),
                jnp.sum(-jnp.log(jnp.maximum(rate_BR, 1e-30)), where=loss_BR),
                jnp.sum(rate_BR, where=loss_BR),
                *(jnp.sum(x, dtype=jnp.float32) for x in (loss_BR, counted_BR, right_BR, chain_BR)),
                jnp.sum(chain_BR & right_BR, dtype=jnp.float32),
            )
        )
        chain_BR &= right_BR & (top_BR == later(batch.ids, k + 2))
    tokens = jnp.float32(batch.ids.size)
    return Sums(*(jnp.stack(x) for x in zip(*totals, strict=True)), tokens), outputs
