"""Accept length from planted rounds, the whole command's dictionary from real ones, and the check against greedy."""

import dataclasses
import functools

import decode_fixture as tiny
import numpy as np
import pytest

from eagle3_jax import axes, commands
from eagle3_jax.decode import evaluate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.speculate import Answer, Round
from eagle3_jax.errors import DataError


def planted(accepted: list[int], tokens: int) -> Answer:
    """An answer of `tokens` tokens whose rounds accepted so many drafts."""
    rounds = [Round(10, 0, [0] * 3, [0, 1, 2], a, [0] * (a + 1)) for a in accepted]
    return Answer([*range(tokens)], rounds, [(1.0, 0, 0.0)] * tokens)


# One easy prompt of one round, one hard prompt of five, a category apart. The second answer is cut inside its
# last round: 1 + 8 tokens were emitted, 7 are wanted.
ANSWERS = [planted([3], 5), planted([0, 0, 1, 0, 2], 7), planted([2, 1], 6), planted([], 1)]
NAMED = [dict(id=str(i), category=c, ids=[1, 2]) for i, c in enumerate(["math", "writing", "math", "none"])]


def test_accept_length_is_pooled_and_counts_what_the_last_round_accepted():
    """9 drafts in 8 forwards; the mean over prompts would differ, and so would counting the answers' tokens."""
    found = evaluate.summary(NAMED, ANSWERS, 3)
    assert found["accept_length"] == found["sglang_server"] == 1 + 9 / 8
    assert (found["accepted_drafts"], found["verify_forwards"]) == (9, 8)
    assert found["by_category"] == {"math": 1 + 6 / 3, "none": 1.0, "writing": 1 + 3 / 5}
    assert found["sglang_request"] == (5 + 7 + 6 + 1) / 8
    assert found["histogram"] == [3, 2, 2, 1]
    assert found["acceptance_by_position"] == [5 / 8, 3 / 8, 1 / 8]


def test_a_draft_that_never_runs_has_accept_length_one():
    found = evaluate.summary(NAMED[:1], [planted([], 1)], 2)
    assert (found["accept_length"], found["interval"], found["histogram"]) == (1.0, [1.0, 1.0], [0, 0, 0])
    assert found["acceptance_by_position"] == [0.0, 0.0]


def test_the_interval_holds_the_point_and_is_the_same_every_time():
    rng = np.random.default_rng(0)

    def draw(prompts):
        forwards = rng.integers(5, 40, prompts)
        return np.stack([rng.binomial(3 * forwards, 0.2), forwards], axis=1)

    widths = []
    for prompts in (20, 2000):
        pairs = draw(prompts)
        low, high = evaluate.interval(pairs)
        assert low < evaluate.accept_length(pairs) < high
        assert [low, high] == evaluate.interval(pairs)
        widths.append(high - low)
    assert widths[1] < widths[0] / 5, "a hundred times the prompts, a tenth of the width"


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    rng, hits = np.random.default_rng(1), 0
    for _ in range(100):
        forwards = rng.integers(5, 40, 40)
        low, high = evaluate.interval(
            np.stack([rng.binomial(3 * forwards, 0.2), forwards], axis=1), draws=200
        )
        hits += low <= 1.6 <= high
    assert 85 <= hits <= 100


@pytest.mark.parametrize("period", [1, 2, 5, 24])
def test_a_loop_at_the_end_is_found(period):
    once = np.random.default_rng(period).permutation(100)[:period].tolist()
    start = [*range(200, 230)]
    looping = start + (once * 48)[:48]
    assert evaluate.loops(looping)
    assert not evaluate.loops([*looping[:-1], 999]), "the last token breaks it"
    assert not evaluate.loops([*looping[:-48], 999, *looping[-47:]]), "47 tokens repeat, 48 are wanted"


def test_long_periods_and_short_answers_are_no_loops():
    assert not evaluate.loops([*range(25)] * 4)
    assert not evaluate.loops([7] * 47)
    answers = [planted([], 1), planted([], 60), planted([], 50), planted([], 50)]
    answers[2].tokens[:] = [7] * 50
    assert evaluate.summary(NAMED, answers, 3)["looping"] == 1 / 4


PROMPTS = [
    dict(id=f"p{i}", category="even" if i % 2 == 0 else "odd", ids=ids)
    for i, ids in enumerate([*tiny.prompts(4, 1), *tiny.prompts(1, 2)])
]


CHAIN, TREE = tiny.chain(3), Drafting(3, 2, 6)


@functools.cache
def evaluated(plan: Drafting = CHAIN):
    """(the dictionary, the answers), with an end token that some answers reach."""
    return evaluate.evaluate(
        tiny.speculator(plan), tiny.tiny().params, tiny.trained(), PROMPTS, (7,), axes.make_mesh(),
        max_new_tokens=21, batch=3,
    )  # fmt: skip


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_evaluate_counts_what_the_simulator_counts(plan):
    found, _ = evaluated(plan)
    oracle, totals, by_category = tiny.oracle(tiny.trained()), np.zeros(2, int), {"even": [], "odd": []}
    histogram, tokens, overshoot = np.zeros(4, int), 0, 0
    for prompt in PROMPTS:
        answer, rounds = oracle.decode(prompt["ids"], plan, max_new_tokens=21, end_tokens=(7,))
        pair = np.array([sum(r.accepted for r in rounds), len(rounds)])
        by_category[prompt["category"]].append(pair)
        totals += pair
        histogram += np.bincount([r.accepted for r in rounds], minlength=4)
        tokens += len(answer)
        overshoot += 1 + sum(len(r.emitted) for r in rounds) - len(answer)
    assert overshoot > 0, "no answer was cut inside a round"
    assert found["accept_length"] == 1 + totals[0] / totals[1]
    assert (found["accepted_drafts"], found["verify_forwards"]) == tuple(totals)
    assert found["histogram"] == histogram.tolist()
    assert found["greedy"]["tokens"] == tokens
    assert found["sglang_request"] == tokens / totals[1]
    for name, pairs in by_category.items():
        accepted, forwards = sum(pairs)
        assert found["by_category"][name] == 1 + accepted / forwards


@pytest.mark.parametrize("plan", [CHAIN, TREE], ids=lambda p: p.name)
def test_the_parts_of_the_dictionary_add_up(plan):
    found, _ = evaluated(plan)
    assert sum(found["histogram"]) == found["verify_forwards"]
    assert sum(k * n for k, n in enumerate(found["histogram"])) == found["accepted_drafts"]
    per_position = np.array(found["acceptance_by_position"])
    assert (np.diff(per_position) <= 0).all()
    np.testing.assert_allclose(1 + per_position.sum(), found["accept_length"])
    assert found["interval"][0] <= found["accept_length"] <= found["interval"][1]
    settings = found["settings"]
    assert settings[plan.kind] == plan.name == {"chain": "3-1-4", "tree": "3-2-6"}[plan.kind]
    assert len({"chain", "tree"} & set(settings)) == 1
    assert (settings["steps"], settings["topk"], settings["tokens"]) == plan
    assert (settings["prompts"], settings["max_new_tokens"]) == (5, 21)
    assert (settings["temperature"], settings["dtype"]) == (0, "float32")
    assert found["greedy"]["near_ties"] == []


def test_the_text_says_chain_or_tree():
    for plan, said in ((CHAIN, "  chain 3-1-4, 5 prompts"), (TREE, "  tree 3-2-6, 5 prompts")):
        assert said in commands.describe_evaluation(evaluated(plan)[0] | {"step": 7})


def changed(answers, prompt: int, token: int, to: int, score=(1.0, 0, 0.0)):
    """The answers with one token, and the decoder's score of it, replaced."""
    answer = dataclasses.replace(
        answers[prompt], tokens=[*answers[prompt].tokens], scores=[*answers[prompt].scores]
    )
    answer.tokens[token], answer.scores[token] = to, score
    return [*answers[:prompt], answer, *answers[prompt + 1 :]]


def check(answers, params=None):
    target = tiny.tiny()
    return evaluate.check_greedy(
        target.target, params or target.params, PROMPTS, answers, 3, axes.make_mesh()
    )


def test_a_wrong_token_is_refused_with_its_prompt_and_place():
    _, answers = evaluated()
    assert check(answers) == []
    for prompt, place in ((0, 0), (2, len(answers[2].tokens) - 1), (4, 3)):
        token = answers[prompt].tokens[place]
        with pytest.raises(
            DataError,
            match=rf"prompt p{prompt}: token {place} of the answer is {(token + 1) % 64}, greedy decoding gives "
            rf"{token} .*not lossless",
        ):
            check(changed(answers, prompt, place, (token + 1) % tiny.V, (1.0, token, 1.0)))


@functools.cache
def twins(gap: float):
    """(params, answers, first, second): `second` reads as `first` does, and scores `gap` below it, relatively."""
    target, limit = tiny.tiny(), 110
    plain = [np.bincount(w.ids, minlength=tiny.V) for w in write(target.params, limit)]
    first, second = int(np.sum(plain, axis=0).argmax()), int(np.sum(plain, axis=0).argmin())
    params = dict(target.params)
    for name, leaf, factor in (("embed", "embedding", 1.0), ("lm_head", "kernel", 1.0 - gap)):
        table = params[name][leaf]
        params[name] = {leaf: table.at[second].set(table[first] * factor)}
    answers = [Answer(w.ids[w.answer :].tolist(), [], [(1.0, 0, 0.0)] * limit) for w in write(params, limit)]
    return params, answers, first, second


def write(params, limit):
    return tiny.tiny().writer.write(params, [p["ids"] for p in PROMPTS], limit, ())


def places(answers, token) -> list[tuple[int, int]]:
    """(prompt, place) of a token, the first one in each answer."""
    return [(i, a.tokens.index(token)) for i, a in enumerate(answers) if token in a.tokens]


def test_a_near_tie_is_excused_and_listed():
    params, answers, first, second = twins(2e-6)
    prompt, place = places(answers, first)[0]
    tied = changed(answers, prompt, place, second, (3.0, first, 3.0))
    (found,) = check(tied, params)
    assert found.pop("gap") < 1e-5
    assert found == dict(prompt=f"p{prompt}", token=place, chosen=second, greedy=first)


@pytest.mark.parametrize(
    "gap, score, why",
    [
        (1e-3, lambda first: (3.0, first, 3.0), "the full pass tells the two apart"),
        (2e-6, lambda first: (3.0, first, 2.999), "the decoder told the two apart"),
        (2e-6, lambda first: (3.0, first + 1, 3.0), "the decoder's runner-up was another token"),
    ],
    ids=["gap-in-the-check", "gap-in-the-decoder", "another-runner-up"],
)
def test_what_is_no_tie_in_both_is_not_excused(gap, score, why):
    params, answers, first, second = twins(gap)
    prompt, place = places(answers, first)[0]
    with pytest.raises(DataError, match=f"prompt p{prompt}: token {place} of the answer is {second}"):
        check(changed(answers, prompt, place, second, score(first)), params)


def test_more_near_ties_than_one_token_in_500_are_refused():
    """550 tokens: one is excused (above), two are too many."""
    params, answers, first, second = twins(2e-6)
    for prompt, place in places(answers, first)[:2]:
        answers = changed(answers, prompt, place, second, (3.0, first, 3.0))
    with pytest.raises(DataError, match="2 near ties in 550 tokens, at most 1 in 500"):
        check(answers, params)
