"""The curve's shortcut against the decoder that it stands for."""

import decode_fixture as tiny
import numpy as np

from eagle3_jax import axes
from eagle3_jax.decode import speculate, walk


def test_walking_over_the_finished_texts_gives_every_round_of_the_decoder():
    target, steps = tiny.tiny(), 3
    prompts = tiny.prompts(5, 3)
    long = tiny.tiny().writer.write(target.params, prompts, 21 + steps, ())
    ends = {int(long[0].ids[long[0].answer + 6])}  # at least one answer ends of itself
    decoded = speculate.decode(
        tiny.speculator(tiny.chain(steps)), target.params, tiny.trained(), prompts,
        max_new_tokens=21, end_tokens=tuple(ends), batch=3,
    )  # fmt: skip
    texts = []
    for prompt, written, answer in zip(prompts, long, decoded, strict=True):
        rest = written.ids[written.answer :].tolist()
        assert rest[: len(answer.tokens)] == answer.tokens
        texts.append(walk.Text(prompt, answer.tokens, rest[len(answer.tokens) :]))
    assert len({len(t.answer) for t in texts}) > 1
    texts = walk.Texts(target.target, target.params, texts, 3, axes.make_mesh())
    found = walk.walk(texts, tiny.trained(), steps)
    assert [a.tolist() for a in found] == [[r.accepted for r in a.rounds] for a in decoded]
    assert 0 < np.concatenate(found).mean() < steps
    assert np.concatenate(walk.walk(texts, tiny.untrained(), steps)).mean() < np.concatenate(found).mean()
