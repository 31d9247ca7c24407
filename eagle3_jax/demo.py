"""`make demo`: the whole path on the built-in target, and a summary at its end."""

import json
import time
from contextlib import contextmanager
from pathlib import Path

from eagle3_jax import commands
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.errors import CheckpointError, ConfigError
from eagle3_jax.train import checkpoint
from eagle3_jax.train.loop import train

CONFIG = "configs/demo.yaml"
FULL_MINUTES = 40  # what CONFIG takes on two cores after downloads
EVALUATION_MINUTES = 9  # of it that do not grow with tokens and steps
POINTS = 5  # checkpoints on the curve
PROMPTS_WHEN_SHORT, EVALUATION_MINUTES_WHEN_SHORT = 20, 4


def configure(path: str | Path, minutes: float | None = None) -> RunConfig:
    """The configuration; with `minutes`, its tokens and steps in proportion. Raises ConfigError."""
    config = configuration.load(path)
    if minutes is None or minutes == FULL_MINUTES:
        return config
    if not 1 <= minutes <= 600:
        raise ConfigError(f"DEMO_MINUTES={minutes:g} must be within 1 .. 600")
    short = minutes < FULL_MINUTES / 2
    fixed = EVALUATION_MINUTES_WHEN_SHORT if short else EVALUATION_MINUTES
    share = max(minutes - fixed, 0.5) / (FULL_MINUTES - EVALUATION_MINUTES)
    steps = max(round(config.train.steps * share), POINTS)
    items = [
        f"data.max_tokens={max(round(config.data.max_tokens * share), 6000)}",
        f"data.prepared={config.data.prepared}-{minutes:g}min",
        f"store.path={config.store.path}-{minutes:g}min",
        f"train.steps={steps}",
        f"train.warmup={min(config.train.warmup, steps // 10)}",
        f"train.save_every={-(-steps // POINTS)}",
    ]
    if short:
        items.append(f"evaluate.max_prompts={PROMPTS_WHEN_SHORT}")
    return configuration.override(config, items)


def run(config: RunConfig) -> Path:
    """Prepare, capture, train, evaluate; what is done is not done again. Returns the run directory."""
    directory = Path(config.train.run)
    _set_aside(directory, config)
    with _stage("prepare"):
        print(commands.describe(commands.prepare_data(config)))
    with _stage("capture"):
        commands.capture(config)
    with _stage("train"):
        train(config)
    with _stage("evaluate"):
        wanted = {"evaluate_untrained.json": 0, commands.RESULT: config.train.steps}
        if missing := [name for name in wanted if not (directory / name).exists()]:
            evaluate = commands.evaluator(directory)
            for name in missing:
                evaluate(wanted[name], name)
        if not (directory / "curve.json").exists():
            commands.save_json(directory / "curve.json", commands.curve(directory))
    return directory


def summary(directory: Path) -> str:
    """What the demo reached: the curve, the untrained draft and the trained one."""
    before, after, curve = (
        json.loads((directory / name).read_text())
        for name in ("evaluate_untrained.json", "evaluate.json", "curve.json")
    )
    most = max(point["accept_length"] for point in curve)
    steps = after["settings"]["steps"]
    lines = [
        "",
        f"accept length over minutes of training (chain {steps}-1-{steps + 1}, teacher-forced on the target's "
        "greedy answers):",
    ]
    for point in curve:
        bar = "#" * round(40 * (point["accept_length"] - 1) / max(most - 1, 1e-9))
        lines.append(
            f"  {point['minutes']:5.1f} min  step {point['step']:5d}  {point['accept_length']:.3f}  {bar}"
        )
    return "\n".join(
        [
            *lines,
            "",
            f"untrained draft, same prompts and code: accept length {before['accept_length']:.3f}",
            commands.describe_evaluation(after),
            f"run: {directory} (what was frozen, what moved: eagle3 inspect {directory})",
        ]
    )


def _set_aside(directory: Path, config: RunConfig) -> None:
    """A demo of another length in the way is renamed: nothing is lost."""
    try:
        checkpoint.holds(directory, configuration.to_dict(config))
    except CheckpointError as error:
        if not (directory / "start").is_dir():
            raise
        places = (directory.with_name(f"{directory.name}.{n}") for n in range(1, 1000))
        aside = next(place for place in places if not place.exists())
        directory.rename(aside)
        print(f"demo: {error}\ndemo: moved it to {aside}")


@contextmanager
def _stage(name: str):
    start = time.monotonic()
    print(f"== {name}", flush=True)
    yield
    print(f"== {name} took {(time.monotonic() - start) / 60:.1f} min", flush=True)
