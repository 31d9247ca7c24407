"""RUN/tensorboard: every line of the log as an event for TensorBoard."""

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

DIRECTORY = "tensorboard"  # in the run directory
EVALUATION = "evaluation/"  # what the tags of evaluations begin with


class Events:
    """Writes one file, anew at each start from the log's own `lines`, so that each step stands there once.

    An event's wall time counts seconds of training back from now: the axis "relative" leaves out the time between
    a stop and a restart.
    """

    def __init__(self, run: str | Path, lines: Iterable[tuple[str, dict]], seconds: float):
        directory = Path(run) / DIRECTORY
        directory.mkdir(exist_ok=True)
        # TensorBoard goes from file to file by name, and stands still at one that is gone while it reads it.
        for old in directory.glob("*tfevents*"):
            os.truncate(old, 0)
        self._file = RecordWriter(open(directory / f"events.out.tfevents.{time.time_ns()}", "wb"))  # noqa: SIM115
        self._began = time.time() - seconds
        self._add(Event(wall_time=self._began, file_version="brain.Event:2"))
        # A TensorBoard that is open drops what it has read of the old file.
        self._add(Event(wall_time=self._began, step=0, session_log=SessionLog(status=SessionLog.START)))
        for prefix, line in lines:
            self.write(prefix, line)

    def write(self, prefix: str, line: dict) -> None:
        values = [
            Summary.Value(tag=prefix + tag, simple_value=x) for tag, x in scalars(line) if tag != "step"
        ]
        wall = self._began + line.get("seconds", 0.0)
        self._add(Event(wall_time=wall, step=line["step"], summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        self._file.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def scalars(value, tag: str = "") -> Iterator[tuple[str, float]]:
    """`accuracy/0`, `held_out/loss` and so on of dicts and lists; texts and lists of lists are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from scalars(inner, f"{tag}/{key}" if tag else key)
    elif isinstance(value, list):
        yield from ((f"{tag}/{k}", x) for k, x in enumerate(value) if isinstance(x, int | float))
    elif isinstance(value, int | float):
        yield tag, value
