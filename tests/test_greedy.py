"""The target's own answers: their text by full forward passes, their features by one pass over the finished text."""

import decode_fixture as tiny
import jax
import numpy as np
import pytest

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
