"""How many of a draft's proposals would be accepted on real text: the target's own greedy answers, walked over."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bridge.doctor import reading as readings
from bridge.doctor.reading import Loaded, Reading
from eagle3_jax.decode import evaluate
from eagle3_jax.decode.walk import Text, Texts, first_drafts, walk, written
from eagle3_jax.decode.writer import Writer
from eagle3_jax.errors import UserError
from eagle3_jax.progress import bar
from eagle3_jax.target.model import Target

EVER = 3  # times that a proposal has to come before it has a vote


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """What a reading accepts: [prompts, (accepted, forwards)], or why an engine would not start with it."""

    pairs: np.ndarray | None
    reason: str | None = None
    by_position: tuple[float, ...] = ()

    @property
    def accept_length(self) -> float | None:
        return None if self.pairs is None else evaluate.accept_length(self.pairs)

    @property
    def interval(self) -> list[float] | None:
        return None if self.pairs is None else evaluate.interval(self.pairs)


class Probe:
    """Prompts under each of their renderings, answered by the target once; any number of readings is measured on them.

    `prompts` has a list of token ids for every prompt, by rendering. Float32 throughout, a chain of `steps` drafts.
    """

    def __init__(
        self, target: Target, params: dict, prompts: dict[str, list[list[int]]], end_tokens: Sequence[int],
        mesh: Mesh, *, steps: int, max_new_tokens: int, batch: int = 8,
    ):  # fmt: skip
        self.steps, self._target, self._params, self._mesh = steps, target, params, mesh
        self._batch, self._layers, self._kept = batch, set(), {}
        writer = Writer(target, mesh, features=False)
        self.texts: dict[str, list[Text]] = {}
        total = sum(map(len, prompts.values())) * (max_new_tokens + steps + 1)
        with bar("the target's answers", total, "tokens") as progress:
            for rendering, ids in prompts.items():
                answers = written(
                    writer, params, ids, limit=max_new_tokens, beyond=steps + 1, end_tokens=end_tokens,
                    batch=batch, advance=progress.advance,
                )  # fmt: skip
                # Each rendering in the order of the prompts, so that two of them can be compared prompt by prompt.
                by_prompt = {tuple(text.prompt): text for text in answers}
                self.texts[rendering] = [by_prompt[tuple(p)] for p in ids]

    def __call__(self, reading: Reading) -> Measured:
        try:
            loaded = readings.load(reading)
        except UserError as error:
            return Measured(None, str(error))
        texts = self._fed(reading.rendering, loaded.layers)
        if reading.voted:
            accepted = self._voted(texts, loaded, reading.late)
        else:
            accepted = walk(texts, loaded.weights, self.steps, reading.late)
        by_position = evaluate.counts(accepted, self.steps)["acceptance_by_position"]
        return Measured(evaluate.pairs(accepted), by_position=tuple(by_position))

    def per_request(self, measured: Measured) -> float:
        """SGLang's figure of a request: all its tokens, the prefill's included, over its verify forwards."""
        forwards = measured.pairs[:, 1].sum()
        return sum(len(t.answer) for t in self.texts["as served"]) / max(int(forwards), 1)

    def _fed(self, rendering: str, layers: tuple[int, ...] | None) -> Texts:
        """The features that a draft is fed, of the target's layers that were asked for so far."""
        if missing := set(layers or ()) - self._layers or (set() if self._kept else {0}):
            near = {k + d for k in missing for d in (-1, 0, 1)}
            self._layers |= {k for k in near if 0 <= k <= self._target.shape.num_hidden_layers - 2}
            self._kept.clear()
        if rendering not in self._kept:
            target = Target(self._target.shape, tuple(sorted(self._layers)), self._target.dtype)
            self._kept[rendering] = Texts(
                target, self._params, self.texts[rendering], self._batch, self._mesh
            )
        return self._kept[rendering].of_layers(layers)

    def _voted(self, texts: Texts, loaded: Loaded, late: int) -> list[np.ndarray]:
        """With the map that the other half of the texts votes for."""
        own = np.asarray(loaded.weights.d2t)
        bare = dataclasses.replace(loaded.weights, d2t=jnp.zeros_like(loaded.weights.d2t))
        drafted, accepted = first_drafts(texts, bare), [np.zeros(0, int)] * len(texts.texts)
        for half in (0, 1):
            d2t = _vote(drafted[1 - half :: 2], own)
            weights = dataclasses.replace(bare, d2t=jnp.asarray(d2t, jnp.int32))
            accepted[half::2] = walk(texts, weights, self.steps, late)[half::2]
        return accepted


def _vote(pairs: Sequence[tuple[np.ndarray, np.ndarray]], d2t: np.ndarray) -> np.ndarray:
    """Offsets under which every draft id stands for what most often came where it was drafted first."""
    ids = np.arange(len(d2t)) + d2t
    drafted, came = (np.concatenate(x) for x in zip(*pairs, strict=True))
    for u, n in zip(*np.unique(drafted, return_counts=True), strict=True):
        if n >= EVER:
            values, votes = np.unique(came[drafted == u], return_counts=True)
            ids[u] = values[np.argmax(votes)]
    return ids - np.arange(len(d2t))
