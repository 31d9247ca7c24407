"""Attention of one unroll step: causal over step-0 keys, plus the row's own keys of the later steps.

When serving, a drafted token sees the committed rows and the tokens drafted before it. Rows of the unroll are
all drafted in parallel, so what row t sees of steps 1..k is only its own: a diagonal, not a matrix.
"""

import jax
import jax.numpy as jnp


def unroll_attention(q_BTNH: jax.Array, keys: list, values: list, mask_BTS: jax.Array) -> jax.Array:
    """Dense form. Returns [B, T, N, H].

    q       B T N H   rotated queries of step k
    keys    (B S G H, B T G H, ...)  rotated keys of steps 0..k; those of step 0 are seen through `mask`
    values  (B S G H, B T G H, ...)  likewise
    mask    B T S     bool  causal, within the segment
    """
    B, T, N, H = q_BTNH.shape
    S, G = keys[0].shape[1:3]
    q_BTGRH = q_BTNH.reshape(B, T, G, N // G, H) * H**-0.5
    scores = jnp.einsum("btgrh,bsgh->bgrts", q_BTGRH, keys[0], preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    own = [jnp.einsum("btgrh,btgh->bgrt", q_BTGRH, k, preferred_element_type=jnp.float32) for k in keys[1:]]
    scores = jnp.concatenate([scores, *(s[..., None] for s in own)], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1).astype(values[0].dtype)
    out_BTGRH = jnp.einsum("bgrts,bsgh->btgrh", weights[..., :S], values[0])
    for j, v_BTGH in enumerate(values[1:]):
        out_BTGRH += weights[..., S + j].transpose(0, 3, 1, 2)[..., None] * v_BTGH[:, :, :, None]
    return out_BTGRH.reshape(B, T, N, H)
