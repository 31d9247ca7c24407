"""The charts of a report, from the lines of metrics.jsonl and evaluations.jsonl."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from eagle3_jax.report.chart import Chart, Series
from eagle3_jax.report.collect import Found

PERCENT = "{:.3g}%"


def minutes(lines: Sequence[dict]) -> Callable[[float], float]:
    """Minutes of training at a step."""
    steps, seconds = [0, *(x["step"] for x in lines)], [0, *(x["seconds"] for x in lines)]
    return lambda step: float(np.interp(step, steps, seconds)) / 60


def throughput(lines: Sequence[dict], tokens: int) -> tuple[list[int], list[float]]:
    """Steps and tokens a second since the line before; `tokens` are those of a step.

    The first line has compiling in it and is left out. A line with a save, an evaluation or a restart in it reads as
    slow: `typical` is what the others have.
    """
    pairs = [(a, b) for a, b in itertools.pairwise(lines) if b["seconds"] > a["seconds"]]
    rates = [tokens * (b["step"] - a["step"]) / (b["seconds"] - a["seconds"]) for a, b in pairs]
    return [b["step"] for _, b in pairs], rates


def typical(rates: Sequence[float]) -> float | None:
    return float(np.median(rates)) if rates else None


def step_tokens(config: dict) -> int:
    train = config.get("train", {})
    return train.get("batch", 0) * train.get("row_length", 0)


def charts(found: Found) -> list[Chart]:
    lines, held = found.lines, [e for e in found.evaluations if e.get("held_out")]
    train = found.config.get("train", {})
    steps = [x["step"] for x in lines]
    loss = Series("loss", steps, _column(lines, "loss"))
    there = _column([e["held_out"] for e in held], "loss")
    held_loss = Series("held out", [e["step"] for e in held], there, kind="measured", beside="held out")
    rates = throughput(lines, step_tokens(found.config))
    k = "k: unroll step"
    return [
        Chart(
            "Loss", [loss, held_loss], note="of the training batch, summed over unroll steps with weights train.decay^k"
        ),
        Chart("Loss per unroll step", _unrolled(lines, held, "losses"), note=k),
        _accept_length(found),
        Chart(
            "Accuracy per unroll step", _unrolled(lines, held, "accuracy", 100), PERCENT, floor=0,
            note=f"{k}. How often the draft's first choice is the target's, over all supervised rows",
        ),
        Chart(
            "Conditional accuracy per unroll step", _unrolled(lines, held, "conditional", 100), PERCENT, floor=0,
            note=f"{k}. Among rows where all earlier steps were right and the text went the same way{_shares(lines)}",
        ),
        _positions(found),
        Chart(
            "Learning rate", [Series("rate", steps, _column(lines, "learning_rate"))], "{:.3g}", floor=0, reduce=None,
        ),
        Chart(
            "Gradient norm", [Series("norm", steps, _column(lines, "grad_norm"))], "{:.3g}", log=True,
            note="before clipping, logarithmic", rule=train.get("clip") and (train["clip"], "train.clip"),
        ),
        Chart(
            "Throughput", [Series("tokens/s", *rates)], "{:,.0f}", floor=0, reduce=np.median, outliers=False,
            note="tokens/s, padding included: train.batch x train.row_length. Dips are saves, evaluations and restarts",
        ),
    ]  # fmt: skip


def _column(lines: Sequence[dict], name: str, k: int | None = None, times: float = 1) -> list[float | None]:
    values = [x.get(name) for x in lines]
    if k is not None:
        values = [v[k] if v and k < len(v) else None for v in values]
    return [None if v is None else v * times for v in values]


def _unrolled(lines, held, name: str, times: float = 1) -> list[Series]:
    """A curve per unroll step, the held-out one after it."""
    inner, out = [e["held_out"] for e in held], []
    for k in range(max((len(x.get(name) or []) for x in [*lines, *inner]), default=0)):
        steps = [x["step"] for x in lines]
        out.append(Series(f"k={k}", steps, _column(lines, name, k, times), colour=k))
        there = dict(colour=k, kind="measured", beside="held out")
        out.append(Series(f"k={k}", [e["step"] for e in held], _column(inner, name, k, times), **there))
    return out


def _shares(lines) -> str:
    shares = lines[-1].get("conditional_share") if lines else None
    return "" if not shares else "; their share, at the end: " + ", ".join(f"{x:.0%}" for x in shares)


def _bounds(lines: Sequence[dict]) -> dict:
    intervals = [x.get("interval") or (None, None) for x in lines]
    return dict(low=[x for x, _ in intervals], high=[x for _, x in intervals])


def _accept_length(found: Found) -> Chart:
    told = [e for e in found.evaluations if e.get("accept_length") is not None]
    final = [r for r in (found.untrained, found.result) if r and "step" in r]
    curve = found.curve or []
    series = [
        Series(
            "held out", [e["step"] for e in told], [e["accept_length"] for e in told],
            "while training, on held-out prompts", kind="measured", **_bounds(told),
        ),
        Series(
            "forced", [c["step"] for c in curve], [c["accept_length"] for c in curve],
            "teacher-forced on the target's answers (curve.json)", colour=1, kind="measured",
        ),
        Series(
            "evaluate", [r["step"] for r in final], [r["accept_length"] for r in final],
            "by eagle3 evaluate", colour=2, kind="single", **_bounds(final),
        ),
    ]  # fmt: skip
    note = "1 + accepted drafts / verify forwards; with 95 % intervals"
    if not any(s.steps for s in series):
        note = "Set train.evaluate_every for it while training; eagle3 evaluate measures it afterwards"
    return Chart("Accept length", series, "{:.3f}", floor=1, note=note)


def _positions(found: Found) -> Chart:
    name, series = "acceptance_by_position", []
    told = [e for e in found.evaluations if e.get(name)]
    final = [r for r in (found.untrained, found.result) if r and "step" in r]
    for k in range(max((len(x.get(name) or []) for x in [*told, *final]), default=0)):
        label = f"draft {k + 1}"
        if told:
            steps = [e["step"] for e in told]
            series.append(Series(label, steps, _column(told, name, k, 100), colour=k, kind="measured"))
        if final:
            there = dict(colour=k, kind="single", beside="eagle3 evaluate")
            series.append(Series(label, [r["step"] for r in final], _column(final, name, k, 100), **there))
    return Chart(
        "Acceptance by position", series, PERCENT, floor=0,
        note="share of verify forwards that accept at least so many drafts",
    )  # fmt: skip
