"""The demo's draft for SmolLM2, and SmolLM2 alone, in the real vLLM: from the directories that SGLang is served."""

import pytest

PROMPTS = 6  # MT-bench's first ones


@pytest.fixture(scope="module")
def job(vllm, demo):
    settings, answers = demo.result["settings"], demo.answers[:PROMPTS]
    assert settings["topk"] == 1, "vLLM drafts chains"
    return {
        "options": dict(model=str(demo.target), max_model_len=2048, max_num_batched_tokens=2048),
        "prompts": [a["prompt"] for a in answers], "end_tokens": demo.ends,
        "max_new_tokens": settings["max_new_tokens"],
    }  # fmt: skip


def test_the_targets_own_greedy_text_is_ours(vllm, demo, job):
    """vLLM reads the directory that was made of the GGUF file, without a draft."""
    found = vllm.engine(job)
    assert [a["tokens"] for a in found["answers"]] == [a["tokens"] for a in demo.answers[:PROMPTS]]


def test_proposals_accept_counts_and_text_are_ours(vllm, demo, job, record):
    steps = demo.result["settings"]["steps"]
    speculative = dict(method="eagle3", model=str(demo.export), num_speculative_tokens=steps)
    served = vllm.engine(job | {"options": job["options"] | {"speculative_config": speculative}})
    rounds = [r for a in demo.answers[:PROMPTS] for r in a["rounds"]]
    for mine, theirs in zip(demo.answers[:PROMPTS], served["answers"], strict=True):
        assert theirs["tokens"] == mine["tokens"], mine["id"]
        assert theirs["rounds"] == [{k: r[k] for k in ("drafts", "emitted")} for r in mine["rounds"]], mine[
            "id"
        ]
    metrics = {k.removeprefix("vllm:spec_decode_num_"): v for k, v in served["metrics"].items()}
    accepted = [r["accepted"] for r in rounds]
    assert sum(accepted) > 0
    assert (metrics["drafts"], metrics["accepted_tokens"]) == (len(accepted), sum(accepted))
    assert metrics["accepted_tokens_per_pos"] == [sum(a > k for a in accepted) for k in range(steps)]
    drafts = sum(len(r["drafts"]) for r in rounds)
    record(
        f"SmolLM2-135M-Instruct, chain {steps}-1-{steps + 1}, {PROMPTS} prompts",
        proposals=(drafts, drafts), ours=1 + sum(accepted) / len(accepted),
        theirs=1 + metrics["accepted_tokens"] / metrics["drafts"],
    )  # fmt: skip
