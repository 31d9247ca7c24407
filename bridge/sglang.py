"""How the real SGLang runs on a CPU: its environment, and the options that it needs there.

SGLang is never imported here. It lives in an environment of its own (`make engines`), since it pins what this
package needs loose, and is run as a process.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from bridge import engines
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.errors import ConfigError

ENVIRONMENT = ".venv-sglang"  # below the repository's root
INSTALLED = ".installed"  # the Makefile's stamp: an environment without it is half built
STAND_IN = Path(__file__).parent / "sglang_cpu"  # in place of SGLang's CPU kernels

# EAGLE-3 wants the `intel_amx` attention backend, which SGLang replaces by `torch_native` on CPUs without AMX; it
# only looks at the first of these, so that naming the other two keeps it.
CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
}
CPU_VARIABLES = {
    "PYTHONPATH": str(STAND_IN),
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # compiling needs a C++ compiler and takes longer than it saves
    "HF_HUB_OFFLINE": "1",
}
TRACE = "EAGLE3_TRACE"  # a file that every verification appends a line to (sglang_cpu/sgl_kernel/tree.py)


def environment(base: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process that runs SGLang: `base` without what would lead it to another Python's packages."""
    kept = {k: v for k, v in base.items() if k not in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", TRACE)}
    return kept | dict(added)


def python(device: str) -> str:
    """The interpreter that has SGLang. Raises ConfigError where there is none for a CPU."""
    if device != "cpu":
        return "python"
    path = Path(__file__).parents[1] / ENVIRONMENT
    if not (path / INSTALLED).is_file():
        raise ConfigError(
            f"{path}: SGLang for a CPU is not installed; `make engines` does so, or give --python"
        )
    return str(path / "bin/python")


def launch_options(
    target: str | Path, draft: str | Path, dtype: str, drafting: Drafting, context_length: int | None = None
) -> dict:
    """SGLang's arguments that serve a target with a draft; all three numbers are given, or none would be believed."""
    return {
        "model_path": str(target), "dtype": dtype, "speculative_algorithm": engines.ALGORITHM,
        "speculative_draft_model_path": str(draft), "speculative_num_steps": drafting.steps,
        "speculative_eagle_topk": drafting.topk, "speculative_num_draft_tokens": drafting.tokens,
    } | ({} if context_length is None else {"context_length": context_length})  # fmt: skip


def flags(options: Mapping[str, object]) -> list[str]:
    """Arguments as words of a command line."""
    words = []
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def read_trace(text: str) -> list[dict]:
    """What a process wrote to TRACE, in order: bonus, drafts, the node that each follows, accepted drafts.

    Nodes are numbered as in decode.speculate.Round.
    """
    rounds = []
    for line in text.splitlines():
        told = json.loads(line)
        bonus, *drafts = told["tokens"]
        parents = [0] * len(drafts)
        for node, child in enumerate(told["child"]):
            while child != -1:
                parents[child - 1], child = node, told["sibling"][child]
        rounds.append(dict(bonus=bonus, drafts=drafts, parents=parents, accepted=told["accepted"]))
    return rounds
