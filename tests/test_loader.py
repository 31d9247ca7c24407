import json
from types import SimpleNamespace

import numpy as np
import pytest
import tensorstore

from eagle3_jax.data.loader import Batches, row
from eagle3_jax.errors import DataError

LENGTHS = [5, 3, 7, 8, 2, 4, 6, 1, 8, 3, 5, 4]


def source(features=False):
    total, rng = sum(LENGTHS), np.random.default_rng(0)
    span = np.concatenate([np.arange(n) // 2 % 2 * (1 + np.arange(n) // 4) for n in LENGTHS])
    out = SimpleNamespace(
        ids=np.arange(1, total + 1, dtype=np.int32),  # every token is told apart by its id
        span=span.astype(np.int32),
        offsets=np.cumsum([0, *LENGTHS]),
    )
    if features:
        out.aux, out.final = rng.random((total, 6), np.float32), rng.random((total, 2), np.float32)
        out.top, out.lse = out.ids * 10, rng.random(total, np.float32)
    return out


def batches(prefetch=0, batch=2, seed=1, conversations=range(12), row_length=8, **kwargs):
    return Batches(source(**kwargs), conversations, row_length, batch, seed, prefetch)


def equal(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def test_a_row_holds_its_conversations_with_segments_positions_and_spans():
    found = row(source(features=True), [2, 0, 4], 16)
    assert found["ids"].tolist() == [*range(9, 16), *range(1, 6), 24, 25, 0, 0]
    assert found["segment"].tolist() == [1] * 7 + [2] * 5 + [3] * 2 + [0, 0]
    assert found["position"].tolist() == [*range(7), *range(5), 0, 1, 0, 0]
    assert found["span"].tolist() == [0, 0, 1, 1, 0, 0, 2, 0, 0, 3, 3, 0, 0, 0, 0, 0]
    assert found["top"].tolist() == (found["ids"] * 10).tolist()
    assert found["aux"].shape == (16, 6) and found["lse"].dtype == np.float32
    assert not found["aux"][14:].any() and not found["lse"][14:].any()
    whole = source(features=True)
    assert np.array_equal(found["final"][7:12], whole.final[:5])


def test_spans_of_a_row_never_share_a_number():
    data = batches(batch=7)
    for segments, spans in zip(*(next(data)[0][k] for k in ("segment", "span")), strict=True):
        pairs = {(s, n) for s, n in zip(segments, spans, strict=True) if n}
        assert len(pairs) == len({n for _, n in pairs})


def test_features_may_lie_in_a_tensorstore():
    here, there = source(features=True), source(features=True)
    for name in ("ids", "span", "aux", "final", "top", "lse"):
        array = getattr(here, name)
        setattr(there, name, tensorstore.array(array))
    assert equal(row(here, [2, 0], 16), row(there, [2, 0], 16))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_saved_position_continues_bit_for_bit_across_epochs(prefetch):
    whole = batches(prefetch, features=True)
    seen = [next(whole) for _ in range(20)]
    assert whole.epoch > 4
    for stop in (0, 1, 4, 9):
        state = json.loads(json.dumps(seen[stop][1]))
        resumed = batches(prefetch, features=True)
        resumed.set_state(state)
        for batch, position in seen[stop + 1 : stop + 6]:
            again, there = next(resumed)
            assert equal(again, batch) and there == position
    whole.set_state(seen[2][1])  # backwards, while batches are being prefetched
    assert equal(next(whole)[0], seen[3][0])


def test_prefetch_changes_nothing():
    for (a, at), (b, there), _ in zip(batches(0), batches(2), range(9), strict=False):
        assert equal(a, b) and at == there


@pytest.mark.parametrize("batch", [1, 7])
def test_every_conversation_comes_once_an_epoch_in_another_order(batch):
    data = batches(batch=batch)
    assert data.rows_per_epoch == 7 and data.tokens_per_epoch == sum(LENGTHS)
    orders = []
    for _ in range(3):
        ids = np.concatenate([next(data)[0]["ids"].ravel() for _ in range(data.rows_per_epoch // batch)])
        assert sorted(ids[ids > 0]) == list(range(1, sum(LENGTHS) + 1))
        orders.append(ids.tolist())
    assert data.epoch == 3 and len(set(map(str, orders))) == 3


def test_a_batch_over_the_end_of_an_epoch_loses_no_row():
    data = batches(batch=2)
    ids = np.concatenate([next(data)[0]["ids"].ravel() for _ in range(7)])
    assert sorted(ids[ids > 0]) == sorted([*range(1, sum(LENGTHS) + 1)] * 2)


def test_only_the_chosen_conversations_are_read():
    batch, _ = next(batches(batch=1, conversations=np.array([4, 1]), row_length=8))
    assert sorted(batch["ids"].ravel().tolist()) == [0, 0, 0, 6, 7, 8, 24, 25]
    assert {k: v.shape for k, v in batch.items()} == dict.fromkeys(
        ("ids", "segment", "position", "span"), (1, 8)
    )


def test_the_conversations_of_a_step_are_those_of_its_batch():
    data = batches(batch=2)
    first = np.cumsum([0, *LENGTHS])
    for step in range(1, 15):
        ids = next(data)[0]["ids"]
        wanted = {t for i in data.conversations(step) for t in range(first[i] + 1, first[i + 1] + 1)}
        assert set(ids[ids > 0].tolist()) == wanted, step


def test_the_seed_decides_the_order():
    first = [next(batches(seed=s))[0]["ids"].tolist() for s in (1, 1, 2)]
    assert first[0] == first[1] != first[2]


def test_fewer_rows_than_a_batch_are_refused():
    with pytest.raises(DataError, match=r"2 conversations of 5 tokens fill 1 rows of 8, train.batch=2 wants"):
        batches(conversations=[4, 1])


def test_a_position_in_other_data_is_refused():
    _, state = next(batches())
    with pytest.raises(DataError, match="batch=2, this data has batch=3"):
        batches(batch=3).set_state(state)
