"""The whole vLLM engine decodes the directories that SGLang is served: every proposal, every accept count, the text."""

import decode_fixture as tiny
import engine_fixture
import numpy as np
import pytest
import report
from engine_fixture import LIMIT, PROMPTS

PLAN = tiny.chain(3)
PADDED = [
    -1
] * PLAN.steps  # what stands in for drafts where a prompt of one token comes while others are decoded


@pytest.fixture(scope="module")
def directories(vllm, tmp_path_factory):
    return engine_fixture.save_all(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module", params=engine_fixture.DRAFTS)
def case(request, vllm, directories):
    """(name of the draft, our answers, the engine's: see run_vllm_engine.py)."""
    target, drafts = directories
    speculative = dict(method="eagle3", model=str(drafts[request.param]), num_speculative_tokens=PLAN.steps)
    options = dict(
        model=str(target), speculative_config=speculative, max_model_len=128, max_num_batched_tokens=128
    )
    found = vllm.engine({"options": options, "prompts": PROMPTS, "max_new_tokens": LIMIT})
    return request.param, engine_fixture.decode(request.param, PLAN), found


def drafted(answer: dict) -> list[dict]:
    return [r for r in answer["rounds"] if r["drafts"] != PADDED]


def test_text_proposals_and_accept_counts_are_equal(case):
    _, ours, served = case
    for i, (mine, theirs) in enumerate(zip(ours, served["answers"], strict=True)):
        assert theirs["tokens"] == mine.tokens, f"text of prompt {i}"
        rounds = [{"drafts": r.drafts, "emitted": r.emitted} for r in mine.rounds]
        assert drafted(theirs) == rounds, f"rounds of prompt {i}"


def test_the_engines_own_counters_are_those_of_our_rounds(case, record):
    name, ours, served = case
    accepted = np.array([r.accepted for a in ours for r in a.rounds])
    padded = sum(len(a["rounds"]) - len(drafted(a)) for a in served["answers"])
    assert padded <= sum(len(prompt) == 1 for prompt in PROMPTS)
    metrics = {k.removeprefix("vllm:spec_decode_num_"): v for k, v in served["metrics"].items()}
    assert metrics["drafts"] - padded == len(accepted)
    assert metrics["draft_tokens"] - padded * PLAN.steps == len(accepted) * PLAN.steps
    assert metrics["accepted_tokens"] == accepted.sum()
    assert metrics["accepted_tokens_per_pos"] == [np.sum(accepted > k) for k in range(PLAN.steps)]
    counted = [(metrics["accepted_tokens"], metrics["drafts"] - padded)]
    record(f"tiny target, {name}, chain {PLAN.name}", **report.decoded(ours, counted))
