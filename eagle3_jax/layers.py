"""The few layers that target and draft share: weights with named axes, RMS norm, rotary positions."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class Kernel(nnx.Module):
    """A weight whose axes are named; `fan_in` letters are the ones that a matmul with it sums over.

    A `bias` has the other letters, which have to be the last ones of the result.
    """

    def __init__(self, axes: str, fan_in: str, sizes: dict[str, int], *, bias: bool = False, rngs: nnx.Rngs):
        names = axes.split()
        init = nnx.initializers.variance_scaling(
            1.0, "fan_in", "truncated_normal",
            in_axis=[i for i, a in enumerate(names) if a in fan_in.split()],
            out_axis=[i for i, a in enumerate(names) if a not in fan_in.split()],
        )  # fmt: skip
        self.kernel = nnx.Param(init(rngs.params(), tuple(sizes[a] for a in names)), axes=axes)
        own = [a for a in names if a not in fan_in.split()]
        zeros = jnp.zeros([sizes[a] for a in own], jnp.float32)
        self.bias = nnx.Param(zeros, axes=" ".join(own)) if bias else None

    def __call__(self, einsum: str, x: jax.Array, **kwargs) -> jax.Array:
        out = jnp.einsum(einsum, x, self.kernel[...].astype(x.dtype), **kwargs)
        if self.bias is None:
            return out
        return out + jnp.broadcast_to(self.bias[...].astype(out.dtype), out.shape)


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis; statistics in float32, result in x's dtype (as Hugging Face)."""

    def __init__(self, axes: str, eps: float, sizes: dict[str, int]):
        self.scale = nnx.Param(jnp.ones([sizes[a] for a in axes.split()], jnp.float32), axes=axes)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.scale[...], self.eps)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * jnp.broadcast_to(scale.astype(x.dtype), x.shape)


def rope_frequencies(head_dim: int, theta: float, scaling: dict | None) -> tuple[np.ndarray, float]:
    """Inverse frequencies [head_dim / 2] and the factor on cos and sin, as Hugging Face's `rope_type`s.

    `default`, `linear`, `llama3` (Meta's Llama 3.1) and `yarn` (Peng et al. 2023) are known.
    """
    freq = theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    kind = (scaling or {}).get("rope_type", "default")
    if kind == "default":
        return freq.astype(np.float32), 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return (freq / factor).astype(np.float32), 1.0
    original = scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * freq / (2 * math.pi)
        blend = np.clip((turns - low) / (high - low), 0, 1)
        return (freq * (blend + (1 - blend) / factor)).astype(np.float32), 1.0
    if kind == "yarn":
        fast, slow = scaling.get("beta_fast", 32), scaling.get("beta_slow", 1)
        low, high = (
            head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (fast, slow)
        )
        low, high = max(math.floor(low), 0), min(math.ceil(high), head_dim - 1)
        ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        attention = scaling.get("attention_factor") or 0.1 * math.log(factor) + 1
        return (freq * (1 - ramp) + freq / factor * ramp).astype(np.float32), float(attention)
    raise ValueError(f"rope_type {kind!r} is not one of default, linear, llama3, yarn")


def rope(
    x_BTNH: jax.Array, position_BT: jax.Array, frequencies: np.ndarray, factor: float = 1.0
) -> jax.Array:
    """Rotate the two halves of the head axis (half-split, as Llama's Hugging Face port) by position."""
    angle_BTH = position_BT[..., None].astype(jnp.float32) * frequencies.reshape(
        (1,) * position_BT.ndim + (-1,)
    )
    cos, sin = (jnp.expand_dims(f(angle_BTH) * factor, -2).astype(x_BTNH.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTNH, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def axes_of(module: nnx.Module) -> dict:
    """The tree of axis strings beside `nnx.to_pure_dict` of a module's (abstract) state."""
    state = nnx.state(module)
    return nnx.to_pure_dict(
        jax.tree.map(lambda v: v.axes, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    )


def attention(q_BTNH: jax.Array, k_BSGH: jax.Array, v_BSGH: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention with grouped heads, dense; softmax in float32. Returns [B, T, N, H].

    mask  B T S  bool  True where the query at T may see the key at S; a row that sees nothing gets the mean
    """
    return dense_attention(q_BTNH, k_BSGH.transpose(0, 2, 3, 1), v_BSGH.transpose(0, 2, 1, 3), mask_BTS)


def dense_attention(q_BTNH, k_BGHS, v_BGSH, mask_BTS) -> jax.Array:
    """`attention` over keys and values that lie as in a cache."""
    B, T, N, H = q_BTNH.shape
    G = k_BGHS.shape[1]
    q_BGRTH = q_BTNH.reshape(B, T, G, N // G, H).transpose(0, 2, 3, 1, 4) * H**-0.5
    scores = jnp.einsum("bgrth,bghs->bgrts", q_BGRTH, k_BGHS, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, -1e30), axis=-1)
    out_BGRTH = jnp.einsum("bgrts,bgsh->bgrth", weights.astype(q_BTNH.dtype), v_BGSH)
    return out_BGRTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H)


def causal_mask(position_BT: jax.Array, segment_BT: jax.Array) -> jax.Array:
    """[B, T, T]: a row sees rows of its own segment at or before its position (packed rows do not mix)."""
    same_BTS = segment_BT[:, :, None] == segment_BT[:, None, :]
    return same_BTS & (position_BT[:, :, None] >= position_BT[:, None, :])


def empty_cache(batch: int, heads: int, head_dim: int, length: int, dtype) -> dict:
    """Keys [B, G, H, S], so that scores are a plain product along S, and values [B, G, S, H]."""
    return {
        "k": jnp.zeros((batch, heads, head_dim, length), dtype),
        "v": jnp.zeros((batch, heads, length, head_dim), dtype),
    }


def write_cache(cache: dict, new: dict, start_B: jax.Array) -> dict:
    """Write T positions per row from `start` on: keys [B, G, H, T], values [B, G, T, H].

    A loop over rows: XLA updates the buffer in place there, while a batched scatter copies it.
    """

    def row(b, cache):
        k, v = (jax.lax.dynamic_slice_in_dim(new[n], b, 1).astype(cache[n].dtype) for n in ("k", "v"))
        return {
            "k": jax.lax.dynamic_update_slice(cache["k"], k, (b, 0, 0, start_B[b])),
            "v": jax.lax.dynamic_update_slice(cache["v"], v, (b, 0, start_B[b], 0)),
        }

    return jax.lax.fori_loop(0, len(start_B), row, cache)


def slots_seen(start_B: jax.Array, see_BTW: jax.Array, length: int) -> jax.Array:
    """A mask over a cache [B, T, S]: all slots below `start`, of the W from there on what `see` says, none after."""
    offset_B1S = (jnp.arange(length)[None] - start_B[:, None])[:, None]
    width = see_BTW.shape[2]
    own_BTS = jnp.take_along_axis(see_BTW, jnp.clip(offset_B1S, 0, width - 1), axis=2)
    return (offset_B1S < 0) | ((offset_B1S < width) & own_BTS)


def keep_slots(cache: dict, start_B: jax.Array, path_BT: jax.Array, width: int) -> dict:
    """Move slots start + path[0], start + path[1] .. to start, start + 1 ..; path < width. In place, row by row."""

    def row(b, cache):
        out, path_T = {}, path_BT[b]
        for name, axis in (("k", 3), ("v", 2)):
            at = [b, 0, 0, 0]
            at[axis] = start_B[b]
            size = [1, *cache[name].shape[1:]]
            size[axis] = width
            kept = jnp.take(jax.lax.dynamic_slice(cache[name], at, size), path_T, axis=axis)
            out[name] = jax.lax.dynamic_update_slice(cache[name], kept, at)
        return out

    return jax.lax.fori_loop(0, len(start_B), row, cache)


def cached_attention(
    q_BTNH, k_BTGH, v_BTGH, cache: dict, start_B, mask_BTS: jax.Array | None = None
) -> tuple[jax.Array, dict]:
    """Write T new rows into a cache from slot `start` on, and attend over it: causally, or as `mask` says.

    Returns attended [B, T, N, H] and the cache. The order matters: were the old cache read after the write,
    XLA would have to copy it.
    """
    T, S = q_BTNH.shape[1], cache["k"].shape[3]
    new = {"k": k_BTGH.transpose(0, 2, 3, 1), "v": v_BTGH.transpose(0, 2, 1, 3)}
    cache = write_cache(cache, new, start_B)
    if mask_BTS is None:
        position_BT = start_B[:, None] + jnp.arange(T)[None]
        mask_BTS = jnp.arange(S)[None, None] <= position_BT[..., None]
    return dense_attention(q_BTNH, cache["k"], cache["v"], mask_BTS), cache
