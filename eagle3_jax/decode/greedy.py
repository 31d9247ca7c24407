"""The target's own greedy answers, many prompts at once, with the features of every token on the way."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode.speculate import cache_room, pad_prompts, prefill
from eagle3_jax.target.model import Target

CHUNK = 16  # tokens between two looks at which answers have ended


class Written(NamedTuple):
    """A prompt and its answer of T tokens in all.

    ids [T] int32, answer: where the answer begins, aux [T, M], final [T, D], top [T] int32, lse [T] float32.
    """

    ids: np.ndarray
    answer: int
    aux: np.ndarray
    final: np.ndarray
    top: np.ndarray
    lse: np.ndarray


class Writer:
    """Compiled prefill and CHUNK steps of one target; the rows of a batch are spread over the data axis."""

    def __init__(self, target: Target, mesh: Mesh):
        self.target = target
        self._prefill = axes.over_rows(self._prefill_impl, mesh, arguments=4, whole=1, donate=(1,))
        self._steps = axes.over_rows(self._steps_impl, mesh, arguments=4, whole=1, donate=(1,))

    def _prefill_impl(self, params, cache, ids_BT, start_B):
        aux, final, cache = self.target.decode(params, cache, ids_BT, start_B)
        return cache, (aux, final, *self.target.top_and_lse(params, final))

    def _steps_impl(self, params, cache, token_B, n_B):
        def one(carry, _):
            cache, token_B, n_B = carry
            aux, final, cache = self.target.decode(params, cache, token_B[:, None], n_B)
            top, lse = self.target.top_and_lse(params, final)
            return (cache, top[:, 0], n_B + 1), (token_B, *(x[:, 0] for x in (aux, final, top, lse)))

        (cache, token_B, n_B), out = jax.lax.scan(one, (cache, token_B, n_B), length=CHUNK)
        return token_B, n_B, cache, tuple(jnp.moveaxis(x, 0, 1) for x in out)

    def write(
        self, params: dict, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_tokens: Sequence[int],
        advance: Callable[[int], None] = lambda n: None,
    ) -> list[Written]:  # fmt: skip
        """Answers to one batch of prompts, each up to an end token, which is kept, or `max_new_tokens`."""
        params = self.target.unstacked(params)
        ids_BT, n_B = pad_prompts(prompts)
        chunks = -(-max_new_tokens // CHUNK)
        cache = self.target.new_cache(len(prompts), cache_room(ids_BT.shape[1] + chunks * CHUNK))
        cache, head = prefill(functools.partial(self._prefill, params), cache, ids_BT)
        head = jax.device_get(head)
        token_B, at_B, parts = head[2][np.arange(len(n_B)), n_B - 1], n_B, []
        ends = np.array(sorted(end_tokens))
        for _ in range(chunks):
            token_B, at_B, cache, out = self._steps(params, cache, token_B, at_B)
            parts.append(jax.device_get(out))
            advance(len(prompts) * CHUNK)
            if np.isin(np.concatenate([p[0] for p in parts], axis=1), ends).any(axis=1).all():
                break
        new = [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        return [_one(prompt, b, head, new, max_new_tokens, ends) for b, prompt in enumerate(prompts)]


def _one(prompt, b: int, head, new, limit: int, ends: np.ndarray) -> Written:
    tokens = new[0][b, :limit]
    stop = np.flatnonzero(np.isin(tokens, ends))
    length = int(stop[0]) + 1 if len(stop) else len(tokens)
    n = len(prompt)
    features = [np.concatenate([h[b, :n], x[b, :length]]) for h, x in zip(head, new[1:], strict=True)]
    return Written(np.concatenate([np.asarray(prompt, np.int32), tokens[:length]]), n, *features)
