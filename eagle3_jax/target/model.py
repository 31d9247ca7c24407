"""The frozen target: a dense decoder of one of shape.FAMILIES, as features for training and with a cache for decoding.

Parameters are a nested dict; the weights of all layers are stacked on a leading axis L and run by `lax.scan`,
so that compile time does not grow with depth.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.errors import ConfigError
from eagle3_jax.layers import (
    Kernel,
    RMSNorm,
    attention,
    axes_of,
    cached_attention,
    causal_mask,
    empty_cache,
    rms_norm,
    rope,
    rope_frequencies,
    slots_seen,
)
from eagle3_jax.target.shape import FAMILIES, Family, TargetShape, check_aux_layers


class Block(nnx.Module):
    """One decoder layer."""

    def __init__(self, sizes: dict[str, int], eps: float, family: Family, *, rngs: nnx.Rngs):
        self.qk_norm, bias = family.qk_norm, family.qkv_bias
        self.input_layernorm = RMSNorm("d", eps, sizes)
        self.q = Kernel("d n h", "d", sizes, bias=bias, rngs=rngs)
        self.k = Kernel("d g h", "d", sizes, bias=bias, rngs=rngs)
        self.v = Kernel("d g h", "d", sizes, bias=bias, rngs=rngs)
        self.o = Kernel("n h d", "n h", sizes, rngs=rngs)
        if self.qk_norm:
            self.q_norm = RMSNorm("h", eps, sizes)
            self.k_norm = RMSNorm("h", eps, sizes)
        self.post_attention_layernorm = RMSNorm("d", eps, sizes)
        self.gate = Kernel("d f", "d", sizes, rngs=rngs)
        self.up = Kernel("d f", "d", sizes, rngs=rngs)
        self.down = Kernel("f d", "f", sizes, rngs=rngs)

    def __call__(self, x_BTD: jax.Array, turn, attend) -> jax.Array:
        """`turn` rotates queries or keys; `attend(q_BTNH, k_BTGH, v_BTGH) -> [B, T, N, H]` sees them rotated."""
        y_BTD = self.input_layernorm(x_BTD)
        q_BTNH, k_BTGH = self.q("btd,dnh->btnh", y_BTD), self.k("btd,dgh->btgh", y_BTD)
        if self.qk_norm:
            q_BTNH, k_BTGH = self.q_norm(q_BTNH), self.k_norm(k_BTGH)
        attended_BTNH = attend(turn(q_BTNH), turn(k_BTGH), self.v("btd,dgh->btgh", y_BTD))
        x_BTD = x_BTD + self.o("btnw,nwd->btd", attended_BTNH)  # h before n would transpose both operands
        y_BTD = self.post_attention_layernorm(x_BTD)
        z_BTF = jax.nn.silu(self.gate("btd,df->btf", y_BTD)) * self.up("btd,df->btf", y_BTD)
        return x_BTD + self.down("btf,fd->btd", z_BTF)


class Target:
    """The arithmetic of one target; its weights are passed to every call.

    `axes` and `abstract` are the trees of axis strings and ShapeDtypeStructs of those weights.
    """

    def __init__(self, shape: TargetShape, aux_layers: tuple[int, ...] | None = None, dtype=jnp.float32):
        if shape.model_type not in FAMILIES:
            raise ConfigError(
                f"a target of type {shape.model_type!r} cannot be run here (known: {', '.join(FAMILIES)}); "
                "train from stored features: train.mode=offline"
            )
        self.shape, self.dtype = shape, jnp.dtype(dtype)
        self.aux_layers = shape.default_aux_layers if aux_layers is None else tuple(aux_layers)
        check_aux_layers(self.aux_layers, shape.num_hidden_layers)
        sizes = dict(
            d=shape.hidden_size, n=shape.num_attention_heads, g=shape.num_key_value_heads, h=shape.head_dim,
            f=shape.intermediate_size, v=shape.vocab_size, l=shape.num_hidden_layers,
        )  # fmt: skip
        family = FAMILIES[shape.model_type]
        block = nnx.eval_shape(lambda: Block(sizes, shape.rms_norm_eps, family, rngs=nnx.Rngs(0)))
        self._block, _ = nnx.split(block)
        self.axes = {
            "embed": {"embedding": "v d"},
            "layers": jax.tree.map(lambda a: f"l {a}", axes_of(block)),
            "norm": {"scale": "d"},
        } | ({} if shape.tie_word_embeddings else {"lm_head": {"kernel": "v d"}})
        self.abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct([sizes[x] for x in a.split()], self.dtype), self.axes
        )
        self._turn = rope_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling)

    def head(self, params: dict) -> jax.Array:
        """The output projection [V, D]: `lm_head`, or the embedding of a tied target."""
        return params["embed"]["embedding"] if self.shape.tie_word_embeddings else params["lm_head"]["kernel"]

    def logits(self, params: dict, final_BTD: jax.Array) -> jax.Array:
        """Full-vocabulary logits [B, T, V] in float32 of post-norm states."""
        return jnp.einsum("btd,vd->btv", final_BTD, self.head(params), preferred_element_type=jnp.float32)

    def top_and_lse(self, params: dict, final_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Full-vocabulary argmax [B, T] int32 (lowest id on ties) and log-sum-exp [B, T] float32."""
        logits_BTV = self.logits(params, final_BTD)
        return jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32), jax.nn.logsumexp(logits_BTV, axis=-1)

    def features(self, params: dict, ids_BT, position_BT, segment_BT, every_state: bool = False):
        """The forward pass over packed rows.

        ids       B T      int32   tokens
        position  B T      int32   position inside the segment
        segment   B T      int32   packed conversations do not see each other
        -> aux    B T M    dtype   outputs of the aux layers, low to high, side by side
           final  B T D    dtype   post-norm last state
           states L B T D  dtype   every layer's output, only with `every_state`
        """
        mask_BTS = causal_mask(position_BT, segment_BT)

        def layer(carry, xs):
            x_BTD, aux_ABTD = carry
            i, weights = xs
            x_BTD = nnx.merge(self._block, weights)(
                x_BTD,
                lambda x: rope(x, position_BT, *self._turn),
                lambda q, k, v: attention(q, k, v, mask_BTS),
            )
            return (x_BTD, self._capture(aux_ABTD, x_BTD, i)), x_BTD if every_state else None

        (x_BTD, aux_ABTD), states_LBTD = jax.lax.scan(
            layer, self._embed(params, ids_BT), self._layers(params)
        )
        out = self._outputs(params, x_BTD, aux_ABTD)
        return (*out, states_LBTD) if every_state else out

    def new_cache(self, batch: int, length: int) -> list[dict]:
        """An empty cache of `length` positions for every layer (layers.empty_cache)."""
        s = self.shape
        size = (batch, s.num_key_value_heads, s.head_dim, length, self.dtype)
        return [empty_cache(*size) for _ in range(s.num_hidden_layers)]

    def unstacked(self, params: dict) -> dict:
        """The same weights with every layer's on their own, as `decode` uses them."""
        layers = params["layers"]
        if isinstance(layers, dict):
            layers = [jax.tree.map(lambda w: w[i], layers) for i in range(self.shape.num_hidden_layers)]  # noqa: B023
        return params | {"layers": layers}

    def decode(self, params: dict, cache: list[dict], ids_BT, start_B, see_BTT: jax.Array | None = None):
        """T more tokens per row from position `start` on; slot S of the cache holds position S.

        Only slots below `start` are seen, so a rejected draft's keys need no clean-up and right padding no
        mask: both are overwritten before a row gets there. Returns (aux [B, T, M], final [B, T, D], cache).
        The T tokens follow one another, or are a tree in which each sees those on its way from the root and
        itself (`see`): its slot is then start + t, its position `start` + how deep it is.
        Layers are unrolled, for a scan would copy each one's weights and cache at every token; a caller that
        decodes more than once passes `unstacked` weights.
        """
        if see_BTT is None:
            position_BT, mask_BTS = start_B[:, None] + jnp.arange(ids_BT.shape[1])[None], None
        else:
            position_BT = start_B[:, None] + jnp.sum(see_BTT, axis=2, dtype=start_B.dtype) - 1
            mask_BTS = slots_seen(start_B, see_BTT, cache[0]["k"].shape[3])
        x_BTD, aux, written = params["embed"]["embedding"][ids_BT].astype(self.dtype), [], []
        for i, weights in enumerate(self.unstacked(params)["layers"]):
            old = cache[i]

            def attend(q_BTNH, k_BTGH, v_BTGH, old=old):
                out_BTNH, new = cached_attention(q_BTNH, k_BTGH, v_BTGH, old, start_B, mask_BTS)
                written.append(new)
                return out_BTNH

            x_BTD = nnx.merge(self._block, weights)(
                x_BTD, lambda x: rope(x, position_BT, *self._turn), attend
            )
            if i in self.aux_layers:
                aux.append(x_BTD)
        return *self._outputs(params, x_BTD, aux), written

    def _embed(self, params, ids_BT):
        x_BTD = params["embed"]["embedding"][ids_BT].astype(self.dtype)
        return x_BTD, jnp.zeros((len(self.aux_layers), *x_BTD.shape), self.dtype)

    def _layers(self, params):
        return jnp.arange(self.shape.num_hidden_layers), params["layers"]

    def _capture(self, aux_ABTD, x_BTD, i):
        """Write layer i's output into its slot, if it has one: stacking all L outputs would not fit."""
        for slot, layer in enumerate(self.aux_layers):
            aux_ABTD = aux_ABTD.at[slot].set(jnp.where(i == layer, x_BTD, aux_ABTD[slot]))
        return aux_ABTD

    def _outputs(self, params, x_BTD, aux_ABTD):
        final_BTD = rms_norm(x_BTD, params["norm"]["scale"], self.shape.rms_norm_eps)
        return jnp.concatenate(list(aux_ABTD), axis=-1), final_BTD
