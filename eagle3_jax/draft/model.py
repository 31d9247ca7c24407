"""The EAGLE-3 draft: fuse three target states, one decoder layer over [embedding, state], a small head.

The attention itself is not here: training attends over an unroll (draft/unroll.py), serving over a cache
(decode/). Both call the parts of the one module below.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.layers import Kernel, RMSNorm, axes_of, rope, rope_frequencies


class DecoderLayer(nnx.Module):
    """Llama's decoder layer, except that q, k and v read the normed embedding beside the normed state."""

    def __init__(self, shape: DraftShape, *, rngs: nnx.Rngs):
        sizes, eps = shape.sizes, shape.rms_norm_eps
        self.input_layernorm = RMSNorm("d", eps, sizes)  # on the embedding
        self.hidden_norm = RMSNorm("d", eps, sizes)  # on the carried state
        self.q = Kernel("c n h", "c", sizes, rngs=rngs)
        self.k = Kernel("c g h", "c", sizes, rngs=rngs)
        self.v = Kernel("c g h", "c", sizes, rngs=rngs)
        self.o = Kernel("n h d", "n h", sizes, rngs=rngs)
        self.post_attention_layernorm = RMSNorm("d", eps, sizes)
        self.gate = Kernel("d f", "d", sizes, rngs=rngs)
        self.up = Kernel("d f", "d", sizes, rngs=rngs)
        self.down = Kernel("f d", "f", sizes, rngs=rngs)


class Draft(nnx.Module):
    def __init__(self, shape: DraftShape, *, rngs: nnx.Rngs):
        self.shape = shape
        sizes, eps = shape.sizes, shape.rms_norm_eps
        if shape.fc_norm:
            for i in range(shape.num_aux_hidden_states):
                setattr(self, f"fc_norm_{i}", RMSNorm("d", eps, sizes))
        if shape.norm_before_fc:
            self.input_norm = RMSNorm("m", eps, sizes)
        self.fc = Kernel("m d", "m", sizes, rngs=rngs)
        self.midlayer = DecoderLayer(shape, rngs=rngs)
        self.norm = RMSNorm("d", eps, sizes)
        self.lm_head = Kernel("d u", "d", sizes, rngs=rngs)

    def fuse(self, aux_BTM: jax.Array) -> jax.Array:
        """Aux states, low to high layer side by side -> the draft's width, [B, T, D]."""
        if self.shape.norm_before_fc:
            aux_BTM = self.input_norm(aux_BTM)
        if self.shape.fc_norm:
            chunks = jnp.split(aux_BTM, self.shape.num_aux_hidden_states, axis=-1)
            aux_BTM = jnp.concatenate(
                [getattr(self, f"fc_norm_{i}")(x) for i, x in enumerate(chunks)], axis=-1
            )
        return self.fc("btm,md->btd", aux_BTM)

    def inputs(self, embed_BTD: jax.Array, state_BTD: jax.Array) -> jax.Array:
        """What q, k and v read: the normed embedding beside the normed state, [B, T, C]."""
        layer = self.midlayer
        return jnp.concatenate([layer.input_layernorm(embed_BTD), layer.hidden_norm(state_BTD)], axis=-1)

    def query(self, x_BTC: jax.Array, position_BT: jax.Array) -> jax.Array:
        """Rotated queries [B, T, N, H]."""
        return rope(self.midlayer.q("btc,cnh->btnh", x_BTC), position_BT, *self._turn())

    def key_value(self, x_BTC: jax.Array, position_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Rotated keys and values, [B, T, G, H] each."""
        k_BTGH = rope(self.midlayer.k("btc,cgh->btgh", x_BTC), position_BT, *self._turn())
        return k_BTGH, self.midlayer.v("btc,cgh->btgh", x_BTC)

    def _turn(self):
        shape = self.shape
        scaling = dict(shape.rope_scaling) if shape.rope_scaling else None
        return rope_frequencies(shape.head_dim, shape.rope_theta, scaling)

    def finish(self, state_BTD: jax.Array, attended_BTNH: jax.Array) -> jax.Array:
        """Output projection, residual from the (un-normed) state, MLP: the layer's output [B, T, D]."""
        layer = self.midlayer
        if self.shape.norm_before_residual:
            state_BTD = layer.hidden_norm(state_BTD)
        y_BTD = state_BTD + layer.o("btnw,nwd->btd", attended_BTNH)  # h before n would transpose both
        x_BTD = layer.post_attention_layernorm(y_BTD)
        z_BTF = jax.nn.silu(layer.gate("btd,df->btf", x_BTD)) * layer.up("btd,df->btf", x_BTD)
        return y_BTD + layer.down("btf,fd->btd", z_BTF)

    def head(self, state_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits [B, T, U] in float32, and the state that the next unroll step takes over [B, T, D]."""
        normed_BTD = self.norm(state_BTD)
        logits_BTU = self.lm_head("btd,du->btu", normed_BTD, preferred_element_type=jnp.float32)
        return logits_BTU, normed_BTD if self.shape.norm_output else state_BTD


def init(shape: DraftShape, seed: int) -> tuple[nnx.GraphDef, dict]:
    """Structure and random float32 weights, apart: from here on `params` is a plain nested dict."""
    graph, state = nnx.split(Draft(shape, rngs=nnx.Rngs(seed)))
    return graph, nnx.to_pure_dict(state)


def abstract(shape: DraftShape) -> tuple[nnx.GraphDef, dict, dict]:
    """Structure, ShapeDtypeStructs and axis strings; nothing is allocated."""
    module = nnx.eval_shape(lambda: Draft(shape, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)
    return graph, nnx.to_pure_dict(state), axes_of(module)


def bind(graph: nnx.GraphDef, params: dict) -> Draft:
    """The module with these weights, for use inside jit."""
    return nnx.merge(graph, params)
