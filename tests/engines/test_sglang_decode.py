"""The whole SGLang engine decodes what our decoder decodes: every proposal, every accept count, the text.

Drafts of a chain of three. The blind draft knows the text through the aux states alone, so that a wrong aux layer or
order cannot hide behind what the embeddings tell.
"""

import decode_fixture as tiny
import jax.numpy as jnp
import models
import numpy as np
import pytest

from eagle3_jax import axes
from eagle3_jax.decode import evaluate, speculate

STEPS, LIMIT = 3, 40
DRAFTS = {"seeing": False, "blind": True}
# Token ids below tiny.V. The first four are among those whose answers the drafts were trained on.
PROMPTS = [
    *tiny.prompts(4, 1),
    [5],
    [63, 0, 17],
    [8, 8, 8, 8, 8, 8],
    [41, 12, 33, 2, 60, 19, 7],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [50, 40, 30, 20, 10],
]


@pytest.fixture(scope="module")
def found(sglang, tmp_path_factory):
    """Per draft, the engine's job with prompts one by one, and the one with all prompts at once."""
    root = tmp_path_factory.mktemp("served")
    target = models.save_target(root / "target", tiny.tiny().target, tiny.tiny().params)
    jobs = []
    for name, blind in DRAFTS.items():
        draft = models.save_draft(root / name, target, tiny.AUX, tiny.trained(blind))
        options = {
            "model_path": str(target), "speculative_draft_model_path": str(draft),
            "speculative_algorithm": "EAGLE3", "speculative_num_steps": STEPS, "speculative_eagle_topk": 1,
            "speculative_num_draft_tokens": STEPS + 1, "context_length": 256, "max_total_tokens": 4096,
            "max_running_requests": 4, "decode_log_interval": 1,
        }  # fmt: skip
        jobs += [
            {"options": options, "prompts": PROMPTS, "max_new_tokens": LIMIT, "together": t}
            for t in (False, True)
        ]
    answers = sglang.engine(*jobs)
    return {name: answers[2 * i : 2 * i + 2] for i, name in enumerate(DRAFTS)}


@pytest.fixture(scope="module", params=DRAFTS)
def case(request, found):
    """(our answers, the engine's, the engine's when all prompts are sent at once)."""
    name, target = request.param, tiny.tiny()
    ours = speculate.decode(
        tiny.speculator(STEPS), target.params, tiny.trained(DRAFTS[name]), PROMPTS, max_new_tokens=LIMIT,
        end_tokens=(), batch=5,
    )  # fmt: skip
    return ours, *found[name]


def test_text_proposals_and_accept_counts_are_equal(case):
    ours, alone, _ = case
    assert len(PROMPTS) >= 8
    for i, (mine, theirs) in enumerate(zip(ours, alone["answers"], strict=True)):
        assert theirs["tokens"] == mine.tokens, f"text of prompt {i}"
        rounds = [(r["tokens"][0], r["tokens"][1:], r["accepted"]) for r in theirs["rounds"]]
        assert rounds == [(r.bonus, r.drafts, r.accepted) for r in mine.rounds], f"rounds of prompt {i}"


def test_the_engines_own_counters_are_those_of_our_rounds(case):
    ours, alone, together = case
    for served in (alone, together):
        for mine, theirs in zip(ours, served["answers"], strict=True):
            meta, accepted = theirs["meta"], [r.accepted for r in mine.rounds]
            assert theirs["tokens"] == mine.tokens
            assert meta["spec_verify_ct"] == len(accepted)
            assert meta["spec_num_correct_drafts"] == sum(accepted)
            histogram = np.bincount(accepted).tolist()
            assert meta["spec_correct_drafts_histogram"] == histogram
            assert meta["spec_accept_length"] == pytest.approx(len(mine.tokens) / len(accepted))


def test_the_cases_can_tell_right_from_wrong(case):
    """The text varies, drafts are accepted and rejected, and no token is decided by a near tie."""
    ours, _, _ = case
    tokens = [t for a in ours for t in a.tokens]
    assert len(set(tokens)) > 20
    counts = np.bincount([r.accepted for a in ours for r in a.rounds], minlength=STEPS + 1)
    assert np.all(counts > 0), counts
    gaps = [(top - other) / abs(top) for a in ours for top, _, other in a.scores]
    assert min(gaps) > evaluate.NEAR_TIE


def test_another_order_of_the_aux_states_is_noticed_by_the_blind_draft():
    """The control: our decoder with the target's lowest and middle aux states exchanged makes other proposals."""
    target, draft = tiny.tiny(), tiny.trained(blind=True)
    D = tiny.D
    fc = draft.params["fc"]["kernel"]
    swapped = jnp.concatenate([fc[D : 2 * D], fc[:D], fc[2 * D :]])
    wrong = speculate.DraftWeights(
        draft.graph, draft.params | {"fc": {"kernel": swapped}}, draft.embedding, draft.d2t
    )

    def accepted(weights):
        answers = speculate.decode(
            speculate.Speculator(target.target, STEPS, axes.make_mesh()), target.params, weights, PROMPTS,
            max_new_tokens=LIMIT, end_tokens=(), batch=5,
        )  # fmt: skip
        return sum(r.accepted for a in answers for r in a.rounds)

    assert accepted(wrong) < 0.7 * accepted(draft)
