"""The whole SGLang engine decodes what our decoder decodes: every proposal, every accept count, the text."""

import decode_fixture as tiny
import engine_fixture
import jax.numpy as jnp
import numpy as np
import pytest
import report
from engine_fixture import LIMIT, PROMPTS

from bridge.sglang import launch_options, read_trace
from eagle3_jax import axes
from eagle3_jax.decode import evaluate, speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.target.model import Target

CHAIN, TREE = tiny.chain(3), Drafting(4, 3, 10)
CASES = [
    ("seeing", CHAIN),
    ("seeing", TREE),
    ("blind", CHAIN),
    ("blind", TREE),
    ("blind-other-layers", CHAIN),
]


@pytest.fixture(scope="module")
def found(sglang, tmp_path_factory):
    """Per case what the engine answered, see run_sglang_engine.py."""
    target, drafts = engine_fixture.save_all(tmp_path_factory.mktemp("served"))
    jobs = []
    for name, plan in CASES:
        options = launch_options(target, drafts[name], "float32", plan, 256) | {
            "max_total_tokens": 4096, "max_running_requests": 4, "decode_log_interval": 1,
        }  # fmt: skip
        jobs.append({"options": options, "prompts": PROMPTS, "max_new_tokens": LIMIT, "together": True})
    return dict(zip(CASES, sglang.engine(*jobs), strict=True))


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].name}")
def case(request, found):
    """(name of the draft, way of drafting, our answers, the engine's)."""
    name, plan = request.param
    return name, plan, engine_fixture.decode(name, plan), found[request.param]


def test_text_proposals_and_accept_counts_are_equal(case, record):
    name, plan, ours, served = case
    assert len(PROMPTS) >= 8
    for i, (mine, theirs) in enumerate(zip(ours, served["answers"], strict=True)):
        assert theirs["tokens"] == mine.tokens, f"text of prompt {i}"
        rounds = [
            dict(bonus=r.bonus, drafts=r.drafts, parents=r.parents, accepted=r.accepted) for r in mine.rounds
        ]
        assert read_trace(theirs["trace"]) == rounds, f"rounds of prompt {i}"
    record(f"tiny target, {name}, {plan.kind} {plan.name}", **report.decoded(ours, [
        (a["meta"]["spec_num_correct_drafts"], a["meta"]["spec_verify_ct"]) for a in served["answers"]
    ]))  # fmt: skip


@pytest.mark.parametrize("way", ["answers", "together"])
def test_the_engines_own_counters_are_those_of_our_rounds(case, way):
    _, _, ours, served = case
    for mine, theirs in zip(ours, served[way], strict=True):
        meta, accepted = theirs["meta"], [r.accepted for r in mine.rounds]
        assert theirs["tokens"] == mine.tokens
        assert meta["spec_verify_ct"] == len(accepted)
        assert meta["spec_num_correct_drafts"] == sum(accepted)
        assert meta["spec_correct_drafts_histogram"] == np.bincount(accepted).tolist()
        assert meta["spec_accept_length"] == pytest.approx(len(mine.tokens) / len(accepted))


def test_the_cases_can_tell_right_from_wrong(case):
    """The text varies, drafts are accepted and rejected, and no token is decided by a near tie."""
    _, _, ours, _ = case
    tokens = [t for a in ours for t in a.tokens]
    assert len(set(tokens)) > 20
    counts = np.bincount([r.accepted for a in ours for r in a.rounds], minlength=4)
    assert np.all(counts > 0), counts
    gaps = [(top - other) / abs(top) for a in ours for top, _, other in a.scores]
    assert min(gaps) > evaluate.NEAR_TIE


@pytest.mark.usefixtures("sglang")  # a control of the engine's test, and of no use without it
def test_wrong_aux_states_change_what_the_blind_draft_proposes():
    """The control for equal proposals: in our decoder, states in another order, or of other layers."""
    target, draft = tiny.tiny(tiny.SERVED), tiny.trained(True, tiny.SERVED)
    low, middle, high = jnp.split(draft.params["fc"]["kernel"], 3)
    exchanged = draft.params | {"fc": {"kernel": jnp.concatenate([middle, low, high])}}
    other_layers = Target(target.target.shape, tiny.SERVED_OTHER.aux)

    def first_proposals(aux_target, params):
        answers = speculate.decode(
            speculate.Speculator(aux_target, CHAIN, axes.make_mesh()), target.params,
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
