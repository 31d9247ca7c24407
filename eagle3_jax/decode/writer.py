"""The target's own answers to many prompts at once, greedy or sampled, with the features of every token if wanted."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode.sampling import GREEDY, Sampling, choose
from eagle3_jax.decode.speculate import cache_room, pad_prompts, prefill
from eagle3_jax.target.model import Target

CHUNK = 16  # tokens between two looks at which answers have ended


class Written(NamedTuple):
    """A prompt and its answer of T tokens in all.

    ids [T] int32, answer: where the answer begins; with features aux [T, M], final [T, D], top [T] int32,
    lse [T] float32.
    """

    ids: np.ndarray
    answer: int
    aux: np.ndarray | None = None
    final: np.ndarray | None = None
    top: np.ndarray | None = None
    lse: np.ndarray | None = None


class Writer:
    """Compiled prefill and CHUNK steps of one target; the rows of a batch are spread over the data axis.

    With `features` (greedy only) the states of every token come to the host with it; without, the answers' ids alone
    do. `room` is the size of the caches for texts of a given length: few sizes are few compilations.
    """

    def __init__(
        self, target: Target, mesh: Mesh, *, features: bool = True, sampling: Sampling = GREEDY,
        room: Callable[[int], int] = cache_room,
    ):  # fmt: skip
        self.target, self.features, self.sampling, self.room = target, features, sampling, room
        self._prefill = axes.over_rows(self._prefill_impl, mesh, arguments=4, whole=1, donate=(1,))
        self._steps = axes.over_rows(self._steps_impl, mesh, arguments=5, whole=1, donate=(1,))

    def _prefill_impl(self, params, cache, ids_BT, start_B):
        aux, final, cache = self.target.decode(params, cache, ids_BT, start_B)
        return cache, (aux, final, *self.target.top_and_lse(params, final)) if self.features else ()

    def _steps_impl(self, params, cache, token_B, n_B, stream_B):
        def one(carry, _):
            cache, token_B, n_B = carry
            aux, final, cache = self.target.decode(params, cache, token_B[:, None], n_B)
            if self.features:
                top, lse = self.target.top_and_lse(params, final)
                return (cache, top[:, 0], n_B + 1), (token_B, *(x[:, 0] for x in (aux, final, top, lse)))
            logits_BV = self.target.logits(params, final)[:, 0]
            token_B = choose(logits_BV, self.sampling, stream_B, n_B + 1)
            return (cache, token_B, n_B + 1), (token_B,)

        (cache, token_B, n_B), out = jax.lax.scan(one, (cache, token_B, n_B), length=CHUNK)
        return token_B, n_B, cache, tuple(jnp.moveaxis(x, 0, 1) for x in out)

    def write(
        self, params: dict, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_tokens: Sequence[int],
        advance: Callable[[int], None] = lambda n: None, streams: Sequence[int] | None = None,
    ) -> list[Written]:  # fmt: skip
        """Answers to one batch of prompts, each up to an end token, which is kept, or `max_new_tokens`.

        `streams` are the numbers of the prompts' random streams, see `choose`.
        """
        params = self.target.unstacked(params)
        ids_BT, n_B = pad_prompts(prompts)
        chunks = -(-max_new_tokens // CHUNK)
        cache = self.target.new_cache(len(prompts), self.room(ids_BT.shape[1] + chunks * CHUNK))
        cache, head = prefill(functools.partial(self._prefill, params), cache, ids_BT)
        rows, stream_B = np.arange(len(n_B)), np.asarray(streams or np.zeros(len(n_B)), np.int32)
        if self.features:  # a step begins with the first token of the answer
            head = jax.device_get(head)
            token_B, at_B = head[2][rows, n_B - 1], n_B
        else:  # with the last one of the prompt, once more: no row of the prefill has to be looked at
            token_B, at_B = ids_BT[rows, n_B - 1], n_B - 1
        parts, ends = [], np.array(sorted(end_tokens))
        for _ in range(chunks):
            token_B, at_B, cache, out = self._steps(params, cache, token_B, at_B, stream_B)
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
