"""A command ends with everything that it started, whatever happens."""

import os
import sys
import time

import pytest

from bridge import processes
from eagle3_jax.errors import UserError

# Starts a process that would outlive it, and says which.
STARTS = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(child.pid, flush=True)
"""


def _gone(pid: int) -> bool:
    """Ended, if not yet collected by whoever inherited it."""
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_what_a_command_leaves_behind_is_ended():
    output = processes.run([sys.executable, "-c", STARTS], os.environ, 30)
    assert _gone(int(output))


def test_a_late_command_is_ended_with_its_children_and_its_last_words_shown():
    code = f"{STARTS}\ntime.sleep(60)"
    with pytest.raises(UserError, match=r"not done after 5 s; the last lines of its output:\n\d+$") as caught:
        processes.run([sys.executable, "-c", code], os.environ, 5)
    assert _gone(int(str(caught.value).splitlines()[-1]))


def test_a_failure_shows_the_last_lines():
    code = "print(*range(100), sep='\\n'); raise SystemExit(3)"
    with pytest.raises(UserError, match=r"exit status 3; the last lines of its output:\n60\n(.|\n)*99$"):
        processes.run([sys.executable, "-c", code], os.environ, 30)
