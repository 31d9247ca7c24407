"""The training log: each step once, whatever was killed, and the same numbers in TensorBoard's own reader."""

import json
import os

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.record_writer import RecordWriter

from eagle3_jax.train import metrics
from eagle3_jax.train.events import DIRECTORY


def found(step: int, shift: float = 0.0) -> dict:
    return dict(
        loss=np.float32(3 - step / 8 + shift), accuracy=np.array([0.5, step / 32]), supervised=[7.0, 6.0]
    )


def train(run, at: int, to: int, shift: float = 0.0, evaluate_every: int = 3) -> None:
    def evaluate(step: int) -> None:
        line = dict(step=step, accept_length=1 + step / 16 + shift, chain="3-1-4", pairs=[[1, 2], [3, 4]])
        log.evaluation(line | dict(held_out={"loss": 2.5, "accuracy": [0.25, step / 64]}))

    with metrics.Log(run, at, lambda step: 0.01 / (step + 1)) as log:
        if at == 0 and evaluate_every <= to:
            evaluate(0)
        for step in range(at + 1, to + 1):
            log.write(step, step / 10, found(step, shift))
            if step % evaluate_every == 0:
                evaluate(step)


def reader(run) -> EventAccumulator:
    return EventAccumulator(str(run / DIRECTORY), size_guidance={"scalars": 0})


def events(accumulator: EventAccumulator) -> dict:
    """tag -> [(step, value)] as TensorBoard shows them."""
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]
    return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags}


def test_tensorboard_reads_the_values_of_the_log(tmp_path):
    train(tmp_path, 0, 6)
    read, told = events(reader(tmp_path)), metrics.read_evaluations(tmp_path)
    lines = metrics.read(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and [x["step"] for x in told] == [0, 3, 6]
    wanted = {name: [(x["step"], x[name]) for x in lines] for name in ("loss", "learning_rate", "seconds")}
    wanted |= {f"accuracy/{k}": [(x["step"], x["accuracy"][k]) for x in lines] for k in (0, 1)}
    wanted["evaluation/accept_length"] = [(x["step"], x["accept_length"]) for x in told]
    wanted["evaluation/held_out/accuracy/1"] = [(x["step"], x["held_out"]["accuracy"][1]) for x in told]
    for tag, pairs in wanted.items():
        assert read[tag] == [(step, pytest.approx(x, rel=1e-6)) for step, x in pairs], tag
    other = {"evaluation/seconds", "evaluation/held_out/loss", "evaluation/held_out/accuracy/0"}
    assert {tag for tag in read if tag.startswith("evaluation/")} - wanted.keys() == other


def test_steps_that_a_killed_run_did_not_save_stand_nowhere_twice(tmp_path):
    train(tmp_path, 0, 8, shift=10.0)
    open_since_then = reader(tmp_path)
    assert len(events(open_since_then)["loss"]) == 8
    with open(tmp_path / metrics.FILE, "a") as file:
        file.write('{"step": 9, "lo')
    train(tmp_path, 5, 7)
    assert [x["step"] for x in metrics.read(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]
    assert [x["accept_length"] for x in metrics.read_evaluations(tmp_path)] == [11, 11 + 3 / 16, 1 + 6 / 16]
    for accumulator in (reader(tmp_path), open_since_then):
        loss = events(accumulator)["loss"]
        assert loss == [(s, 13 - s / 8) for s in (1, 2, 3, 4, 5)] + [(s, 3 - s / 8) for s in (6, 7)]
        assert [step for step, _ in events(accumulator)["evaluation/accept_length"]] == [0, 3, 6]
    every = [x for part in (tmp_path / DIRECTORY).iterdir() for x in LegacyEventFileLoader(str(part)).Load()]
    steps = sorted(x.step for x in every if any(v.tag == "loss" for v in x.summary.value))
    assert steps == [1, 2, 3, 4, 5, 6, 7]  # in the files themselves


def test_an_event_that_was_cut_off_is_taken_out(tmp_path):
    train(tmp_path, 0, 4)
    (part,) = (tmp_path / DIRECTORY).iterdir()
    whole = part.read_bytes()
    for left in (5, 30):  # within a record's head, and within its event
        with open(part, "ab") as file:
            RecordWriter(file).write(Event(step=4, file_version="x" * 40).SerializeToString())
        os.truncate(part, len(whole) + left)
        train(tmp_path, 4, 6)
        assert [step for step, _ in events(reader(tmp_path))["loss"]] == [1, 2, 3, 4, 5, 6]
        assert part.read_bytes() == whole


def test_a_log_to_which_nothing_is_added_stays_as_it_is(tmp_path):
    train(tmp_path, 0, 4)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    with metrics.Log(tmp_path, 4, float):
        pass
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_seconds_go_on_and_values_that_are_not_finite_are_kept(tmp_path):
    train(tmp_path, 0, 2)
    lines = metrics.read(tmp_path)
    lines[-1]["seconds"] = 100.0
    (tmp_path / metrics.FILE).write_text("".join(json.dumps(x) + "\n" for x in lines))
    train(tmp_path, 2, 4, shift=np.nan)
    times = [x["seconds"] for x in metrics.read(tmp_path)]
    assert times == sorted(times) and 100 <= times[2] < 110
    assert [np.isfinite(x) for _, x in events(reader(tmp_path))["loss"]] == [True, True, False, False]


def test_a_run_without_evaluations_has_none(tmp_path):
    assert metrics.read_evaluations(tmp_path) == []
    train(tmp_path, 0, 2)
    assert metrics.read_evaluations(tmp_path) == [] and not (tmp_path / metrics.EVALUATIONS).exists()
