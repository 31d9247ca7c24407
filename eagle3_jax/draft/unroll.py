"""Training-time test: the draft is unrolled K steps on its own states, as it will run when serving.

Row t at step k reads the embedding of x[t+1+k], sits at position t+k and is taught the target's distribution
for x[t+2+k], which is softmax(W_lm h[t+1+k]). Step 0 takes the fused target states of row t, step k > 0 the
draft's own state of step k-1 at the same row. Every left shift stops at the end of its segment.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

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
    """

    ids: jax.Array
    segment: jax.Array
    position: jax.Array
    span: jax.Array
    aux: jax.Array
    final: jax.Array
    top: jax.Array
    lse: jax.Array


class Vocabulary(NamedTuple):
    """The draft vocabulary on the device: `d2t` [U] offsets and `t2d` [V] membership."""

    d2t: jax.Array
    t2d: jax.Array


def shift(x: jax.Array, n: int, segment_BT: jax.Array) -> jax.Array:
    """x[t+n] where t+n is in t's segment, else 0. Axes after T come along."""

    def left(y):
        return jnp.pad(y[:, n:], [(0, 0), (0, n)] + [(0, 0)] * (y.ndim - 2)) if n else y

    inside_BT = (left(segment_BT) == segment_BT) & (segment_BT > 0)
    return jnp.where(
        inside_BT.reshape(inside_BT.shape + (1,) * (x.ndim - 2)), left(x), jnp.zeros((), x.dtype)
    )


def supervised(batch: Batch, k: int, mask: str) -> jax.Array:
    """[B, T] bool: which rows count at step k.

    "serve": x[t+1] .. x[t+2+k] all lie in one assistant span: the rows that drafting visits when serving.
    "eagle": x[t+k] lies in a span, as in EAGLE's and SpecForge's code (unshifted, so that the row before a
    turn is missing and rows at its end are taught what no server asks).
    """
    last = shift(batch.span, k + 2, batch.segment)
    if mask == "serve":
        return (last > 0) & (shift(batch.span, 1, batch.segment) == last)
    taught = shift(jnp.ones_like(batch.segment), k + 1, batch.segment) > 0
    return taught & (shift(batch.span, k, batch.segment) > 0)


class Unrolled(NamedTuple):
    """One step: the layer's output before the final norm [B, T, D] and logits [B, T, U]."""

    state: jax.Array
    logits: jax.Array


def steps(draft: Draft, embedding_VD, ids_BT, position_BT, segment_BT, aux_BTM, depth: int):
    """Yield the unroll's steps; axes as in `Batch`."""
    compute = aux_BTM.dtype
    see_BTS = causal_mask(position_BT, segment_BT)
    state_BTD = draft.fuse(aux_BTM)
    keys, values = [], []
    for k in range(depth):  # small and static
        embed_BTD = embedding_VD[shift(ids_BT, k + 1, segment_BT)].astype(compute)
        q, key, value = draft.qkv(embed_BTD, state_BTD, position_BT + k)
        keys.append(key)
        values.append(value)
        out_BTD = draft.finish(state_BTD, unroll_attention(q, keys, values, see_BTS))
        logits_BTU, state_BTD = draft.head(out_BTD)
        yield Unrolled(out_BTD, logits_BTU)


def proposals(
    draft: Draft, embedding_VD, d2t, ids_BT, position_BT, segment_BT, aux_BTM, depth: int
) -> jax.Array:
    """Target ids that every row would draft under teacher forcing, [K, B, T]."""
    best = [
        jnp.argmax(step.logits, axis=-1)
        for step in steps(draft, embedding_VD, ids_BT, position_BT, segment_BT, aux_BTM, depth)
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
    totals, outputs = [], []
    chain_BT = supervised(batch, 0, mask)
    run = steps(draft, embedding_VD, batch.ids, batch.position, batch.segment, batch.aux, depth)
    for k, step in enumerate(run):
        outputs.append(step)
        logits_BTU = step.logits
        top_BT = shift(batch.top, k + 1, batch.segment)
        target_BTU = jax.lax.stop_gradient(shift(taught_BTU, k + 1, batch.segment))
        counted_BT = supervised(batch, k, mask)
        rows_BT = counted_BT & vocabulary.t2d[top_BT] if oov_rows == "drop" else counted_BT
        best_BT = jnp.argmax(logits_BTU, axis=-1)
        right_BT = (best_BT + vocabulary.d2t[best_BT] == top_BT) & counted_BT
        chain_BT &= counted_BT
        rate_BT = acceptance_rate(logits_BTU, target_BTU, shift(batch.lse, k + 1, batch.segment))
        totals.append(
            (
                jnp.sum(soft_cross_entropy(logits_BTU, target_BTU), where=rows_BT),
                jnp.sum(-jnp.log(jnp.maximum(rate_BT, 1e-30)), where=rows_BT),
                jnp.sum(rate_BT, where=rows_BT),
                *(jnp.sum(x, dtype=jnp.float32) for x in (rows_BT, counted_BT, right_BT, chain_BT)),
                jnp.sum(chain_BT & right_BT, dtype=jnp.float32),
            )
        )
        chain_BT &= right_BT & (top_BT == shift(batch.ids, k + 2, batch.segment))
    tokens = jnp.float32(batch.ids.size)
    return Sums(*(jnp.stack(x) for x in zip(*totals, strict=True)), tokens), outputs
