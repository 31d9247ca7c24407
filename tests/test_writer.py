"""The target's own answers: their text by full forward passes, their features by one pass over the finished text."""

import decode_fixture as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import axes
from eagle3_jax.decode.writer import Sampling, Writer, choose

PROMPTS = tiny.prompts(4, 2)
LIMIT = 20  # not a multiple of the chunk


@pytest.fixture(scope="module")
def written():
    target = tiny.tiny()
    return target.writer.write(target.params, PROMPTS, LIMIT, ())


def test_every_token_is_the_simulators_choice(written):
    oracle = tiny.oracle(tiny.untrained())
    for prompt, text in zip(PROMPTS, written, strict=True):
        want = list(prompt)
        for _ in range(LIMIT):
            want.append(int(oracle.features(want)[1][-1].argmax()))
        assert text.ids.tolist() == want
        assert text.answer == len(prompt)


def test_features_equal_one_forward_pass_over_the_finished_text(written):
    target = tiny.tiny()
    batch = tiny.as_batch(written)
    run = jax.jit(target.target.features)
    aux, final = run(target.params, batch.ids, batch.position, batch.segment)
    top, lse = target.target.top_and_lse(target.params, final)
    for row, text in enumerate(written):
        n = len(text.ids)
        for got, want in ((text.aux, aux), (text.final, final), (text.lse, lse)):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, want[row, :n], rtol=1e-4, atol=1e-4)
        np.testing.assert_array_equal(text.top, top[row, :n])


def test_what_each_token_of_the_answer_was_chosen_by_stands_one_row_before_it(written):
    for text in written:
        np.testing.assert_array_equal(text.top[text.answer - 1 : -1], text.ids[text.answer :])


def test_answers_end_at_the_end_token_which_stays(written):
    """At the first token, inside a chunk, at its last token, in the second chunk; other prompts go on."""
    target = tiny.tiny()
    for at in (0, 5, 15, 17):
        token = int(written[0].ids[written[0].answer + at])
        told = []
        found = target.writer.write(target.params, PROMPTS, LIMIT, (token, 1000), told.append)
        for got, whole in zip(found, written, strict=True):
            answer = whole.ids[whole.answer :].tolist()
            length = whole.answer + (answer.index(token) + 1 if token in answer else LIMIT)
            for a, b in zip(got, whole, strict=True):
                np.testing.assert_array_equal(a, b if isinstance(b, int) else b[:length])
        assert sum(told) >= sum(len(t.ids) - t.answer for t in found)


@pytest.mark.parametrize("limit", [1, 16, 17])
def test_max_new_tokens_is_exact(written, limit):
    target = tiny.tiny()
    for got, whole in zip(target.writer.write(target.params, PROMPTS, limit, ()), written, strict=True):
        np.testing.assert_array_equal(got.ids, whole.ids[: whole.answer + limit])
        assert len(got.aux) == len(got.final) == len(got.top) == len(got.lse) == len(got.ids)


def test_without_features_the_tokens_are_the_same(written):
    """Also where the cache is larger than it has to be, and an answer ends early."""
    target = tiny.tiny()
    plain = Writer(target.target, axes.make_mesh(), features=False, room=lambda length: 256)
    token = int(written[0].ids[written[0].answer + 5])
    for limit, ends in ((LIMIT, ()), (17, (token,)), (1, ())):
        found = plain.write(target.params, PROMPTS, limit, ends)
        wanted = target.writer.write(target.params, PROMPTS, limit, ends)
        for got, want in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got.ids, want.ids)
            assert got.answer == want.answer and got.aux is None


LOGITS = np.log([0.4, 0.3, 0.2, 0.1])
DRAWS = 20_000


def draws(sampling: Sampling, logits=LOGITS) -> np.ndarray:
    """Share of each token in the first places of many texts."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (DRAWS, len(logits)))
    found = choose(rows, sampling, jnp.arange(DRAWS), jnp.zeros(DRAWS, jnp.int32))
    return np.bincount(found, minlength=len(logits)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [
        (Sampling(1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(0.5), np.square([0.4, 0.3, 0.2, 0.1]) / 0.3),
        (Sampling(0.0), [1, 0, 0, 0]),
        (Sampling(1.0, 0.7001), [4 / 9, 3 / 9, 2 / 9, 0]),  # the token that reaches it counts
        (Sampling(1.0, 0.6), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1.0, 0.01), [1, 0, 0, 0]),
    ],
)
def test_tokens_are_drawn_as_often_as_they_are_probable(sampling, wanted):
    np.testing.assert_allclose(draws(sampling), wanted, atol=4 * (0.25 / DRAWS) ** 0.5)
    # whatever their order
    np.testing.assert_allclose(draws(sampling, LOGITS[::-1])[::-1], wanted, atol=4 * (0.25 / DRAWS) ** 0.5)


def test_a_draw_hangs_on_seed_text_and_place_alone():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(6, 50)), jnp.float32)
    text, place = jnp.array([3, 3, 3, 8, 8, 9]), jnp.array([0, 1, 2, 0, 1, 2])
    whole = choose(logits, Sampling(1.0), text, place)
    for part in ([4, 0], [2], [5, 4, 3, 2, 1, 0]):
        at = jnp.array(part)
        np.testing.assert_array_equal(choose(logits[at], Sampling(1.0), text[at], place[at]), whole[at])
    same = jnp.broadcast_to(logits[:1], (200, 50))
    count, none = jnp.arange(200), jnp.zeros(200, jnp.int32)
    ways = [(0, count, none), (0, none, count), (1, count, none), (0, count + 1, none)]
    found = [choose(same, Sampling(1.0, seed=seed), t, p) for seed, t, p in ways]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert np.mean(a == b) < 0.3
    np.testing.assert_array_equal(found[0][1:], found[3][:-1])
