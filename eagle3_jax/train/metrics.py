"""What training measured: RUN/metrics.jsonl, a line every `log_every` steps and at every checkpoint, and
RUN/evaluations.jsonl, a line per evaluation; both also as TensorBoard events."""

import functools
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from eagle3_jax.errors import DataError
from eagle3_jax.train.events import Events

FILE, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"  # in the run directory
NAMED = 16  # conversations of a bad batch that the message names


class Log:
    """Lines of step, epoch, seconds of training, learning rate and the step's metrics.

    `at` is the step that training goes on from: lines after it, of steps that a killed process did not save, are
    taken out, so that every step stands there once.
    """

    def __init__(self, run: str | Path, at: int, learning_rate: Callable):
        self._run, self._at, self._learning_rate = Path(run), at, learning_rate
        lines = _cut(self._run / FILE, at)
        self.evaluations = _cut(self._run / EVALUATIONS, at)
        self._before, self._began = lines[-1]["seconds"] if lines else 0.0, time.monotonic()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if "_events" in self.__dict__:
            self._events.close()

    @property
    def seconds(self) -> float:
        """Of training so far, those before a restart among them."""
        return self._before + time.monotonic() - self._began

    def write(self, step: int, epoch: float, metrics: dict) -> str:
        """Append a line and return a short text."""
        values = {name: np.asarray(x).tolist() for name, x in jax.device_get(metrics).items()}
        rate = float(self._learning_rate(step - 1))
        line = dict(step=step, epoch=epoch, seconds=self.seconds, learning_rate=rate) | values
        self._append(FILE, line)
        return f"loss {values['loss']:.3f}, accuracy {' '.join(f'{a:.2f}' for a in values['accuracy'])}"

    def evaluation(self, line: dict) -> None:
        """Append the line of an evaluation: `step`, what was measured, and seconds of training unless it says so."""
        line = {"seconds": self.seconds} | line
        self._append(EVALUATIONS, line, "evaluation/")
        self.evaluations.append(line)

    def evaluated(self, step: int) -> bool:
        return any(line["step"] == step for line in self.evaluations)

    def accept_length(self, step: int) -> float | None:
        return next((line.get("accept_length") for line in self.evaluations if line["step"] == step), None)

    def _append(self, file: str, line: dict, prefix: str = "") -> None:
        with open(self._run / file, "a") as out:
            out.write(json.dumps(line) + "\n")
        self._events.write(line, prefix)

    @functools.cached_property
    def _events(self) -> Events:
        """Begun with the first line: a finished run that is started again stays as it is."""
        return Events(self._run, self._at)


def read(run: str | Path) -> list[dict]:
    """The lines of a run; none where there is no file. A last line that was cut off is left out."""
    return _read(Path(run) / FILE)


def read_evaluations(run: str | Path) -> list[dict]:
    """The evaluations during a run, as `read`."""
    return _read(Path(run) / EVALUATIONS)


def _read(path: Path) -> list[dict]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def _cut(path: Path, at: int) -> list[dict]:
    """Take out the lines after step `at`, and what was cut off; returns the others."""
    lines = [line for line in _read(path) if line["step"] <= at]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    if path.exists() and path.read_text() != text:
        part = path.with_name(f"{path.name}.part")
        part.write_text(text)
        os.replace(part, path)
    return lines


def check(step: int, metrics: dict, conversations: Callable[[int], Sequence[int]]) -> None:
    """Raises DataError for a loss or gradient that is not finite, naming the batch (`conversations` of a step)."""
    bad = {k: float(metrics[k]) for k in ("loss", "grad_norm") if not math.isfinite(metrics[k])}
    if bad:
        seen = conversations(step)
        shown = ", ".join(map(str, seen[:NAMED])) + ", .." * (len(seen) > NAMED)
        raise DataError(
            f"step {step}: {', '.join(f'{k} is {x}' for k, x in bad.items())} in a batch of {len(seen)} conversations "
            f"({shown}); lower train.learning_rate or look at them; what was saved before is intact"
        )
