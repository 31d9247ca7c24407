"""Line charts as geometry that the page's template draws in SVG; no library, no request, no script needed."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

WIDTH, HEIGHT = 440, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 380, 10, 226  # of the plot, in the drawing's own units
MOST = 400  # points drawn of a series
CENTRES, SMOOTH_FROM = 160, 40  # points of a smoothed line, and how many it takes to have one
LABEL = 12  # height of a label at a line's end
STROKES = 7  # colours; more lines begin again, dashed


@dataclasses.dataclass(frozen=True, eq=False)
class Series:
    """`values` over `steps`; what is None or not finite is a gap. `low` and `high` bound an interval.

    curve     logged often: drawn thin, with a smoothed line over it
    measured  now and then: marks that dashes join, the interval a band
    single    marks alone, the interval bars

    With `beside`, a word such as "held out", it is named with the series of the same colour that comes before it.
    """

    label: str  # at the line's end
    steps: Sequence[float]
    values: Sequence[float | None]
    name: str = ""  # in the legend, where the label is too short to say it
    colour: int = 0
    kind: Literal["curve", "measured", "single"] = "curve"
    beside: str = ""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Chart:
    title: str
    series: Sequence[Series]
    form: str = "{:.4g}"  # of a value
    note: str = ""
    log: bool = False
    floor: float | None = None  # where the axis begins
    rule: tuple[float, str] | None = None  # a level to compare with, and its name
    reduce: Callable | None = np.mean  # what smooths
    outliers: bool = True  # whether the axis reaches what the smoothed line leaves out


def draw(chart: Chart, minutes: Callable[[float], float]) -> dict:
    """What the template needs; `hover` holds the values behind the points. No lines where there is nothing finite."""
    series = [_drawable(s, chart.log) for s in chart.series]
    series = [s for s in series if np.isfinite(s.values).any()]
    out = dict(title=chart.title, note=chart.note, smoothed="")
    pairs = [pair for s in chart.series for pair in zip(s.steps, s.values, strict=True)]
    out["gaps"] = sorted({int(step) for step, x in pairs if x is not None and not math.isfinite(x)})
    out |= {name: [] for name in ("lines", "marks", "bands", "bars", "ends", "legend", "hover")}
    if not series:
        return out
    smoothed = [smooth(s, chart.reduce) if s.kind == "curve" and chart.reduce else None for s in series]
    x_axis = _Axis(0, max(max(s.steps) for s in series) or 1, LEFT, RIGHT)
    y_axis = _Axis(*_range(chart, series, smoothed), BOTTOM, TOP, chart.log)
    for s, line in zip(series, smoothed, strict=True):
        _add(out, s, line, x_axis, y_axis, chart.form)
        if line:
            out["smoothed"] = f"{chart.reduce.__name__} of {line[2]} lines"
    out["ends"] = _apart(out["ends"])
    if chart.rule and TOP <= (y := y_axis(chart.rule[0])) <= BOTTOM:
        out["rule"] = dict(y=y, text=chart.rule[1])
    whole = [int(x) for x in x_axis.ticks() if x == int(x)]
    form = "{:,.1f}" if minutes(x_axis.high) < 100 else "{:,.0f}"
    out["x_ticks"] = [dict(at=x_axis(x), text=f"{x:,}", minutes=form.format(minutes(x))) for x in whole]
    out["y_ticks"] = [dict(at=y_axis(y), text=chart.form.format(y)) for y in y_axis.ticks()]
    out["most"] = x_axis.high
    return out


def _add(out: dict, s: Series, line, x_axis: "_Axis", y_axis: "_Axis", form: str) -> None:
    """One series with its smoothed `line`, if it has one."""
    style = dict(colour=s.colour % STROKES, dashed=s.kind != "curve" or s.colour >= STROKES)
    at = thin(s.values)
    points = [(x_axis(s.steps[i]), y_axis(s.values[i])) for i in at]
    if s.kind != "single":
        out["lines"].append(style | dict(d=_path(points), thin=line is not None))
    if line is not None:
        thick = [(x_axis(x), y_axis(y)) for x, y in zip(line[0], line[1], strict=True)]
        out["lines"].append(style | dict(d=_path(thick), thin=False))
    if s.kind != "curve" or len(at) == 1:
        out["marks"] += [style | dict(x=x, y=y) for x, y in points if math.isfinite(y)]
    if s.low is not None:
        edges = [(x_axis(s.steps[i]), y_axis(s.low[i]), y_axis(s.high[i])) for i in at]
        edges = [edge for edge in edges if all(map(math.isfinite, edge))]
        if s.kind == "single":
            out["bars"] += [style | dict(x=x, low=low, high=high) for x, low, high in edges]
        else:
            around = [(x, high) for x, _, high in edges] + [(x, low) for x, low, _ in edges[::-1]]
            out["bands"].append(style | dict(d=_path(around)))
    last = [y for y in (s.values if line is None else line[1]) if math.isfinite(y)][-1]
    whose = [e for e in out["legend"] if s.beside and e["series"] == s.colour]
    if whose:
        whose[0]["beside"].append((s.beside, form.format(last)))
    else:
        out["ends"].append(style | dict(y=y_axis(last), text=s.label))
        entry = dict(series=s.colour, text=s.name or s.label, last=form.format(last), kind=s.kind, beside=[])
        out["legend"].append(style | entry)
    values = [(s.steps[i], form.format(s.values[i])) for i in at if math.isfinite(s.values[i])]
    label = " ".join(filter(None, (s.label, s.beside)))
    out["hover"].append(style | dict(label=label, x=[x for x, _ in values], y=[y for _, y in values]))


def thin(values: Sequence[float], most: int = MOST) -> list[int]:
    """Which of many points to draw: the least and the greatest of each stretch, so that no spike is lost."""
    values = np.asarray(values, float)
    if len(values) <= most:
        return list(range(len(values)))
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), most // 2):
        finite = part[np.isfinite(values[part])]
        kept |= (
            {finite[values[finite].argmin()], finite[values[finite].argmax()]} if len(finite) else {part[0]}
        )
    return sorted(map(int, kept))


def smooth(s: Series, reduce: Callable):
    """(steps, values, width): `reduce` of the finite values in a window of `width` lines; None for a short series."""
    values, n = np.asarray(s.values, float), len(s.values)
    if n < SMOOTH_FROM:
        return None
    half, steps, out = max(n // 60, 2), [], []
    for centre in np.unique(np.linspace(0, n - 1, CENTRES).round().astype(int)):
        window = values[max(centre - half, 0) : centre + half + 1]
        window = window[np.isfinite(window)]
        steps.append(s.steps[centre])
        out.append(float(reduce(window)) if len(window) else math.nan)
    return steps, out, 2 * half + 1


class _Axis:
    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self.low, self.high, self._start, self._end, self._log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        if not math.isfinite(value):
            return math.nan
        low, high = self.low, self.high
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return round(self._start + (self._end - self._start) * (value - low) / (high - low), 1)

    def ticks(self) -> list[float]:
        if not self._log:
            return ticks(self.low, self.high)
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            out = [d * 10.0**p for p in powers for d in digits if self.low <= d * 10.0**p <= self.high]
            if len(out) <= 7:
                break
        return out if len(out) > 1 else ticks(self.low, self.high)


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most about `most` round numbers within low .. high."""
    raw = (high - low) / most
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * d for d in (1, 2, 2.5, 5, 10) if size * d >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{i * step:.10g}") for i in range(first, last + 1)]


def _range(chart: Chart, series: list[Series], smoothed: list) -> tuple[float, float]:
    """Where the value axis begins and ends."""
    shown = [
        line[1] if line and not chart.outliers else s.values for s, line in zip(series, smoothed, strict=True)
    ]
    shown += [edge for s in series for edge in (s.low, s.high) if edge is not None]
    values = np.concatenate([np.asarray(v, float) for v in shown])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if chart.log:
        return low / 1.1, high * 1.1
    if chart.floor is not None:
        low = chart.floor
    room = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    return (low if chart.floor is not None else low - room), high + room


def _drawable(s: Series, log: bool) -> Series:
    """With NaN for None, and on a logarithmic axis for what is not above 0."""

    def clean(values):
        numbers = [math.nan if x is None else float(x) for x in values]
        return [math.nan if log and not x > 0 else x for x in numbers]

    low, high = (edge if edge is None else clean(edge) for edge in (s.low, s.high))
    return dataclasses.replace(s, values=clean(s.values), low=low, high=high)


def _path(points: Sequence[tuple[float, float]]) -> str:
    d, pen = [], "M"
    for x, y in points:
        if not math.isfinite(y):
            pen = "M"
            continue
        d.append(f"{pen}{x:g} {y:g}")
        pen = "L"
    return "".join(d)


def _apart(ends: list[dict]) -> list[dict]:
    """Labels pushed apart, in the order of their lines."""
    ends = sorted(ends, key=lambda e: e["y"])
    for before, end in itertools.pairwise(ends):
        end["y"] = max(end["y"], before["y"] + LABEL)
    limit = BOTTOM
    for end in reversed(ends):
        end["y"] = limit = min(end["y"], limit)
        limit -= LABEL
    return ends
