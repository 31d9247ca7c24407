"""Scripts of this directory, run in the engines' environments on the CPU."""

import json
import os
from pathlib import Path

import numpy as np

from bridge import processes
from bridge import sglang as bridge_sglang

HERE = Path(__file__).parent
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # two threads wait for each other wherever another process runs

DraftCase = tuple[Path, np.ndarray, np.ndarray]  # draft directory, ids [T], aux [T, M]


class Scripts:
    """One environment's interpreter and a directory for what goes in and out."""

    def __init__(self, interpreter: Path, directory: Path):
        self.interpreter, self.directory = interpreter, directory
        self.calls = 0

    def paths(self, *endings: str) -> list[Path]:
        self.calls += 1
        return [self.directory / f"{self.calls}.{ending}" for ending in endings]

    def run(self, script: str, *arguments: Path, timeout: float, **variables: str) -> None:
        environment = bridge_sglang.environment(ONE_THREAD | os.environ, variables)
        processes.run([self.interpreter, HERE / script, *arguments], environment, timeout)

    def drafts(self, script: str, cases: list[DraftCase], steps: int, **more: str) -> list[dict]:
        """What a draft class makes of directories: see run_sglang_draft.py, one process for all."""
        request, inputs, answers = self.paths("json", "npz", "answers.npz")
        request.write_text(
            json.dumps({"cases": [str(directory) for directory, _, _ in cases], "steps": steps} | more)
        )
        arrays = {f"{i}/ids": ids for i, (_, ids, _) in enumerate(cases)}
        np.savez(inputs, **arrays, **{f"{i}/aux": aux for i, (_, _, aux) in enumerate(cases)})
        variables = bridge_sglang.CPU_VARIABLES if script == "run_sglang_draft.py" else {}
        self.run(script, request, inputs, answers, timeout=300, **variables)
        found: list[dict] = [{} for _ in cases]
        for name, x in np.load(answers).items():
            i, _, rest = name.partition("/")
            found[int(i)][rest] = x
        return found


class SGLang(Scripts):
    def engine(self, *jobs: dict) -> list[dict]:
        """The whole engine, started once for each job: see run_sglang_engine.py."""
        request, answers = self.paths("json", "answers.json")
        defaults = {"hidden_states": False, "together": False, "end_tokens": []}
        options = bridge_sglang.CPU_OPTIONS | {"dtype": "float32", "disable_radix_cache": True}
        filled = [defaults | job | {"options": options | job["options"]} for job in jobs]
        request.write_text(json.dumps(filled))
        variables = bridge_sglang.CPU_VARIABLES
        self.run("run_sglang_engine.py", request, answers, timeout=300 * len(jobs), **variables)
        return json.loads(answers.read_text())


class VLLM(Scripts):
    def engine(self, job: dict) -> dict:
        """The whole engine: see run_vllm_engine.py."""
        request, answers = self.paths("json", "answers.json")
        options = {"dtype": "float32", "max_num_seqs": 4} | job["options"]
        request.write_text(json.dumps({"end_tokens": []} | job | {"options": options}))
        self.run("run_vllm_engine.py", request, answers, timeout=600)
        return json.loads(answers.read_text())
