"""Runs in SGLang's environment: starts the whole engine and sends it prompts as token ids.

    python run_sglang_engine.py REQUEST.json ANSWERS.json

REQUEST.json holds a list of jobs, each with an engine of its own:

    options          dict         arguments of sglang.Engine
    prompts          [[int]]
    max_new_tokens   int
    end_tokens       [int]        none: every answer has max_new_tokens
    hidden_states    bool         return the states of the prompt's tokens
    together         bool         after sending the prompts one by one, send all of them at once

ANSWERS.json gets per job {"answers": [answer], "together": [answer]}, an answer being {"tokens", "meta", "trace"}: the
new tokens, SGLang's own meta_info, and what the stand-in's verification wrote meanwhile to EAGLE3_TRACE (whose
lines belong to no single prompt where all are sent at once).
"""

import json
import os
import sys
from pathlib import Path

import sglang


def run(job: dict, trace: Path) -> dict:
    os.environ["EAGLE3_TRACE"] = str(trace)  # before the engine spawns its processes
    engine = sglang.Engine(skip_tokenizer_init=True, log_level="warning", **job["options"])
    sampling = {
        "temperature": 0, "max_new_tokens": job["max_new_tokens"], "ignore_eos": not job["end_tokens"],
        "stop_token_ids": job["end_tokens"],
    }  # fmt: skip

    def generate(ids) -> list[dict]:
        trace.unlink(missing_ok=True)
        out = engine.generate(
            input_ids=ids, sampling_params=sampling, return_hidden_states=job["hidden_states"]
        )
        several = out if isinstance(out, list) else [out]
        wrote = trace.read_text() if trace.exists() else ""
        return [{"tokens": list(o["output_ids"]), "meta": o["meta_info"], "trace": wrote} for o in several]

    try:
        answers = [answer for prompt in job["prompts"] for answer in generate(prompt)]
        together = generate(job["prompts"]) if job["together"] else []
    finally:
        engine.shutdown()
    return {"answers": answers, "together": together}


def main(request: str, answers: str) -> None:
    trace = Path(answers).with_suffix(".trace")
    done = [run(job, trace) for job in json.loads(Path(request).read_text())]
    Path(answers).write_text(json.dumps(done, default=str))


if __name__ == "__main__":  # the engine spawns processes that import this file again
    main(*sys.argv[1:])
