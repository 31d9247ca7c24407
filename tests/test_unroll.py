"""Packed rows are their conversations run alone, and a row is supervised where drafting would visit it."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.data.loader import row
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.draft.unroll import Batch, Vocabulary, needed_rows, shift, supervised, unroll

SHAPE = DraftShape(
    hidden_size=8, num_aux_hidden_states=3, intermediate_size=12, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=60, draft_vocab_size=9, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
K, T = 7, 48
LENGTHS = (13, 17, 12)
# Turns of one conversation that follow each other at once, end with it, or are too short for seven steps.
SPANS = ([(3, 13)], [(1, 3), (3, 12), (14, 17)], [(0, 10), (10, 12)])
RNG = np.random.default_rng(0)
DRAFT_IDS = np.asarray([3, 8, 11, 21, 29, 34, 40, 41, 57])
VOCABULARY = Vocabulary(
    jnp.asarray(DRAFT_IDS - np.arange(9), jnp.int32), jnp.asarray(np.isin(np.arange(60), DRAFT_IDS))
)
EMBEDDING, HEAD = (jnp.asarray(RNG.normal(size=(n, 8)), jnp.float32) for n in (60, 9))
FLOATS = ("aux", "final", "lse")


def conversations() -> SimpleNamespace:
    """Three conversations whose tokens are told apart: each has 20 ids of its own."""
    total, span = sum(LENGTHS), []
    for length, turns in zip(LENGTHS, SPANS, strict=True):
        here = np.zeros(length, np.int32)
        for number, (a, b) in enumerate(turns, 1):
            here[a:b] = number
        span.append(here)
    ids = np.concatenate([RNG.integers(20 * i, 20 * i + 20, n) for i, n in enumerate(LENGTHS)])
    # Mostly tokens that the draft can propose, and mostly what the target would say: steps then go on for a while.
    known = np.concatenate([RNG.choice(DRAFT_IDS[3 * i : 3 * i + 3], n) for i, n in enumerate(LENGTHS)])
    ids = np.where(RNG.random(total) < 0.8, known, ids)
    final = RNG.normal(size=(total, 8)).astype(np.float32)
    logits = final @ RNG.normal(size=(8, 60))
    return SimpleNamespace(
        ids=ids.astype(np.int32), span=np.concatenate(span), offsets=np.cumsum([0, *LENGTHS]),
        aux=RNG.normal(size=(total, 24)).astype(np.float32), final=final,
        top=np.where(RNG.random(total) < 0.8, np.roll(ids, -1), logits.argmax(-1)).astype(np.int32),
        lse=np.log(np.exp(logits).sum(-1)).astype(np.float32),
    )  # fmt: skip


SOURCE = conversations()


def rows(*conversations) -> Batch:
    """A batch of one packed row."""
    return Batch(**{name: jnp.asarray(x)[None] for name, x in row(SOURCE, conversations, T).items()})


@functools.cache
def params():
    graph, abstract, _ = model.abstract(SHAPE)
    rng = np.random.default_rng(2)
    return graph, jax.tree.map(lambda x: (rng.normal(size=x.shape) * 0.4).astype(np.float32), abstract)


@functools.cache
def compiled(mask: str):
    """(weighted sum of all losses, sums) and its gradients by params, embedding, and the batch's features."""

    def total(params_, embedding, features, batch):
        draft = model.bind(params()[0], params_)
        batch = batch._replace(**features)
        sums, _ = unroll(draft, embedding, HEAD, VOCABULARY, batch, depth=K, mask=mask, oov_rows="drop")
        weights = 0.8 ** jnp.arange(K)
        return jnp.vdot(weights, sums.ce + 0.5 * sums.alpha - 0.3 * sums.rate), sums

    return jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))


def run(batch: Batch, mask: str):
    features = {name: getattr(batch, name) for name in FLOATS}
    (_, sums), grads = compiled(mask)(params()[1], EMBEDDING, features, batch)
    return jax.device_get(sums), jax.device_get(grads)


masks = pytest.mark.parametrize("mask", ["serve", "eagle"])


@masks
def test_a_packed_row_is_the_sum_of_its_conversations_run_alone(mask):
    packed, packed_grads = run(rows(0, 1, 2), mask)
    alone = [run(rows(i), mask) for i in range(3)]
    assert (packed.rows > 0).all() and (packed.supervised > packed.rows).all()
    assert packed.chain_rows[1] > 0
    for name in ("rows", "supervised", "correct", "chain_rows", "chain_correct"):
        np.testing.assert_array_equal(getattr(packed, name), sum(getattr(s, name) for s, _ in alone))
    for name in ("ce", "alpha", "rate"):
        np.testing.assert_allclose(getattr(packed, name), sum(getattr(s, name) for s, _ in alone), rtol=2e-6)
    summed = jax.tree.map(lambda *g: sum(g), *(g[:2] for _, g in alone))
    for (path, got), want in zip(
        jax.tree.leaves_with_path(packed_grads[:2]), jax.tree.leaves(summed), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=str(path))


@masks
@pytest.mark.parametrize("chosen", range(3))
def test_no_gradient_and_no_number_crosses_from_one_conversation_to_another(mask, chosen):
    batch = rows(0, 1, 2)
    own = np.asarray(batch.segment == chosen + 1)
    only = batch._replace(span=jnp.where(own, batch.span, 0))
    sums, (_, embedding, features) = run(only, mask)
    assert sums.supervised.all() and sums.rows[:3].all()
    mine = np.arange(60) // 20 == chosen
    assert embedding[mine].any() and not embedding[~mine].any()
    for name in ("aux", "lse"):
        assert features[name][own].any() and not features[name][~own].any()
    # The target's side has no gradient, so there the numbers themselves are compared.
    other = np.random.default_rng(5)
    strange = {
        name: jnp.where(own.reshape(1, T, *[1] * (x.ndim - 2)), x, jnp.asarray(other.integers(60), x.dtype))
        for name, x in only._asdict().items()
        if name not in ("segment", "position", "span", "rows")
    }  # fmt: skip
    again, _ = run(only._replace(**strange), mask)
    for name, x in sums._asdict().items():
        np.testing.assert_array_equal(x, getattr(again, name), err_msg=name)


@masks
@pytest.mark.parametrize("conversations", [(0, 1, 2), (2,), (1,)])
def test_computing_only_the_rows_that_count_changes_no_sum_and_no_gradient(mask, conversations):
    batch = rows(*conversations)
    chosen = needed_rows(
        {name: np.asarray(x) for name, x in batch._asdict().items() if x is not None}, K, mask
    )
    assert chosen.shape[1] < T
    dense, dense_grads = run(batch, mask)
    sums, grads = run(batch._replace(rows=jnp.asarray(chosen)), mask)
    for name, want in dense._asdict().items():
        np.testing.assert_allclose(getattr(sums, name), want, rtol=2e-6, err_msg=name)
    for (path, got), want in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(dense_grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max(), err_msg=str(path))


@masks
def test_the_rows_to_compute_are_those_that_count_at_any_step(mask):
    segment, span = random_spans()
    for some in (slice(None), slice(0, 3), slice(7, 8)):
        part = {"segment": segment[some], "span": span[some]}
        chosen = needed_rows(part, 3, mask)
        batch = SimpleNamespace(**part)
        counts = np.any([supervised(batch, k, mask) for k in range(3)], axis=0)
        there = np.zeros_like(counts)
        np.put_along_axis(there, chosen, True, axis=1)
        assert not (counts & ~there).any() and (np.diff(chosen, axis=1) > 0).all()
        assert chosen.shape[1] - counts.sum(axis=1).max() <= 30 / 8 + 1, "no more than a bucket too many"
    nothing = {"segment": segment, "span": np.zeros_like(span)}
    assert needed_rows(nothing, 3, mask).shape == (len(span), 4), "one bucket"


@masks
def test_what_lies_in_padding_changes_nothing(mask):
    batch = rows(1, 0)
    padding = np.asarray(batch.segment == 0)
    assert padding.sum() == 18
    filled = {
        name: jnp.where(padding.reshape(1, T, *[1] * (x.ndim - 2)), jnp.asarray(33, x.dtype), x)
        for name, x in batch._asdict().items()
        if name not in ("segment", "span", "rows")
    }
    sums, grads = run(batch, mask)
    again, grads_again = run(batch._replace(**filled), mask)
    jax.tree.map(np.testing.assert_array_equal, sums, again)
    jax.tree.map(np.testing.assert_array_equal, grads[:2], grads_again[:2])
    for name in ("aux", "lse"):
        assert not grads[2][name][padding].any() and grads[2][name][~padding].any()


def random_spans(count=150, length=30):
    """Packed rows of random conversations whose turns often touch, numbered through the row."""
    rng = np.random.default_rng(1)
    segment, span = (np.zeros((count, length), np.int32) for _ in range(2))
    for b in range(count):
        at = number = 0
        for s in range(1, rng.integers(2, 5)):
            end = min(length, at + rng.integers(2, 16))
            segment[b, at:end] = s
            while at < end:
                turn = min(end, at + rng.integers(1, 12))
                if rng.random() < 0.7:
                    number += 1
                    span[b, at:turn] = number
                at = turn
    return segment, span


def test_serving_rows_are_those_whose_drafted_tokens_lie_in_one_turn():
    segment, span = random_spans()
    batch = SimpleNamespace(segment=jnp.asarray(segment), span=jnp.asarray(span))
    total = 0
    for k in range(K):
        want = np.zeros(span.shape, bool)
        for b, t in np.ndindex(*span.shape):
            drafted = span[b, t + 1 : t + 3 + k]
            inside = t + 2 + k < span.shape[1] and len(set(segment[b, t : t + 3 + k])) == 1
            want[b, t] = inside and drafted[0] > 0 and len(set(drafted)) == 1
        np.testing.assert_array_equal(supervised(batch, k, "serve"), want)
        total += want.sum()
    assert total > 1000


def test_eagle_rows_are_those_whose_unshifted_token_lies_in_a_turn_and_whose_next_exists():
    segment, span = random_spans()
    batch = SimpleNamespace(segment=jnp.asarray(segment), span=jnp.asarray(span))
    for k in range(K):
        want = np.zeros(span.shape, bool)
        for b, t in np.ndindex(*span.shape):
            inside = t + 1 + k < span.shape[1] and len(set(segment[b, t : t + 2 + k])) == 1
            want[b, t] = inside and segment[b, t] > 0 and span[b, t + k] > 0
        np.testing.assert_array_equal(supervised(batch, k, "eagle"), want)


def test_a_shift_takes_what_is_n_to_the_right_and_zero_beyond_the_conversation():
    segment = jnp.asarray([[1, 1, 1, 2, 2, 0, 0]])
    x = jnp.arange(1, 8)[None]
    assert shift(x, 0, segment).tolist() == [[1, 2, 3, 4, 5, 0, 0]]
    assert shift(x, 2, segment).tolist() == [[3, 0, 0, 0, 0, 0, 0]]
    assert shift(jnp.stack([x, -x], -1), 1, segment)[0, :, 1].tolist() == [-2, -3, 0, -5, 0, 0, 0]


def test_oov_rows_are_dropped_or_kept_and_never_count_as_right():
    batch, draft = rows(0, 1, 2), model.bind(*params())

    def both(batch):
        return {
            rule: unroll(draft, EMBEDDING, HEAD, VOCABULARY, batch, depth=2, mask="serve", oov_rows=rule)[0]
            for rule in ("drop", "keep")
        }

    sums = jax.jit(both)(batch)
    np.testing.assert_array_equal(sums["keep"].rows, sums["keep"].supervised)
    np.testing.assert_array_equal(sums["drop"].supervised, sums["keep"].supervised)
    for k in range(2):
        counted = np.asarray(supervised(batch, k, "serve"))
        top = np.asarray(shift(batch.top, k + 1, batch.segment))
        assert sums["drop"].rows[k] == (np.isin(top, DRAFT_IDS) & counted).sum() < counted.sum()
