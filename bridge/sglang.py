"""How the real SGLang runs on a CPU: its environment, and the options that it needs there.

SGLang is never imported here. It lives in an environment of its own (`make engines`), since it pins what this
package needs loose, and is run as a process.
"""

from pathlib import Path

ENVIRONMENT = ".venv-sglang"  # below the repository's root
STAND_IN = Path(__file__).parent / "sglang_cpu"  # in place of SGLang's CPU kernels

# EAGLE-3 wants the `intel_amx` attention backend, which SGLang replaces by `torch_native` on CPUs without AMX; it
# only looks at the first of these, so that naming the other two keeps it.
CPU_OPTIONS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "prefill_attention_backend": "intel_amx",
    "decode_attention_backend": "intel_amx",
}


def cpu_environment(base: dict[str, str], trace: Path | None = None) -> dict[str, str]:
    """The variables of a process that runs SGLang on a CPU, added to `base`.

    With `trace`, every verification appends a line to that file (sglang_cpu/sgl_kernel/tree.py).
    """
    kept = {k: v for k, v in base.items() if k not in ("PYTHONHOME", "VIRTUAL_ENV", "EAGLE3_TRACE")}
    return (
        kept
        | {
            "PYTHONPATH": str(STAND_IN),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",  # compiling needs a C++ compiler and takes longer than it saves
            "HF_HUB_OFFLINE": "1",
        }
        | ({} if trace is None else {"EAGLE3_TRACE": str(trace)})
    )
