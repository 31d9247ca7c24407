"""`kill -9` at any moment, or a full disk: what the run ends with is what it would have been."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import soak
import tiny

from eagle3_jax.train import checkpoint
from eagle3_jax.train.loop import train

FULL_DISK = Path(__file__).with_name("full_disk.py")


def test_a_run_that_is_killed_three_times_ends_bit_for_bit_as_one_that_was_not(root):
    steps = soak.steps_for(len(soak.KINDS))
    soak.finish(root, root / "whole", steps)
    kills = soak.survive(root, root / "run", list(soak.KINDS))
    first, saving, at_step = kills
    assert not first.saved and first.logged == 0
    assert saving.half, "it was not killed while it saved"
    assert at_step.saved and at_step.saved[-1] < steps
    found = soak.equal(root / "whole", root / "run", steps)
    assert all(found.values()), found


def test_a_disk_that_is_full_during_a_save_costs_that_step_alone(root, tmp_path):
    def on_a_small_disk(command: str):
        words = ["unshare", "-rm", "bash", "-c", f"mount -t tmpfs -o size=4m tmpfs '{tmp_path}' && {command}"]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    if shutil.which("unshare") is None or on_a_small_disk("true").returncode:
        pytest.skip(
            "needs a file system of its own to fill: `unshare -rm mount -t tmpfs` is not allowed here"
        )
    done = on_a_small_disk(f"'{sys.executable}' '{FULL_DISK}' '{root}' '{tmp_path}'")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wanted = f"{tmp_path}/run: no space left on device; step 3 is whole: free some and give the same command"
    assert found["said"] == wanted and found["whole"] == [0, 3] and found["intact"] == 3
    undisturbed = train(tiny.config(root, f"train.run={root / 'undisturbed'}", "train.save_every=3"))
    assert found["digests"] == checkpoint.read_meta(undisturbed, 10)["digests"]
