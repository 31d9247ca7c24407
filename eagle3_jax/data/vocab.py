"""The draft's vocabulary: which of the target's tokens the draft can propose (d2t, t2d)."""

from typing import NamedTuple

import numpy as np

from eagle3_jax.errors import ConfigError, DataError


class VocabMap(NamedTuple):
    d2t: np.ndarray  # [U] int64 offsets: draft token i is target token i + d2t[i]
    t2d: np.ndarray  # [V] bool: the draft can propose this target token


def counts(ids: np.ndarray, span: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each target token is supervised: int64 [V] of flat ids and span ids [N].

    Raises DataError for an id outside 0 .. V-1.
    """
    taught = np.asarray(ids)[np.asarray(span) > 0]
    check_ids(taught, vocab_size)
    return np.bincount(taught, minlength=vocab_size).astype(np.int64)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Refuse token ids that the target has no row for."""
    if len(ids) and (ids.min() < 0 or ids.max() >= vocab_size):
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise DataError(
            f"token id {wrong} is outside the target's vocabulary 0 .. {vocab_size - 1}; "
            "the tokenizer must be the target's own"
        )


def build(counts: np.ndarray, draft_vocab_size: int, always: tuple[int, ...] = ()) -> VocabMap:
    """The `draft_vocab_size` most frequent tokens, ties and unused ones by lowest id, in ascending order.

    The tokens `always` are in whatever their count, in place of the least frequent others.
    """
    vocab_size = len(counts)
    if type(draft_vocab_size) is not int or not 1 <= draft_vocab_size <= vocab_size:
        raise ConfigError(
            f"draft.vocab_size={draft_vocab_size!r} must be a whole number within 1 .. {vocab_size}, "
            "the target's vocabulary"
        )
    forced = np.unique(np.asarray(always, np.int64))
    check_ids(forced, vocab_size)
    if len(forced) > draft_vocab_size:
        raise ConfigError(
            f"draft.vocab_size={draft_vocab_size} has no room for the {len(forced)} end tokens {forced.tolist()}"
        )
    ranked = np.argsort(-np.asarray(counts), kind="stable")
    others = ranked[~np.isin(ranked, forced)][: draft_vocab_size - len(forced)]
    chosen = np.sort(np.concatenate([forced, others]))
    t2d = np.zeros(vocab_size, bool)
    t2d[chosen] = True
    return VocabMap(chosen - np.arange(draft_vocab_size), t2d)


def coverage(counts: np.ndarray, ids: np.ndarray) -> float:
    """Share of the supervised tokens that a draft can propose whose target ids [U] are these, 0 .. 1."""
    return float(counts[ids].sum() / max(counts.sum(), 1))
