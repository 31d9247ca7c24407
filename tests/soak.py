"""A tiny run killed with `kill -9` again and again, each time gone on with, against the same run undisturbed.

    python tests/soak.py [--kills 20] [--seed 0] [--log docs/soak.md]

The kills come before anything is saved, while a checkpoint is being written, and at random steps, with rows being
prefetched. In the end parameters, optimiser state, data order and logged losses have to be equal bit for bit.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

SAVE_EVERY = 3
WAIT = 180.0  # seconds that a worker may take to come to where it is killed
KINDS = ("before the first save", "during a save", "at a step")


@dataclasses.dataclass(frozen=True)
class Kill:
    when: str
    logged: int  # steps in metrics.jsonl when it was dead
    saved: list[int]
    half: list[str]  # what it was writing


def work(root: Path, run: Path, steps: int) -> None:
    """The process that is killed."""
    import conftest  # noqa: F401  the devices and compiler flags of the tests
    import tiny

    from eagle3_jax.train.loop import train

    overrides = (
        f"train.run={run}",
        f"train.steps={steps}",
        f"train.save_every={SAVE_EVERY}",
        "train.prefetch=2",
    )
    train(tiny.config(root, *overrides))


def steps_for(kills: int) -> int:
    """Enough that the run is not over before it was killed so often."""
    return 4 * SAVE_EVERY * (kills + 1)


def survive(root: Path, run: Path, kinds: list[str], seed: int = 0, say: Callable = lambda kill: None):
    """Kill a run of `steps_for(kills)` steps once for each of `kinds`, then let it finish; what each kill left."""
    rng, kills, steps = np.random.default_rng(seed), [], steps_for(len(kinds))
    for kind in kinds:
        process = _start(root, run, steps)
        try:
            _await(kind, process, run, rng)
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.wait()
        kills.append(Kill(kind, len(_logged(run)), *_found(run)))
        say(kills[-1])
    finish(root, run, steps)
    return kills


def finish(root: Path, run: Path, steps: int) -> None:
    process = _start(root, run, steps)
    if process.wait(WAIT * 2):
        raise RuntimeError(f"the worker ended with {process.returncode}:\n{process.stderr.read()[-3000:]}")


def equal(a: Path, b: Path, steps: int) -> dict[str, bool]:
    """What of two finished runs is the same, bit for bit."""
    from eagle3_jax.train import checkpoint

    one, two = (checkpoint.read_meta(run, steps) for run in (a, b))
    positions = [json.loads((run / f"steps/{steps}/data/metadata").read_text()) for run in (a, b)]
    losses = [[(line["step"], line["losses"]) for line in _logged(run)] for run in (a, b)]
    return {
        "parameters": one["digests"]["params"] == two["digests"]["params"],
        "optimiser state": one["digests"]["opt"] == two["digests"]["opt"],
        "data position": positions[0] == positions[1],
        "losses of all steps": losses[0] == losses[1] and len(losses[0]) == steps,
    }


def _start(root: Path, run: Path, steps: int) -> subprocess.Popen:
    cached = {
        "JAX_COMPILATION_CACHE_DIR": str(root / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = [sys.executable, __file__, "--work", str(root), str(run), str(steps)]
    return subprocess.Popen(
        command, env=os.environ | cached, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def _await(kind: str, process: subprocess.Popen, run: Path, rng: np.random.Generator) -> None:
    """Until the worker is where it is to be killed; 0 to 20 ms later, so that no moment is like another."""
    there = len(_logged(run))
    wanted = there + int(rng.integers(2 * SAVE_EVERY, 4 * SAVE_EVERY))
    reached = {
        KINDS[0]: lambda: run.exists(),
        KINDS[1]: lambda: any(_half(run)),
        KINDS[2]: lambda: len(_logged(run)) >= wanted,
    }[kind]
    until = time.monotonic() + WAIT
    while not reached():
        if process.poll() is not None:
            raise RuntimeError(f"the worker ended before it was killed:\n{process.stderr.read()[-3000:]}")
        if time.monotonic() > until:
            raise RuntimeError(f"not {kind} after {WAIT:.0f} s")
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.02))


def _logged(run: Path) -> list[dict]:
    from eagle3_jax.train import metrics

    return metrics.read(run)


def _half(run: Path):
    return (p for p in run.glob("steps/*") if not p.name.isdigit())


def _found(run: Path) -> tuple[list[int], list[str]]:
    steps = [int(p.name) for p in run.glob("steps/*") if p.name.isdigit()]
    half = [p.name for p in [*run.glob("start.*"), *_half(run)]]
    return sorted(steps), sorted(half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    given = parser.parse_args()
    if given.work:
        root, run, steps = given.work
        return work(Path(root), Path(run), int(steps))
    import tiny

    rng = np.random.default_rng(given.seed)
    steps = steps_for(given.kills)
    kinds = [KINDS[0], *(KINDS[i] for i in rng.integers(1, 3, given.kills - 1))]
    with tempfile.TemporaryDirectory() as folder:
        root = tiny.prepared(Path(folder))
        finish(root, root / "whole", steps)
        began = time.monotonic()
        kills = survive(root, root / "run", kinds, given.seed, say=lambda kill: print(kill, flush=True))
        found = equal(root / "whole", root / "run", steps)
        minutes = (time.monotonic() - began) / 60
    lines = [
        "# Killed and gone on with",
        "",
        f"Written by `make soak`: {len(kills)} times `kill -9`, {steps} steps, a checkpoint every {SAVE_EVERY}, rows "
        f"prefetched, Python {platform.python_version()}, {os.cpu_count()} cores, {minutes:.1f} minutes.",
        "",
        *(f"- {name}: {'equal bit for bit' if same else '**different**'}" for name, same in found.items()),
        "",
        "| kill | when | steps logged | checkpoints there | half written |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {i} | {k.when} | {k.logged} | {', '.join(map(str, k.saved)) or '-'} | {', '.join(k.half) or '-'} |"
        for i, k in enumerate(kills, 1)
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if given.log:
        given.log.write_text(text)
    raise SystemExit(not all(found.values()))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
