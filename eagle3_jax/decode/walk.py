"""Accept length without decoding: a draft walks over texts that the target wrote greedily.

On such a text the rounds of speculative decoding are fixed by how many leading unroll steps are right at the row
that drafts, so one teacher-forced pass per draft gives what would otherwise take a decode each.
"""

import copy
import functools
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode.speculate import DraftWeights, pad_texts
from eagle3_jax.decode.writer import Writer
from eagle3_jax.draft import model
from eagle3_jax.draft.unroll import proposals
from eagle3_jax.target.model import Target


class Text(NamedTuple):
    """Token ids. A decoder's last round may accept drafts `beyond` the answer: what the target says after it.

    Where `beyond` is shorter than a chain, that round counts for less than a decoder would count.
    """

    prompt: Sequence[int]
    answer: Sequence[int]
    beyond: Sequence[int] = ()


def written(
    writer: Writer, params: dict, prompts: Sequence[Sequence[int]], *, limit: int, beyond: int,
    end_tokens: Collection[int], batch: int, advance: Callable[[int], None] = lambda n: None,
) -> list[Text]:  # fmt: skip
    """The target's greedy answers to `prompts`, of `limit` tokens at most, and what it says `beyond` them."""
    texts, order = [], sorted(prompts, key=len)
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        filled = [*part, *[part[-1]] * (batch - len(part))]
        for prompt, one in zip(part, writer.write(params, filled, limit + beyond, ()), strict=False):
            ids = one.ids[one.answer :].tolist()
            stop = next((i + 1 for i, t in enumerate(ids[:limit]) if t in end_tokens), limit)
            texts.append(Text(prompt, ids[:stop], ids[stop : stop + beyond]))
        advance(len(part) * (limit + beyond))
    return texts


class Batch(NamedTuple):
    """Texts of some numbers, padded, and the target's features on them; the last ones may be there twice."""

    numbers: list[int]
    ids: jax.Array  # [B, T], as are the next two
    position: jax.Array
    segment: jax.Array
    aux: jax.Array  # [B, T, M]
    final: jax.Array  # [B, T, D]


class Texts:
    """The target's features on texts, kept for any number of drafts."""

    def __init__(self, target: Target, params: dict, texts: Sequence[Text], batch: int, mesh: Mesh):
        forward = jax.jit(target.features)
        self.texts, self.layers = texts, target.aux_layers
        ids = [[*t.prompt, *t.answer, *t.beyond] for t in texts]
        order = sorted(range(len(texts)), key=lambda i: len(ids[i]))
        batch, self.batches = axes.round_up(min(batch, len(texts)), mesh.shape["data"]), []
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            filled = part + [part[-1]] * (batch - len(part))
            packed = jax.device_put(pad_texts([ids[i] for i in filled]), axes.rows(mesh))
            self.batches.append(Batch(part, *packed, *forward(params, *packed)))

    def of_layers(self, layers: Sequence[int] | None) -> "Texts":
        """The same texts as a draft sees them that is fed other of the captured layers, or (None) the last state."""

        def fed(batch: Batch) -> Batch:
            if layers is None:
                return batch._replace(aux=batch.final)
            states = jnp.split(batch.aux, len(self.layers), axis=-1)
            chosen = [states[self.layers.index(layer)] for layer in layers]
            return batch._replace(aux=jnp.concatenate(chosen, axis=-1))

        other = copy.copy(self)
        other.layers, other.batches = tuple(layers or ()), [fed(b) for b in self.batches]
        return other


def walk(texts: Texts, weights: DraftWeights, steps: int, late: int = 0) -> list[np.ndarray]:
    """Accepted drafts of every round of a chain of `steps`, an array per text.

    `late` is how far drafted rows sit behind their position, in an engine that has it wrong.
    """
    accepted = [np.zeros(0, int)] * len(texts.texts)
    for b in texts.batches:
        arrays = (b.ids, b.position, b.segment, b.aux)
        right_BT = jax.device_get(_right(weights, *arrays, steps=steps, late=late))
        for row, i in enumerate(b.numbers):
            accepted[i] = _rounds(right_BT[row], texts.texts[i])
    return accepted


def first_drafts(texts: Texts, weights: DraftWeights) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each text's answer, token by token: what is drafted first, and what came."""
    found = [(np.zeros(0, int), np.zeros(0, int))] * len(texts.texts)
    for b in texts.batches:
        arrays = (b.ids, b.position, b.segment, b.aux)
        first_BT, ids_BT = jax.device_get((_proposed(weights, *arrays, steps=1, late=0)[0], b.ids))
        for row, i in enumerate(b.numbers):
            n = len(texts.texts[i].prompt)
            end = n + len(texts.texts[i].answer)
            found[i] = first_BT[row, n - 1 : end - 2], ids_BT[row, n + 1 : end]
    return found


@functools.partial(jax.jit, static_argnames=("steps", "late"))
def _proposed(weights: DraftWeights, ids_BT, position_BT, segment_BT, aux_BTM, steps: int, late: int):
    """Target ids per step and row [K, B, T]."""
    draft = model.bind(weights.graph, weights.params)
    arrays = (ids_BT, position_BT, segment_BT, aux_BTM)
    return proposals(draft, weights.embedding, weights.d2t, *arrays, steps, late)


@functools.partial(jax.jit, static_argnames=("steps", "late"))
def _right(weights: DraftWeights, ids_BT, position_BT, segment_BT, aux_BTM, steps: int, late: int):
    """Leading right steps per row [B, T]."""
    guess_KBT = _proposed(weights, ids_BT, position_BT, segment_BT, aux_BTM, steps, late)
    later_KBT = jnp.stack([jnp.roll(ids_BT, -(k + 2), axis=1) for k in range(steps)])
    return jnp.sum(jnp.cumprod((guess_KBT == later_KBT).astype(jnp.int32), axis=0), axis=0)


def _rounds(right_T: np.ndarray, text: Text) -> np.ndarray:
    """Accepted drafts per round, from the first answer token, which the prefill gives, to the answer's end."""
    n = len(text.prompt)
    end = n + len(text.answer)
    known, accepted = end + len(text.beyond), []
    while n + 1 < end:  # x[n] is known, x[n+1] is not
        accepted.append(min(int(right_T[n - 1]), known - n - 1))
        n += accepted[-1] + 1
    return np.array(accepted, int)
