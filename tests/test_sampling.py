"""Temperature > 0: what speculative decoding emits is distributed as the target's own text, whatever drafts."""

import functools

import decode_fixture as tiny
import numpy as np
import pytest
from scipy import special, stats

from eagle3_jax import axes
from eagle3_jax.decode import speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.sampling import Sampling, choose

CHAIN, TREE = tiny.chain(3), Drafting(3, 2, 6)
HOT = Sampling(temperature=0.6, seed=4)
MANY = 2000
PROMPT = tiny.prompts(16, 8)[15]  # whose answers the draft often knows


@functools.cache
def speculator(plan=CHAIN, sampling=HOT):
    return speculate.Speculator(tiny.tiny().target, plan, axes.make_mesh(), sampling)


def decode(prompts, weights, limit, batch, plan=CHAIN, sampling=HOT):
    return speculate.decode(
        speculator(plan, sampling), tiny.tiny().params, weights, prompts,
        max_new_tokens=limit, end_tokens=(), batch=batch,
    )  # fmt: skip


@functools.cache
def samples():
    """Three tokens after one prompt, many times."""
    return decode([PROMPT] * MANY, tiny.trained(), 3, MANY)


@functools.cache
def after(texts):
    """The target's probabilities [texts, V] of the token after the prompt and each of these."""
    target, params = tiny.tiny().target, tiny.tiny().params
    packed = speculate.pad_texts([[*PROMPT, *t] for t in texts])
    _, final = target.features(params, *packed)
    rows = final[np.arange(len(texts)), [len(PROMPT) + len(t) - 1 for t in texts]]
    logits = target.logits(params, rows[:, None])[:, 0]
    return special.softmax(np.asarray(logits, np.float64) / HOT.temperature, axis=-1)


def pvalue(found, wanted):
    """Chi-square of counts against probabilities; rare events are one."""
    expected = wanted * found.sum()
    order = np.argsort(expected)
    rare = order[np.cumsum(expected[order]) < 20]
    merge = np.setdiff1d(order, rare)
    assert len(merge) > 10
    bins = [(found[merge], expected[merge]), ([found[rare].sum()], [expected[rare].sum()])]
    found, expected = (np.concatenate(x) for x in zip(*bins, strict=True))
    return stats.chisquare(found[expected > 0], expected[expected > 0]).pvalue


def test_the_emitted_distribution_is_the_targets():
    tokens = np.array([a.tokens for a in samples()])
    assert tokens.shape == (MANY, 3)
    accepted = np.array([r.accepted for a in samples() for r in a.rounds])
    assert 0.1 < np.mean(accepted > 0) < 0.9  # both ways of getting a token are in it
    first, second = after(((),))[0], after(tuple((a,) for a in range(tiny.V)))
    joint = (first[:, None] * second).reshape(-1)
    pairs = np.bincount(tokens[:, 0] * tiny.V + tokens[:, 1], minlength=tiny.V**2)
    assert pvalue(pairs, joint) > 0.01
    # The third token, given the two before it.
    before, counts = np.unique(tokens[:, :2], axis=0, return_counts=True)
    third = counts @ after(tuple(map(tuple, before.tolist()))) / MANY
    assert pvalue(np.bincount(tokens[:, 2], minlength=tiny.V), third) > 0.01
    # The test can tell: a little colder is another distribution.
    assert pvalue(pairs, joint**1.15 / np.sum(joint**1.15)) < 1e-3


def test_a_draft_is_accepted_with_the_targets_probability_of_it():
    rounds = [a.rounds[0] for a in samples()]
    bonuses, where = np.unique([r.bonus for r in rounds], return_inverse=True)
    probability = after(tuple((b,) for b in bonuses.tolist()))[where, [r.drafts[0] for r in rounds]]
    found = np.mean([r.accepted > 0 for r in rounds])
    sigma = np.sqrt(np.sum(probability * (1 - probability))) / MANY
    assert abs(found - probability.mean()) < 3 * sigma


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_text_is_that_of_its_seed_and_number_whatever_is_drafted_beside_it(plan):
    prompts = tiny.prompts(5, 3)
    alone = [a.tokens for a in decode(prompts, tiny.untrained(), 20, 1)]
    found = decode(prompts, tiny.trained(), 20, 3, plan)
    assert [a.tokens for a in found] == alone
    assert sum(r.accepted for a in found for r in a.rounds) > 0
    assert len({tuple(a.tokens) for a in decode([PROMPT] * 4, tiny.trained(), 20, 4)}) == 4
    other = decode(prompts, tiny.trained(), 20, 3, sampling=HOT._replace(seed=5))
    assert [a.tokens for a in other] != alone


def test_only_the_most_probable_tokens_are_drawn_with_top_p():
    logits = np.random.default_rng(0).normal(0, 1.5, 32).astype(np.float32)
    order, probability = np.argsort(-logits), special.softmax(logits / HOT.temperature)
    kept = order[: int(np.searchsorted(np.cumsum(probability[order]), 0.8)) + 1]
    streams = np.arange(2000, dtype=np.int32)
    drawn = choose(np.tile(logits, (2000, 1)), HOT._replace(top_p=0.8), streams, np.zeros_like(streams))
    assert set(np.asarray(drawn).tolist()) == set(kept.tolist()) and 1 < len(kept) < 20
