"""Accept length without decoding: a draft walks over texts that the target wrote greedily.

On such a text the rounds of speculative decoding are fixed by how many leading unroll steps are right at the row
that drafts, so one teacher-forced pass per checkpoint gives the curve that would otherwise take a decode each.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode.evaluate import accept_length
from eagle3_jax.decode.speculate import DraftWeights, pad_texts
from eagle3_jax.draft import model
from eagle3_jax.draft.unroll import proposals
from eagle3_jax.target.model import Target


class Texts:
    """The target's features on prompts and their greedy answers, kept for any number of drafts."""

    def __init__(
        self,
        target: Target,
        params: dict,
        texts: Sequence[tuple[Sequence[int], Sequence[int]]],
        batch: int,
        mesh: Mesh,
    ):
        forward = jax.jit(lambda p, *arrays: target.features(p, *arrays)[0])
        self.lengths = [(len(prompt), len(prompt) + len(answer)) for prompt, answer in texts]
        order = sorted(range(len(texts)), key=lambda i: self.lengths[i][1])
        batch, self.batches = axes.round_up(min(batch, len(texts)), mesh.shape["data"]), []
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            filled = part + [part[-1]] * (batch - len(part))
            packed = jax.device_put(
                pad_texts([[*texts[i][0], *texts[i][1]] for i in filled]), axes.rows(mesh)
            )
            self.batches.append((part, *packed, forward(params, *packed)))


def walk(texts: Texts, drafts: Iterable[DraftWeights], steps: int) -> list[float]:
    """Accept length of each draft over the texts with a chain of `steps`.

    The last round of an answer counts what the text still shows; a decoder would count its overshoot as well.
    """

    @jax.jit
    def right(weights: DraftWeights, ids_BT, position_BT, segment_BT, aux_BTM):
        """Leading right steps per row [B, T]."""
        draft = model.bind(weights.graph, weights.params)
        guess_KBT = proposals(
            draft, weights.embedding, weights.d2t, ids_BT, position_BT, segment_BT, aux_BTM, steps
        )
        later_KBT = jnp.stack([jnp.roll(ids_BT, -(k + 2), axis=1) for k in range(steps)])
        return jnp.sum(jnp.cumprod((guess_KBT == later_KBT).astype(jnp.int32), axis=0), axis=0)

    found = []
    for weights in drafts:
        pairs = []
        for part, *arrays in texts.batches:
            right_BT = jax.device_get(right(weights, *arrays))
            pairs += [_rounds(right_BT[b], *texts.lengths[i]) for b, i in enumerate(part)]
        found.append(accept_length(np.array(pairs)))
    return found


def _rounds(right_T: np.ndarray, n: int, end: int) -> tuple[int, int]:
    """(accepted, forwards) from the first answer token, which the prefill gives, to the end of the text."""
    accepted = forwards = 0
    while n + 1 < end:  # x[n] is known, x[n+1] is not
        taken = min(int(right_T[n - 1]), end - n - 1)
        accepted, forwards, n = accepted + taken, forwards + 1, n + taken + 1
    return accepted, forwards
