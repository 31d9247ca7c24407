"""Packed rows in batches, with a position that travels with each batch (grain does the walking)."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import grain
import numpy as np

from eagle3_jax.errors import DataError

FEATURES = ("aux", "final", "top", "lse")


class Source(Protocol):
    """Tokens on one flat axis: numpy arrays, or anything whose slices `np.asarray` takes (TensorStore).

    The features are optional: `aux` [N, M], `final` [N, D], `top` [N] int32, `lse` [N] float32.
    """

    ids: np.ndarray  # [N]
    span: np.ndarray  # [N]
    offsets: np.ndarray  # [conversations + 1]


def pack(lengths: Sequence[int], row_length: int, seed: int) -> list[list[int]]:
    """Rows of conversations (indices into `lengths`) of at most `row_length` tokens; none is split.

    Best fit, longest first; `seed` orders equal lengths. Raises DataError for a conversation that fits no row.
    """
    lengths = np.asarray(lengths, np.int64)
    for i in np.flatnonzero((lengths < 1) | (lengths > row_length))[:1]:
        raise DataError(
            f"conversation {i} has {lengths[i]:,} tokens, 1 .. train.row_length={row_length:,} were wanted; "
            "raise train.row_length or lower data.max_length"
        )
    mixed = np.random.default_rng(seed).permutation(len(lengths))
    order = mixed[np.argsort(-lengths[mixed], kind="stable")]
    rows: list[list[int]] = []
    by_space: dict[int, list[int]] = {}  # tokens free -> rows
    spaces = 0  # bit s is set where a row with s tokens free exists: the tightest fit is its lowest high bit
    for i in order.tolist():
        length = int(lengths[i])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = by_space[space].pop()
            if not by_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = row_length, len(rows)
            rows.append([])
        rows[row].append(i)
        left = space - length
        if left:
            by_space.setdefault(left, []).append(row)
            spaces |= 1 << left
    return rows


def row(source: Source, conversations: Sequence[int], row_length: int) -> dict[str, np.ndarray]:
    """One packed row.

    | name     | shape | dtype | meaning                                                             |
    | ids      | [T]   | int32 | tokens, 0 after the last conversation                               |
    | segment  | [T]   | int32 | 1, 2, ... the conversations, 0 after the last                       |
    | position | [T]   | int32 | within the conversation                                             |
    | span     | [T]   | int32 | 0, or the number of the assistant turn, counted through the row     |
    | features | [T, ..] | as stored | aux, final, top, lse where the source has them, 0 after the last |
    """
    names = [n for n in FEATURES if getattr(source, n, None) is not None]
    out = {n: np.zeros(row_length, np.int32) for n in ("ids", "segment", "position", "span")}
    at = spans = 0
    for segment, i in enumerate(conversations, 1):
        first, last = int(source.offsets[i]), int(source.offsets[i + 1])
        here = slice(at, at + last - first)
        out["ids"][here] = source.ids[first:last]
        out["segment"][here] = segment
        out["position"][here] = np.arange(last - first)
        span = np.asarray(source.span[first:last])
        out["span"][here] = np.where(span > 0, span + spans, 0)
        spans += int(span.max(initial=0))
        for name in names:
            part = np.asarray(getattr(source, name)[first:last])
            if name not in out:
                out[name] = np.zeros((row_length, *part.shape[1:]), part.dtype)
            out[name][here] = part
        at = here.stop
    return out


class Batches(Iterator):
    """Endless batches of packed rows, in a new order every epoch.

    `next` gives a dict of arrays [B, T, ...] (see `row`) and the position after them, JSON-able: `set_state` of it
    continues with the batch that comes next, however many were prefetched meanwhile. A batch may hold the end of one
    epoch and the beginning of the next: each epoch shows each row once.
    """

    def __init__(
        self,
        source: Source,
        conversations: Sequence[int],
        row_length: int,
        batch: int,
        seed: int,
        prefetch: int = 0,
    ):
        conversations = np.asarray(conversations, np.int64)
        lengths = np.diff(np.asarray(source.offsets))[conversations]
        rows = [conversations[r].tolist() for r in pack(lengths, row_length, seed)]
        if len(rows) < batch:
            raise DataError(
                f"{len(conversations):,} conversations of {int(lengths.sum()):,} tokens fill {len(rows)} rows of "
                f"{row_length}, train.batch={batch} wants as many at least; prepare more data or lower train.batch"
            )
        self.rows_per_epoch, self.tokens_per_epoch = len(rows), int(lengths.sum())
        self.batch, self.consumed = batch, 0  # batches
        self._made_of = {
            "rows": len(rows), "row_length": row_length, "tokens": self.tokens_per_epoch, "batch": batch, "seed": seed,
        }  # fmt: skip
        # grain takes seeds of 32 bits.
        self._order = grain.MapDataset.source(rows).seed(seed % 2**32).shuffle().repeat()
        data = self._order.map(lambda r: row(source, r, row_length)).batch(batch, drop_remainder=True)
        self._iterator = iter(data.to_iter_dataset(grain.ReadOptions(min(prefetch, 2), prefetch)))

    @property
    def epoch(self) -> float:
        """Epochs consumed so far; 1.5 is in the middle of the second."""
        return self.consumed * self.batch / self.rows_per_epoch

    def conversations(self, step: int) -> list[int]:
        """The conversations in the batch of a step, 1 being the first."""
        return [i for n in range((step - 1) * self.batch, step * self.batch) for i in self._order[n]]

    def __next__(self) -> tuple[dict[str, np.ndarray], dict]:
        batch = next(self._iterator)
        self.consumed += 1
        return batch, {**self._made_of, "consumed": self.consumed, "grain": self._iterator.get_state()}

    def set_state(self, state: dict) -> None:
        """Continue after the batch that `state` came with. Raises DataError if it is of other data."""
        for key, value in self._made_of.items():
            if state.get(key) != value:
                raise DataError(
                    f"the saved position is one among {key}={state.get(key)}, this data has {key}={value}; "
                    "resume with the data and batch size of the run, or start a new run"
                )
        self._iterator.set_state(state["grain"])
        self.consumed = state["consumed"]
