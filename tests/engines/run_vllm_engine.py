"""Runs in vLLM's environment: starts the whole engine and sends it prompts as token ids, all at once.

    python run_vllm_engine.py REQUEST.json ANSWERS.json

REQUEST.json holds one job (vLLM keeps global state, so that a process has one engine):

    options          dict         arguments of vllm.LLM
    prompts          [[int]]
    max_new_tokens   int
    end_tokens       [int]

ANSWERS.json gets {"answers": [answer], "metrics": {name: value or values}}, an answer being {"tokens", "rounds"}: the
new tokens, and per verification what was drafted and what the target made of it, the accepted drafts and the new bonus.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process, where its scheduler can be watched
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GB
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler


def watch() -> dict[str, list[dict]]:
    """Per request, in the order of arrival, the rounds that the scheduler is told of from now on."""
    rounds, told = {}, Scheduler.update_from_output

    def update(self, scheduled, output):
        for name in scheduled.num_scheduled_tokens:
            emitted = output.sampled_token_ids[output.req_id_to_index[name]]
            seen = rounds.setdefault(name, [])
            if drafts := scheduled.scheduled_spec_decode_tokens.get(name):
                seen.append({"drafts": [*map(int, drafts)], "emitted": [*map(int, emitted)]})
        return told(self, scheduled, output)

    Scheduler.update_from_output = update
    return rounds


def main(request: str, answers: str) -> None:
    job = json.loads(Path(request).read_text())
    llm = LLM(
        skip_tokenizer_init=True, enforce_eager=True, async_scheduling=False, enable_prefix_caching=False,
        disable_log_stats=False, **job["options"],
    )  # fmt: skip
    sampling = SamplingParams(
        temperature=0, max_tokens=job["max_new_tokens"], stop_token_ids=job["end_tokens"], detokenize=False,
        ignore_eos=True,
    )  # fmt: skip
    rounds = watch()
    out = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    metrics = {m.name: getattr(m, "values", None) or getattr(m, "value", None) for m in llm.get_metrics()}
    found = {
        "answers": [
            {"tokens": list(o.outputs[0].token_ids), "rounds": r}
            for o, r in zip(out, rounds.values(), strict=True)
        ],
        "metrics": {k: v for k, v in metrics.items() if "spec_decode" in k},
    }
    Path(answers).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
