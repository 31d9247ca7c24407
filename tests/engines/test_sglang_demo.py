"""The demo's draft for SmolLM2, served by the real SGLang to MT-bench's prompts."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import REPORT, ROOT

from bridge import verify

PROMPTS = None if REPORT in os.environ else 4  # the first ones; all for the report
EAGLE3 = Path(sys.executable).with_name("eagle3")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


def recorded(record, found: verify.Report, note: str = "") -> None:
    s = found.ours["settings"]
    kind = "chain" if s["topk"] == 1 else "tree"
    record(
        f"SmolLM2-135M-Instruct, {kind} {s['steps']}-{s['topk']}-{s['tokens']}, {found.prompts} prompts",
        proposals=(found.proposals, found.proposals) if found.ok else None,
        ours=found.ours["accept_length"], theirs=found.served["accept_length"], note=note,
    )  # fmt: skip


def test_a_chain_is_served_as_it_was_evaluated(sglang, demo, record):
    found = verify.verify(demo.run, max_prompts=PROMPTS)
    print(found)
    assert found.ok and found.prompts >= 4 and found.served["accepted_drafts"] > 0
    recorded(record, found)


def test_a_tree_is_served_as_it_was_evaluated(sglang, demo, record, tmp_path):
    run = shutil.copytree(demo.run, tmp_path / "run", copy_function=os.link)
    for name in (verify.RESULT, verify.ANSWERS):
        (run / name).unlink()  # a link: the demo's own stay as they are
    some = [] if PROMPTS is None else [f"evaluate.max_prompts={PROMPTS}"]
    # In a process of its own: this one compiles for tiny models (tests/conftest.py).
    command = [EAGLE3, "evaluate", run, *some, "--steps", "4", "--topk", "3", "--tokens", "10"]
    subprocess.run([str(word) for word in command], check=True)
    found = verify.verify(run)
    print(found)
    assert found.ok and found.prompts >= 4 and found.served["accepted_drafts"] > 0
    recorded(record, found)


def test_in_bfloat16_the_difference_is_shown(sglang, demo, record):
    found = verify.verify(demo.run, dtype="bfloat16", max_prompts=2)
    print(found)
    assert found.dtype == "bfloat16" and found.served["verify_forwards"] > 0
    equal = found.prompts - len(found.differences)
    recorded(
        record, found, f"SGLang in bfloat16: {equal} of {found.prompts} answers and proposals as in float32"
    )


def test_the_targets_own_greedy_text_is_ours(sglang, demo):
    """SGLang reads the directory that was made of the GGUF file, without a draft."""
    answers = demo.answers[:4]
    options = {"model_path": str(demo.target), "context_length": 2048, "max_total_tokens": 8192}
    job = {
        "options": options, "prompts": [a["prompt"] for a in answers], "end_tokens": demo.ends,
        "max_new_tokens": demo.result["settings"]["max_new_tokens"],
    }  # fmt: skip
    (found,) = sglang.engine(job)
    assert [a["tokens"] for a in found["answers"]] == [a["tokens"] for a in answers]


def test_the_script_for_a_gpu_host_passes_on_this_cpu(sglang, demo):
    script = ROOT / "tpu_scripts/validate_sglang_gpu.sh"
    count = str(demo.result["settings"]["prompts"])
    command = [script, demo.export, demo.target, "--device", "cpu", "--max-prompts", count]
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    print(found.stdout)
    assert found.returncode == 0, found.stdout + found.stderr
    (line,) = [s for s in found.stdout.splitlines() if s.startswith("accept length")]
    *_, predicted, served = line.split()
    assert predicted == served == f"{demo.result['accept_length']:.3f}"
