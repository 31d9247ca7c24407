"""The curve's shortcut against the decoder that it stands for."""

import decode_fixture as tiny
import numpy as np
import pytest

from eagle3_jax import axes
from eagle3_jax.decode import evaluate, speculate, walk


def test_walking_over_the_finished_texts_counts_the_decoders_rounds():
    target, steps = tiny.tiny(), 3
    prompts = tiny.prompts(5, 3)
    answers = speculate.decode(
        tiny.speculator(tiny.chain(steps)),
        target.params,
        tiny.trained(),
        prompts,
        max_new_tokens=21,
        end_tokens=(),
        batch=3,
    )
    pairs = np.array([(sum(r.accepted for r in a.rounds), len(a.rounds)) for a in answers])
    assert 0 < pairs[:, 0].sum() < steps * pairs[:, 1].sum()
    # With the overshoot of the last round the text ends where the decoder did.
    written = [[a.tokens[0], *(t for r in a.rounds for t in r.emitted)] for a in answers]
    texts = walk.Texts(
        target.target, target.params, list(zip(prompts, written, strict=True)), 3, axes.make_mesh()
    )
    found = walk.walk(texts, [tiny.trained(), tiny.untrained()], steps)
    assert found[0] == pytest.approx(evaluate.accept_length(pairs), abs=1e-12)
    assert found[1] < found[0]
