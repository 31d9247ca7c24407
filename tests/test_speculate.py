"""The decoder against the numpy simulator, against plain greedy decoding, and against the unroll."""

import dataclasses
import functools

import decode_fixture as tiny
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.decode import speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.speculate import Speculator, decode
from eagle3_jax.draft import model, unroll

PROMPTS = [
    *tiny.prompts(4, 1),
    *tiny.prompts(3, 2),
]  # four that the draft was trained on, three that it was not
BATCH = 3  # so that the last batch is short
KINDS = {"trained": tiny.trained, "untrained": tiny.untrained}
CHAIN, TREE = tiny.chain(3), Drafting(4, 3, 10)
PLANS = [
    tiny.chain(1), CHAIN, tiny.chain(5), TREE, Drafting(3, 2, 6),
    Drafting(1, 4, 5), Drafting(2, 3, 13), Drafting(5, 2, 4),  # one level; all candidates; less deep than levels
]  # fmt: skip


def plans(*some: Drafting):
    return pytest.mark.parametrize("plan", some, ids=lambda p: p.name)


@functools.cache
def answers(plan: Drafting, limit: int = tiny.LIMIT, ends: tuple[int, ...] = (), kind: str = "trained"):
    target = tiny.tiny()
    return decode(
        tiny.speculator(plan),
        target.params,
        KINDS[kind](),
        PROMPTS,
        max_new_tokens=limit,
        end_tokens=ends,
        batch=BATCH,
    )


@functools.cache
def greedy(limit: int = tiny.LIMIT, ends: tuple[int, ...] = ()) -> list[list[int]]:
    target = tiny.tiny()
    written = [target.writer.write(target.params, part, limit, ends) for part in (PROMPTS[:4], PROMPTS[3:])]
    return [w.ids[w.answer :].tolist() for w in [*written[0], *written[1][1:]]]


def assert_equal_to_the_oracle(oracle, prompts, found, plan, limit, ends=()):
    for prompt, answer in zip(prompts, found, strict=True):
        tokens, rounds = oracle.decode(prompt, plan, max_new_tokens=limit, end_tokens=ends)
        assert [vars(r) for r in answer.rounds] == [vars(r) for r in rounds]
        assert answer.tokens == tokens


def drafted_counts(found, steps: int) -> np.ndarray:
    return np.bincount([r.accepted for a in found for r in a.rounds], minlength=steps + 1)


def path(round_) -> list[int]:
    """The accepted nodes, found anew."""
    nodes = [0]
    for token in round_.emitted[:-1]:
        (node,) = (
            i + 1
            for i, (t, p) in enumerate(zip(round_.drafts, round_.parents, strict=True))
            if (t, p) == (token, nodes[-1])
        )
        nodes.append(node)
    return nodes


@plans(*PLANS)
def test_every_round_equals_the_numpy_simulator(plan):
    found = answers(plan)
    assert np.count_nonzero(drafted_counts(found, plan.steps)) >= 2 + plan.depth // 2, (
        "the rounds are too much alike"
    )
    assert_equal_to_the_oracle(tiny.oracle(tiny.trained()), PROMPTS, found, plan, tiny.LIMIT)


def test_the_trees_are_trees_and_their_best_nodes_are_not_always_right():
    rounds = [r for a in answers(TREE) for r in a.rounds]
    assert {len(r.drafts) for r in rounds} == {9}
    assert len({tuple(r.parents) for r in rounds}) > 10, "their shape follows from the draft's probabilities"
    assert sum(path(r) != [*range(r.accepted + 1)] for r in rounds) > 10


def test_a_drafted_row_sees_the_rows_that_stood_in_its_place_as_in_sglang():
    """The draft attends sharply and all candidates are verified, so that the rule shows in what is proposed."""
    weights, plan, prompts = tiny.untrained(), Drafting(4, 3, 31), PROMPTS[:3]
    sharp = jax.tree.map(lambda x: x, weights.params)
    for name in "qkvo":
        sharp["midlayer"][name]["kernel"] = 3 * sharp["midlayer"][name]["kernel"]
    weights = tiny.weights(weights.graph, sharp)
    found = decode(
        tiny.speculator(plan), tiny.tiny().params, weights, prompts, max_new_tokens=12, end_tokens=(),
        batch=BATCH,
    )  # fmt: skip
    assert_equal_to_the_oracle(tiny.oracle(weights), prompts, found, plan, 12)
    other = tiny.oracle(weights, true_ancestors=True)
    first = [(p, a.rounds[0]) for p, a in zip(prompts, found, strict=True)]
    assert all(other.propose(p, r.bonus, *plan) != (r.drafts, r.parents) for p, r in first)


@plans(CHAIN, TREE)
def test_answers_that_end_at_different_times_equal_the_numpy_simulator(plan):
    ends = (greedy()[0][4], greedy()[5][9])
    found = answers(plan, ends=ends)
    assert len({len(a.tokens) for a in found}) > 3
    assert_equal_to_the_oracle(tiny.oracle(tiny.trained()), PROMPTS, found, plan, tiny.LIMIT, ends)
    assert [a.tokens for a in found] == greedy(ends=ends)


@plans(CHAIN, TREE)
def test_answers_do_not_depend_on_what_is_decoded_beside_them(plan):
    """A batch larger than the number of prompts, and prompts in another order."""
    some = [PROMPTS[i] for i in (5, 0)]
    told = []
    found = decode(
        tiny.speculator(plan), tiny.tiny().params, tiny.trained(), some, max_new_tokens=tiny.LIMIT, end_tokens=(),
        batch=BATCH, advance=told.append,
    )  # fmt: skip
    for got, want in zip(found, (answers(plan)[i] for i in (5, 0)), strict=True):
        assert (got.tokens, got.rounds) == (want.tokens, want.rounds)
    assert sum(told) == 2 * (tiny.LIMIT - 1), "the prefill's token is not a round's"


@pytest.mark.parametrize("options", [{"fc_norm": True, "norm_output": True}], ids=["fc_norm-norm_output"])
@plans(tiny.chain(2), Drafting(3, 2, 6))
def test_the_drafts_options_are_decoded_as_the_simulator_does(plan, options):
    """On a Qwen3 target, whose heads are normed."""
    graph, params = model.init(tiny.draft_shape(**options), 4)
    params = jax.tree.map(
        lambda x: x * jnp.broadcast_to(jnp.linspace(0.7, 1.4, x.shape[-1]), x.shape), params
    )
    weights, target = tiny.weights(graph, params, tiny.QWEN3), tiny.tiny(tiny.QWEN3)
    prompts = PROMPTS[:3]
    found = decode(
        tiny.speculator(plan, tiny.QWEN3), target.params, weights, prompts, max_new_tokens=12, end_tokens=(),
        batch=BATCH,
    )  # fmt: skip
    assert_equal_to_the_oracle(tiny.oracle(weights, tiny.QWEN3, **options), prompts, found, plan, 12)


@pytest.mark.parametrize("kind", KINDS)
@plans(tiny.chain(1), tiny.chain(5), TREE)
def test_text_equals_plain_greedy_decoding(plan, kind):
    assert [a.tokens for a in answers(plan, kind=kind)] == greedy()


def depths(parents) -> list[int]:
    """Of all nodes, the root's first."""
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1)
    return found


class Told(Speculator):
    """Drafts on the way to the last of the deepest nodes are the true continuation, up to `right(n)` of them.

    All others are wrong, the draft's own are thrown away.
    """

    def __init__(self, compiled: Speculator, texts: list[list[int]], right):
        self.__dict__.update(vars(compiled))
        self.texts, self.right = texts, right

    def batch(self, target_params, weights, prompts, length, streams):
        self.rows = [next(t for t in self.texts if t[: len(p)] == list(p)) for p in prompts]
        return super().batch(target_params, weights, prompts, length, streams)

    def round(self, target_params, weights, state, active_B):
        drafts, parents = np.array(state["drafts"]), np.array(state["parents"])
        for b, (text, n) in enumerate(zip(self.rows, np.array(state["n"]), strict=True)):
            deep = depths(parents[b])
            node = max(range(len(deep)), key=lambda i: (deep[i], i))
            way = {node}
            while node:
                node = parents[b][node - 1]
                way.add(node)
            for i in range(1, len(deep)):
                true = text[min(n + deep[i], len(text) - 1)]
                drafts[b][i - 1] = true if i in way and deep[i] <= self.right(int(n)) else (true + 1) % tiny.V
        return super().round(target_params, weights, state | {"drafts": drafts}, active_B)


def told(right, limit: int = tiny.LIMIT, ends: tuple[int, ...] = (), prompts=PROMPTS, plan=CHAIN):
    texts = [[*p, *t] for p, t in zip(PROMPTS, greedy(tiny.LIMIT + 8), strict=True)]
    return decode(
        Told(tiny.speculator(plan), texts, right), tiny.tiny().params, tiny.untrained(), prompts,
        max_new_tokens=limit, end_tokens=ends, batch=BATCH,
    )  # fmt: skip


@pytest.mark.parametrize(
    "right", [lambda n: 4, lambda n: 0, lambda n: n % 4], ids=["always", "never", "sometimes"]
)
@plans(CHAIN, TREE)
def test_text_does_not_depend_on_how_much_is_accepted(plan, right):
    found = told(right, plan=plan)
    assert [a.tokens for a in found] == greedy()
    assert all(r.accepted == min(right(r.n), max(depths(r.parents))) for a in found for r in a.rounds)


@pytest.mark.parametrize("limit", [1, 2, 4, 5, 6])
def test_max_new_tokens_is_exact_and_the_last_round_is_kept_whole(limit):
    """Four tokens a round after the prefill's one: 5 tokens fit exactly, 6 begin a round of which one is wanted."""
    found = told(lambda n: 3, limit)
    assert [a.tokens for a in found] == [t[:limit] for t in greedy()]
    assert all([r.accepted for r in a.rounds] == [3] * -(-(limit - 1) // 4) for a in found)


@plans(CHAIN, TREE)
def test_a_cache_without_spare_room_is_long_enough(plan, monkeypatch):
    """Lengths are rounded up, which would hide an array that is too short; here they are as they are."""
    longest = max(range(len(PROMPTS)), key=lambda i: len(PROMPTS[i]))
    prompts, target = [PROMPTS[longest]] * BATCH, tiny.tiny()

    def decoded():
        own = decode(
            tiny.speculator(plan), target.params, tiny.trained(), prompts, max_new_tokens=tiny.LIMIT,
            end_tokens=(), batch=BATCH,
        )  # fmt: skip
        always, never = (told(lambda n: right, prompts=prompts, plan=plan) for right in (4, 0))  # noqa: B023
        return [*own, *always, *never]

    def written():
        return target.writer.write(target.params, prompts, tiny.LIMIT, ())

    want, want_written = decoded(), written()
    monkeypatch.setattr(speculate, "CACHE", 1)
    monkeypatch.setattr(speculate, "PROMPT", len(prompts[0]))
    for got, roomy in zip(decoded(), want, strict=True):
        assert (got.tokens, [r.accepted for r in got.rounds]) == (
            roomy.tokens, [r.accepted for r in roomy.rounds]
        )  # fmt: skip
        np.testing.assert_allclose(got.scores, roomy.scores, rtol=1e-4, atol=1e-4)
    for got, roomy in zip(written(), want_written, strict=True):
        np.testing.assert_array_equal(got.ids, roomy.ids)
        np.testing.assert_allclose(got.final, roomy.final, rtol=1e-4, atol=1e-4)


def test_an_end_token_stops_an_answer_and_stays():
    """At every place of a round, also where it is the prefill's token."""
    for at in range(6):
        ends = (greedy()[0][at], 1000)
        want = [t[: t.index(ends[0]) + 1] if ends[0] in t else t for t in greedy()]
        found = told(lambda n: 3, ends=ends)
        assert [a.tokens for a in found] == want == greedy(ends=ends)
        assert all(len(a.rounds) == -(-(len(a.tokens) - 1) // 4) for a in found)
    assert len({len(t) for t in want}) > 2


@plans(CHAIN, TREE)
def test_scores_are_those_of_the_best_two_tokens(plan):
    oracle = tiny.oracle(tiny.trained())
    for prompt, answer in zip(PROMPTS[:2], answers(plan), strict=False):
        logits = oracle.features([*prompt, *answer.tokens])[1][len(prompt) - 1 : -1]
        first, second = np.argsort(logits, axis=1)[:, :-3:-1].T
        at = np.arange(len(logits))
        assert answer.tokens == first.tolist()
        assert [s[1] for s in answer.scores] == second.tolist()
        np.testing.assert_allclose([s[0] for s in answer.scores], logits[at, first], rtol=1e-4)
        np.testing.assert_allclose([s[2] for s in answer.scores], logits[at, second], rtol=1e-4)


@pytest.mark.parametrize("steps", [5])
def test_leading_right_steps_under_teacher_forcing_equal_what_is_accepted(steps):
    """For every row that the decoder drafts from; the text goes on to the last round's overshoot."""
    found, target, weights = answers(tiny.chain(steps)), tiny.tiny(), tiny.trained()
    texts = [
        [*p, a.rounds[0].bonus, *(t for r in a.rounds for t in r.emitted)]
        for p, a in zip(PROMPTS, found, strict=True)
    ]
    T = max(map(len, texts))
    ids = np.array([t + [0] * (T - len(t)) for t in texts], np.int32)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), ids.shape)
    segment = (position < np.array([[len(t)] for t in texts])).astype(np.int32)

    @jax.jit
    def proposals(params, weights, ids, position, segment):
        aux, _ = target.target.features(params, ids, position, segment)
        draft = model.bind(weights.graph, weights.params)
        return unroll.proposals(draft, weights.embedding, weights.d2t, ids, position, segment, aux, steps)

    guessed = np.array(proposals(target.params, weights, ids, position, segment))
    checked = 0
    for row, (text, answer) in enumerate(zip(texts, found, strict=True)):
        for round_ in answer.rounds:
            t = round_.n - 1
            right = [t + 2 + k < len(text) and guessed[k, row, t] == text[t + 2 + k] for k in range(steps)]
            assert [*right, False].index(False) == round_.accepted, (row, dataclasses.asdict(round_))
            checked += 1
    assert checked == drafted_counts(found, steps).sum() > 80
