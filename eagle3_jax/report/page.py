"""The page: one HTML file with everything in it, that asks for nothing from anywhere."""

import datetime
import json
import math
from pathlib import Path

import jinja2
import numpy as np
import yaml
from markupsafe import Markup

from eagle3_jax.report import chart, curves
from eagle3_jax.report.collect import Found, collect

HERE = Path(__file__).parent
NOTHING = "–"


def render(run: str | Path) -> str:
    """The report of a run as HTML. Raises CheckpointError where there is no run."""
    found = collect(run)
    minutes = curves.minutes(found.lines)
    drawn = [chart.draw(c, minutes) for c in curves.charts(found)]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,
    )  # fmt: skip
    environment.filters |= dict(number=number, percent=percent, script=_script, yaml=_yaml)
    environment.globals |= dict(read=lambda name: Markup((HERE / name).read_text(encoding="utf-8")))
    text = environment.get_template("page.html").render(
        found=found, charts=drawn, plot=chart, head=_head(found, minutes), result=found.result or {},
        before=found.untrained or {}, leaves=_leaves(found), points=_points(found, drawn),
        made=datetime.datetime.now(),
    )  # fmt: skip
    return text.encode("utf-8", "replace").decode()  # a lone surrogate, of a prompt say, has no UTF-8


def _head(found: Found, minutes) -> dict:
    last = found.lines[-1] if found.lines else {}
    steps = found.config.get("train", {}).get("steps")
    at = max(last.get("step", 0), found.meta["step"])
    _, rates = curves.throughput(found.lines, curves.step_tokens(found.config))
    best = max(
        (e for e in found.evaluations if e.get("accept_length")), key=lambda e: e["accept_length"], default={}
    )
    when = [found.run / "start", found.run / "metrics.jsonl"]
    return dict(
        step=at, steps=steps, saved=found.meta["step"], last=last, minutes=minutes(at), best=best,
        rate=curves.typical(rates), target=found.meta["target"]["path"],
        when=[datetime.datetime.fromtimestamp(p.stat().st_mtime) for p in when if p.exists()],
    )  # fmt: skip


def _points(found: Found, drawn: list[dict]) -> dict:
    """What the script shows under the pointer."""
    time = [(0, 0.0), *((x["step"], round(x["seconds"] / 60, 2)) for x in found.lines)]
    some = np.unique(np.linspace(0, len(time) - 1, chart.MOST).astype(int))
    steps, minutes = zip(*(time[i] for i in some), strict=True)
    plot = dict(left=chart.LEFT, right=chart.RIGHT, top=chart.TOP, bottom=chart.BOTTOM, width=chart.WIDTH)
    charts = [dict(most=c.get("most"), lines=c["hover"]) for c in drawn]
    return dict(plot=plot, time=dict(steps=steps, minutes=minutes), charts=charts)


def _leaves(found: Found) -> list[dict]:
    """The manifest's leaves, each with what inspecting it gave."""
    seen = found.inspection.leaves if found.inspection else {}
    return [
        leaf | dict(path=path, seen=seen.get(path)) for path, leaf in found.meta["manifest"]["leaves"].items()
    ]


def number(value, form: str = ".3f") -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NOTHING
    return format(value, form) if math.isfinite(value) else str(value)


def percent(value, digits: int = 1) -> str:
    return number(value, f".{digits}%")


def _script(value) -> Markup:
    """JSON for a script element: nothing in it can end that element."""
    return Markup(json.dumps(value, separators=(",", ":")).replace("<", "\\u003c"))


def _yaml(value) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
