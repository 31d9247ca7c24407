"""Runs where DISK is a small file system: fills it while a run trains there, looks at what is left, frees it, goes on.

    python tests/full_disk.py ROOT DISK

Prints JSON: what the run said when it could not save, the steps that were whole then, and what it ended with.
"""

import json
import sys
import time
from pathlib import Path

import conftest  # noqa: F401  the devices and compiler flags of the tests
import tiny

from eagle3_jax.data.loader import Batches
from eagle3_jax.errors import CheckpointError
from eagle3_jax.train import checkpoint
from eagle3_jax.train.loop import train

SPARE = 20_000  # bytes left: less than a checkpoint


def fill(disk: Path) -> None:
    """Until not a byte fits, then SPARE of them free again."""
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass
        file.truncate(max(file.tell() - SPARE, 0))


def main(root: Path, disk: Path) -> None:
    config, real = tiny.config(root, f"train.run={disk / 'run'}", "train.save_every=3"), Batches.__next__

    def fills_at_step_5(self):
        if self.consumed == 4:
            while not (disk / "run/steps/3").exists():  # still being written
                time.sleep(0.01)
            fill(disk)
        return real(self)

    Batches.__next__ = fills_at_step_5
    out = {}
    try:
        train(config)
    except CheckpointError as error:
        out["said"] = str(error)
    run = disk / "run"
    out["whole"] = checkpoint.steps_of(run)
    out["intact"] = checkpoint.load_draft(run).step
    (disk / "filler").unlink()
    Batches.__next__ = real
    train(config)
    out["digests"] = checkpoint.read_meta(run, 10)["digests"]
    print(json.dumps(out))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
