import numpy as np
import pytest

from eagle3_jax.data.loader import pack
from eagle3_jax.errors import DataError


@pytest.mark.parametrize("seed", range(3))
def test_every_conversation_is_whole_in_one_row_and_rows_are_full(seed):
    lengths = np.minimum(np.random.default_rng(seed).exponential(60, 2000).astype(int) + 1, 512)
    rows = pack(lengths, 512, seed)
    assert sorted(i for r in rows for i in r) == list(range(2000))
    filled = np.array([lengths[r].sum() for r in rows])
    assert filled.max() <= 512 and filled.sum() / (512 * len(rows)) > 0.99


def test_rows_are_the_same_for_a_seed_and_others_for_another():
    lengths = [3, 3, 3, 3, 4, 4, 4, 4]
    assert pack(lengths, 7, 0) == pack(lengths, 7, 0)
    assert len({str(pack(lengths, 7, seed)) for seed in range(5)}) > 1
    assert len(pack(lengths, 7, 0)) == 4


def test_the_tightest_fit_is_taken_and_nothing_gives_no_rows():
    assert sorted(map(len, pack([5, 5, 2, 3], 5, 0))) == [1, 1, 2]
    assert len(pack([7, 6, 3, 2, 2], 10, 0)) == 2
    assert pack([], 5, 0) == []


@pytest.mark.parametrize("wrong", [6, 0])
def test_a_conversation_that_fits_no_row_is_refused(wrong):
    with pytest.raises(
        DataError, match=f"conversation 1 has {wrong} tokens, 1 .. train.row_length=5 were wanted"
    ):
        pack([5, wrong], 5, 0)
