"""RUN/metrics.jsonl: what training measured, a line every `log_every` steps and at every checkpoint."""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from eagle3_jax.errors import DataError

FILE, EVALUATIONS = "metrics.jsonl", "evaluations.jsonl"  # in the run directory
NAMED = 16  # conversations of a bad batch that the message names


class Log:
    """Lines of step, epoch, seconds of training, learning rate and the step's metrics.

    `at` is the step that training goes on from: lines after it, of steps that a killed process did not save, are
    taken out, so that every step stands there once.
    """

    def __init__(self, run: str | Path, at: int, learning_rate: Callable):
        self._path, self._learning_rate = Path(run) / FILE, learning_rate
        lines = _cut(self._path, at)
        self.evaluations = _cut(self._path.with_name(EVALUATIONS), at)
        self._before, self._began = lines[-1]["seconds"] if lines else 0.0, time.monotonic()

    def __enter__(self):
        self._file = open(self._path, "a")
        return self

    def __exit__(self, *_):
        self._file.close()

    def write(self, step: int, epoch: float, metrics: dict) -> str:
        """Append a line and return a short text."""
        values = {name: np.asarray(x).tolist() for name, x in jax.device_get(metrics).items()}
        seconds = self._before + time.monotonic() - self._began
        rate = float(self._learning_rate(step - 1))
        line = dict(step=step, epoch=epoch, seconds=seconds, learning_rate=rate) | values
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        return f"loss {values['loss']:.3f}, accuracy {' '.join(f'{a:.2f}' for a in values['accuracy'])}"

    def evaluation(self, line: dict) -> None:
        line = line | {"seconds": self._before + time.monotonic() - self._began}
        self.evaluations.append(line)
        with self._path.with_name(EVALUATIONS).open("a") as file:
            file.write(json.dumps(line) + "\n")

    def evaluated(self, step: int) -> bool:
        return any(line["step"] == step for line in self.evaluations)

    def accept_length(self, step: int) -> float | None:
        return next((line.get("accept_length") for line in self.evaluations if line["step"] == step), None)


def read(run: str | Path) -> list[dict]:
    """The lines of a run; none where there is no file. A last line that was cut off is left out."""
    return _lines(Path(run) / FILE)


def _cut(path: Path, at: int) -> list[dict]:
    lines = [line for line in _lines(path) if line["step"] <= at]
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(json.dumps(line) + "\n" for line in lines))
    os.replace(part, path)
    return lines


def _lines(path: Path) -> list[dict]:
    lines = []
    for text in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def evaluations(run):
    return _lines(Path(run) / EVALUATIONS)


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
