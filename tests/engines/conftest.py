"""The engines live in environments of their own; without one its tests are skipped, or fail where it is required."""

import collections
import json
import os
from pathlib import Path

import numpy as np
import pytest

from bridge import processes
from bridge import sglang as bridge_sglang

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
REQUIRED = "EAGLE3_REQUIRE_ENGINES"

ran: collections.Counter = collections.Counter()


def python(engine: str, environment: str) -> Path:
    """The interpreter of an engine's environment; skips the test where there is none."""
    if not (ROOT / environment / bridge_sglang.INSTALLED).is_file():
        text = f"{engine} is not installed ({environment}); run `make engines`"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1: {text}", pytrace=False)
        pytest.skip(text)
    return ROOT / environment / "bin/python"


class SGLang:
    """Scripts of this directory, run in SGLang's environment on the CPU."""

    def __init__(self, interpreter: Path, directory: Path):
        self.interpreter, self.directory = interpreter, directory
        self.calls = 0

    def draft_class(self, cases: list[tuple[Path, np.ndarray, np.ndarray]], steps: int) -> list[dict]:
        """SGLang's draft class on (draft directory, ids [T], aux [T, M]) each: see run_sglang_draft.py."""
        request, inputs, answers = self._paths("json", "npz", "answers.npz")
        request.write_text(
            json.dumps({"cases": [str(directory) for directory, _, _ in cases], "steps": steps})
        )
        arrays = {f"{i}/ids": ids for i, (_, ids, _) in enumerate(cases)}
        np.savez(inputs, **arrays, **{f"{i}/aux": aux for i, (_, _, aux) in enumerate(cases)})
        self._run("run_sglang_draft.py", request, inputs, answers, timeout=300)
        found: list[dict] = [{} for _ in cases]
        for name, x in np.load(answers).items():
            i, _, rest = name.partition("/")
            found[int(i)][rest] = x
        return found

    def engine(self, *jobs: dict) -> list[dict]:
        """The whole engine, started once for each job: see run_sglang_engine.py."""
        request, answers = self._paths("json", "answers.json")
        defaults = {"hidden_states": False, "together": False}
        options = bridge_sglang.CPU_OPTIONS | {"dtype": "float32", "disable_radix_cache": True}
        filled = [defaults | job | {"options": options | job["options"]} for job in jobs]
        request.write_text(json.dumps(filled))
        self._run("run_sglang_engine.py", request, answers, timeout=240 * len(jobs))
        return json.loads(answers.read_text())

    def _paths(self, *endings: str) -> list[Path]:
        self.calls += 1
        return [self.directory / f"{self.calls}.{ending}" for ending in endings]

    def _run(self, script: str, *arguments: Path, timeout: float) -> None:
        environment = bridge_sglang.environment(
            {"OMP_NUM_THREADS": "1"} | os.environ, bridge_sglang.CPU_VARIABLES
        )
        processes.run([self.interpreter, HERE / script, *arguments], environment, timeout)


@pytest.fixture(scope="session")
def sglang(tmp_path_factory) -> SGLang:
    interpreter = python("SGLang", bridge_sglang.ENVIRONMENT)
    return SGLang(interpreter, tmp_path_factory.mktemp("sglang"))


def pytest_runtest_logreport(report):
    engine = dict(report.user_properties).get("engine")
    if engine and report.when == "call" and report.passed:
        ran[engine] += 1


def pytest_collection_modifyitems(items):
    """Marks every test of an engine by its module's name: test_sglang_draft.py -> sglang."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.engine)
            item.user_properties.append(("engine", item.path.stem.split("_")[1]))


def pytest_terminal_summary(terminalreporter):
    for engine, count in sorted(ran.items()):
        terminalreporter.write_line(f"engine tests passed: {engine} {count}")
