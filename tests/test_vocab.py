import numpy as np
import pytest

from eagle3_jax.data.vocab import build, counts, coverage
from eagle3_jax.errors import ConfigError, DataError


def table(pairs, size=8):
    out = np.zeros(size, np.int64)
    out[list(pairs)] = list(pairs.values())
    return out


@pytest.mark.parametrize(
    "pairs, size, ids, offsets",
    [
        ({2: 3, 4: 1}, 4, [0, 1, 2, 4], [0, 0, 0, 1]),
        ({1: 3, 2: 2, 3: 1, 6: 5}, 4, [1, 2, 3, 6], [1, 1, 1, 3]),
        ({1: 3, 2: 2, 3: 1, 6: 5, 7: 4}, 3, [1, 6, 7], [1, 5, 5]),
    ],
)
def test_the_most_frequent_tokens_are_chosen_as_the_reference_does(pairs, size, ids, offsets):
    d2t, t2d = build(table(pairs), size)
    assert np.flatnonzero(t2d).tolist() == ids
    assert d2t.tolist() == offsets and d2t.dtype == np.int64 and t2d.dtype == bool


def test_only_supervised_tokens_are_counted():
    ids = np.array([1, 2, 2, 2, 4, 4], np.int32)  # [1,2,2] and [2,4,4], cut to three tokens
    found = counts(ids, np.array([0, 1, 1, 1, 2, 0]), 8)
    assert found.tolist() == table({2: 3, 4: 1}).tolist() and found.dtype == np.int64


def test_offsets_lead_back_to_the_target_ids_and_the_whole_vocabulary_is_the_identity():
    found = np.random.default_rng(0).integers(0, 10, 100)
    d2t, t2d = build(found, 17)
    assert (np.arange(17) + d2t).tolist() == np.flatnonzero(t2d).tolist()
    ranked = sorted(range(100), key=lambda i: (-found[i], i))
    for size in range(1, 101):
        assert np.flatnonzero(build(found, size).t2d).tolist() == sorted(ranked[:size])
    d2t, t2d = build(found, 100)
    assert not d2t.any() and t2d.all() and coverage(found, np.flatnonzero(t2d)) == 1.0


def test_end_tokens_displace_the_least_frequent():
    found = table({1: 3, 2: 2, 3: 1, 6: 5})
    assert np.flatnonzero(build(found, 3, always=(7,)).t2d).tolist() == [1, 6, 7]
    assert np.flatnonzero(build(found, 3, always=(6, 6)).t2d).tolist() == [1, 2, 6]
    assert coverage(found, np.flatnonzero(build(found, 3, always=(7,)).t2d)) == 8 / 11


@pytest.mark.parametrize("size", [0, -1, 9, 4.0, True, "4"])
def test_a_draft_vocabulary_that_cannot_be_is_refused(size):
    with pytest.raises(ConfigError, match=r"draft.vocab_size=.* must be a whole number within 1 .. 8"):
        build(table({1: 1}), size)


def test_more_end_tokens_than_room_are_refused():
    with pytest.raises(ConfigError, match="no room for the 2 end tokens"):
        build(table({1: 1}), 1, always=(2, 3))


@pytest.mark.parametrize("wrong", [8, -1])
def test_a_token_outside_the_vocabulary_is_refused(wrong):
    with pytest.raises(DataError, match=f"token id {wrong} is outside the target's vocabulary 0 .. 7"):
        counts(np.array([1, wrong]), np.array([1, 1]), 8)
    with pytest.raises(DataError, match=f"token id {wrong}"):
        build(table({1: 1}), 3, always=(wrong,))


def test_nothing_supervised_is_covered_to_no_part():
    assert coverage(np.zeros(8, np.int64), np.arange(8)) == 0.0
