"""RUN/tensorboard: every line of the log as an event for TensorBoard."""

import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

DIRECTORY = "tensorboard"  # in the run directory
HEAD, FOOT = 12, 4  # bytes of a record before and after its event


class Events:
    """Writes a file of its own; from those of earlier starts the events after step `at` are taken out."""

    def __init__(self, run: str | Path, at: int):
        directory = Path(run) / DIRECTORY
        directory.mkdir(exist_ok=True)
        for old in directory.glob("*tfevents*"):
            _cut(old, at)
        # TensorBoard goes from file to file by name.
        self._file = RecordWriter(open(directory / f"events.out.tfevents.{time.time_ns()}", "wb"))  # noqa: SIM115
        self._add(Event(file_version="brain.Event:2"))
        # One that is open forgets what it has read of steps that were taken out.
        self._add(Event(step=at + 1, session_log=SessionLog(status=SessionLog.START)))

    def write(self, line: dict, prefix: str = "") -> None:
        values = [
            Summary.Value(tag=prefix + tag, simple_value=x) for tag, x in scalars(line) if tag != "step"
        ]
        self._add(Event(step=line["step"], summary=Summary(value=values)))

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._file.write(event.SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _cut(path: Path, at: int) -> None:
    data, end = path.read_bytes(), 0
    while end < len(data):
        size = struct.unpack_from("<Q", data, end)[0] if end + HEAD <= len(data) else len(data)
        after = end + HEAD + size + FOOT
        if after > len(data) or Event.FromString(data[end + HEAD : after - FOOT]).step > at:
            break
        end = after
    os.truncate(path, end)


def scalars(value, tag: str = "") -> Iterator[tuple[str, float]]:
    """`accuracy/0`, `held_out/loss` and so on of dicts and lists; texts and lists of lists are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from scalars(inner, f"{tag}/{key}" if tag else key)
    elif isinstance(value, list):
        yield from ((f"{tag}/{k}", x) for k, x in enumerate(value) if isinstance(x, int | float))
    elif isinstance(value, int | float):
        yield tag, value
