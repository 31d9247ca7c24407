"""The engines live in environments of their own; without one its tests are skipped, or fail where it is required."""

import collections
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import report
from engine_runs import VLLM, SGLang

from bridge import sglang as bridge_sglang
from eagle3_jax.commands import ANSWERS, RESULT
from eagle3_jax.data import chat
from eagle3_jax.target import shape
from eagle3_jax.train import setup

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
REQUIRED = "EAGLE3_REQUIRE_ENGINES"
REPORT = "EAGLE3_ENGINES_REPORT"  # a path: the table of what was measured is written there

ran: collections.Counter = collections.Counter()
rows: list[report.Row] = []


def missing(text: str) -> None:
    """Skips the test, or fails it where the engines are required."""
    if os.environ.get(REQUIRED) == "1":
        pytest.fail(f"{REQUIRED}=1: {text}", pytrace=False)
    pytest.skip(text)


def python(engine: str, environment: str) -> Path:
    """The interpreter of an engine's environment."""
    if not (ROOT / environment / bridge_sglang.INSTALLED).is_file():
        missing(f"{engine} is not installed ({environment}); run `make engines`")
    return ROOT / environment / "bin/python"


@pytest.fixture(scope="session")
def sglang(tmp_path_factory) -> SGLang:
    return SGLang(python("SGLang", bridge_sglang.ENVIRONMENT), tmp_path_factory.mktemp("sglang"))


@pytest.fixture(scope="session")
def vllm(tmp_path_factory) -> VLLM:
    """Its environment holds speculators and SpecForge, too."""
    return VLLM(python("vLLM", ".venv-vllm"), tmp_path_factory.mktemp("vllm"))


@pytest.fixture(scope="session")
def demo() -> SimpleNamespace:
    """What `make demo` left in runs/: run, export, target, its end tokens, evaluate.json, lines of answers.jsonl."""
    run, export = ROOT / "runs/demo", ROOT / "runs/demo-export"
    if not all(p.is_file() for p in (run / RESULT, run / ANSWERS, export / "config.json")):
        missing("no demo is in runs/; run `DEMO_MINUTES=10 make demo`")
    result = json.loads((run / RESULT).read_text())
    files = setup.TargetFiles(Path(result["target"]), shape.read(result["target"]))
    return SimpleNamespace(
        run=run, export=export, target=files.directory, ends=[*chat.end_tokens(setup.tokenizer(files))], result=result,
        answers=[json.loads(line) for line in (run / ANSWERS).read_text().splitlines()],
    )  # fmt: skip


@pytest.fixture
def record(request):
    """record(case, ...) puts a row into the report: see report.Row."""
    engine = request.node.path.stem.split("_")[1]
    return lambda case, **found: rows.append(report.Row(engine, case, **found))


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


def pytest_sessionfinish(exitstatus):
    if (path := os.environ.get(REPORT)) and exitstatus == 0:
        (ROOT / path).write_text(report.markdown(rows, ROOT))


def pytest_terminal_summary(terminalreporter):
    for engine, count in sorted(ran.items()):
        terminalreporter.write_line(f"engine tests passed: {engine} {count}")
