"""Commands that start processes of their own: whatever they leave behind is ended with them."""

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from eagle3_jax.errors import UserError

GRACE = 10.0  # seconds between asking a group to end and killing it
LAST = 40  # lines of output that an error shows


def run(command: Sequence[object], environment: Mapping[str, str], timeout: float) -> str:
    """Run a command in a process group of its own; its output, stdout and stderr together.

    The whole group is killed when the command has ended or `timeout` seconds have passed. Raises UserError with the
    last lines of the output where it fails or takes too long.
    """
    words, late = [str(word) for word in command], False
    # A file and no pipe: reading a pipe would wait for every process that holds it open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            end_group(process)
        if late or process.returncode:
            how = f"not done after {timeout:.0f} s" if late else f"exit status {process.returncode}"
            raise UserError(
                f"{' '.join(words[:2])}: {how}; the last lines of its output:\n{last_lines(output)}"
            )
        output.seek(0)
        return output.read()


def last_lines(output: IO[str]) -> str:
    """The last lines of what was written to a file."""
    output.seek(0)
    return "\n".join(output.read().splitlines()[-LAST:])


def end_group(process: subprocess.Popen) -> None:
    """End a process that leads a session of its own, and everything that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(GRACE)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
