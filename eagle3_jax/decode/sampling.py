"""How the target's next token is chosen: the best one, or one drawn."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sampling(NamedTuple):
    """Temperature 0 takes the best token."""

    temperature: float = 0.0
    top_p: float = 1.0  # only the most probable tokens that together reach it
    seed: int = 0


GREEDY = Sampling()


def choose(logits_BV: jax.Array, sampling: Sampling, stream_B: jax.Array, place_B: jax.Array) -> jax.Array:
    """The next token of every row [B] int32.

    stream   B  int32  the row's text
    place    B  int32  the token's place in that text
    A token's randomness is that of (seed, stream, place), whatever other rows there are.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_p < 1:
        best_BV = jnp.sort(logits_BV, axis=-1, descending=True)
        share_BV = jax.nn.softmax(best_BV, axis=-1)
        kept_BV = jnp.cumsum(share_BV, axis=-1) - share_BV < sampling.top_p
        least_B1 = jnp.min(jnp.where(kept_BV, best_BV, jnp.inf), axis=-1, keepdims=True)
        logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)

    def draw(logits_V, stream, place):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(sampling.seed), stream), place)
        return jax.random.categorical(key, logits_V)

    return jax.vmap(draw)(logits_BV, stream_B, place_B).astype(jnp.int32)
