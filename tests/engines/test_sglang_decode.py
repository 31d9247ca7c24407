"""The whole SGLang engine decodes what our decoder decodes: every proposal, every accept count, the text.

Drafts of a chain of three, and of a tree. The blind draft knows the text through the aux states alone, so that a
wrong aux layer or order cannot hide behind what the embeddings tell.
"""

import decode_fixture as tiny
import engine_fixture
import jax.numpy as jnp
import numpy as np
import pytest

from bridge.sglang import launch_options
from eagle3_jax import axes
from eagle3_jax.decode import evaluate, speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.target.model import Target

LIMIT = 40
DRAFTS = {"seeing": False, "blind": True}
PLANS = [tiny.chain(3), Drafting(4, 3, 10)]
CASES = [(name, plan) for name in DRAFTS for plan in PLANS]
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
    """Per case what the engine answered, see run_sglang_engine.py."""
    root = tmp_path_factory.mktemp("served")
    target = engine_fixture.save_target(root / "target", tiny.tiny().target, tiny.tiny().params)
    drafts = {
        name: engine_fixture.save_draft(root / name, target, tiny.AUX, tiny.trained(blind))
        for name, blind in DRAFTS.items()
    }
    jobs = []
    for name, plan in CASES:
        options = launch_options(target, drafts[name], "float32", plan, 256) | {
            "max_total_tokens": 4096, "max_running_requests": 4, "decode_log_interval": 1,
        }  # fmt: skip
        jobs.append({"options": options, "prompts": PROMPTS, "max_new_tokens": LIMIT, "together": True})
    return dict(zip(CASES, sglang.engine(*jobs), strict=True))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].name}")
def case(request, found):
    """(our answers, the engine's)."""
    name, plan = request.param
    ours = speculate.decode(
        tiny.speculator(plan), tiny.tiny().params, tiny.trained(DRAFTS[name]), PROMPTS, max_new_tokens=LIMIT,
        end_tokens=(), batch=5,
    )  # fmt: skip
    return ours, found[request.param]


def parents(round_) -> list[int]:
    """Of nodes 1, 2, .. from a tree's links: the first child of each node and the next child of its parent."""
    found = [0] * (len(round_["tokens"]) - 1)
    for node, child in enumerate(round_["child"]):
        while child != -1:
            found[child - 1], child = node, round_["sibling"][child]
    return found


def test_text_proposals_and_accept_counts_are_equal(case):
    ours, served = case
    assert len(PROMPTS) >= 8
    for i, (mine, theirs) in enumerate(zip(ours, served["answers"], strict=True)):
        assert theirs["tokens"] == mine.tokens, f"text of prompt {i}"
        rounds = [(r["tokens"][0], r["tokens"][1:], parents(r), r["accepted"]) for r in theirs["rounds"]]
        ours_ = [(r.bonus, r.drafts, r.parents, r.accepted) for r in mine.rounds]
        assert rounds == ours_, f"rounds of prompt {i}"


@pytest.mark.parametrize("way", ["answers", "together"])
def test_the_engines_own_counters_are_those_of_our_rounds(case, way):
    ours, served = case
    for mine, theirs in zip(ours, served[way], strict=True):
        meta, accepted = theirs["meta"], [r.accepted for r in mine.rounds]
        assert theirs["tokens"] == mine.tokens
        assert meta["spec_verify_ct"] == len(accepted)
        assert meta["spec_num_correct_drafts"] == sum(accepted)
        assert meta["spec_correct_drafts_histogram"] == np.bincount(accepted).tolist()
        assert meta["spec_accept_length"] == pytest.approx(len(mine.tokens) / len(accepted))


def test_the_cases_can_tell_right_from_wrong(case):
    """The text varies, drafts are accepted and rejected, and no token is decided by a near tie."""
    ours, _ = case
    tokens = [t for a in ours for t in a.tokens]
    assert len(set(tokens)) > 20
    counts = np.bincount([r.accepted for a in ours for r in a.rounds], minlength=4)
    assert np.all(counts > 0), counts
    gaps = [(top - other) / abs(top) for a in ours for top, _, other in a.scores]
    assert min(gaps) > evaluate.NEAR_TIE


def test_wrong_aux_states_change_what_the_blind_draft_proposes():
    """The control for equal proposals: in our decoder, states in another order, or of other layers."""
    target, draft = tiny.tiny(), tiny.trained(blind=True)
    low, middle, high = jnp.split(draft.params["fc"]["kernel"], 3)
    exchanged = draft.params | {"fc": {"kernel": jnp.concatenate([middle, low, high])}}
    other_layers = Target(target.target.shape, (1, 2, 3))

    def first_proposals(aux_target, params):
        answers = speculate.decode(
            speculate.Speculator(aux_target, PLANS[0], axes.make_mesh()), target.params,
            speculate.DraftWeights(draft.graph, params, draft.embedding, draft.d2t), PROMPTS, max_new_tokens=2,
            end_tokens=(), batch=5,
        )  # fmt: skip
        return np.array([a.rounds[0].drafts for a in answers])

    right = first_proposals(target.target, draft.params)
    for wrong in (
        first_proposals(target.target, exchanged),
        first_proposals(other_layers, draft.params),
    ):
        assert np.any(wrong != right, axis=1).sum() >= len(PROMPTS) // 2
