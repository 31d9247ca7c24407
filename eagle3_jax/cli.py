"""`eagle3`: regenerate | prepare | capture | train | evaluate | inspect | report | demo."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from eagle3_jax import config as configuration
from eagle3_jax.errors import ConfigError, Stopped, UserError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Train EAGLE-3 drafts in JAX. Commands take a configuration file and section.key=value overrides.",
)  # fmt: skip

Config = Annotated[Path, typer.Argument(help="YAML file, e.g. configs/demo.yaml")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="section.key=value", help="override settings")]
Run = Annotated[Path, typer.Argument(help="run directory")]


def step_of(text: str) -> int | str:
    """A step's number, or "best"."""
    if text == "best" or text.isdigit():
        return text if text == "best" else int(text)
    raise typer.BadParameter(f"{text!r}: a number, or best")


AtStep = Annotated[
    str | None,
    typer.Option(
        "--step", parser=step_of, metavar="N|best", help="checkpoint; newest unless told, 0: untrained"
    ),
]


def _load(config: Path, overrides: list[str] | None):
    return configuration.load(config, overrides or ())


@app.command()
def regenerate(config: Config, overrides: Overrides = None):
    """The target's own answers to the data's questions, as data to train on; goes on where it was stopped."""
    from eagle3_jax import commands

    print(commands.describe_regeneration(commands.regenerate(_load(config, overrides))))


@app.command()
def prepare(
    config: Config, overrides: Overrides = None,
    preview: Annotated[int, typer.Option(help="print this many conversations, supervised tokens coloured")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="refuse a damaged file")] = False,
):  # fmt: skip
    """Conversations to tokens: chat template, loss mask, held-out split."""
    from eagle3_jax import commands

    loaded = _load(config, [*(overrides or ()), *(["data.strict=true"] if strict else [])])
    card = commands.prepare_data(loaded)
    console = Console()
    console.print(commands.describe(card), highlight=False, soft_wrap=True)
    for text in commands.previews(loaded, preview):
        console.rule()
        console.print(text)


@app.command()
def capture(config: Config, overrides: Overrides = None):
    """Run the target over the prepared data once and store its features."""
    from eagle3_jax import commands

    loaded = _load(config, overrides)
    card = commands.capture(loaded).card
    print(
        f"captured {card['conversations']:,} conversations, {card['tokens']:,} tokens in {loaded.store.path}"
    )


@app.command()
def train(config: Config, overrides: Overrides = None):
    """Train the draft; goes on where the run directory stands."""
    from eagle3_jax.train.loop import train as run

    print(f"trained: {run(_load(config, overrides))}")


@app.command()
def evaluate(
    run: Run, overrides: Overrides = None,
    step: AtStep = None,
    steps: Annotated[int | None, typer.Option(help="evaluate.steps: levels of drafts")] = None,
    topk: Annotated[int | None, typer.Option(help="evaluate.topk: 1 drafts a chain, more a tree")] = None,
    tokens: Annotated[int | None, typer.Option(help="evaluate.tokens: verified together; a tree's size")] = None,
    temperature: Annotated[float | None, typer.Option(help="evaluate.temperature: 0 is greedy")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="then `bridge verify RUN`: SGLang beside it")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
):  # fmt: skip
    """Accept length, by speculative decoding as the server does it."""
    from eagle3_jax import commands

    saved = step in (None, "best")  # what is served
    if verify and not saved:
        raise ConfigError(
            f"--verify compares what is saved in the run, which --step {step} is not: leave one out"
        )
    if verify and temperature:
        raise ConfigError("--verify compares greedy answers: leave --temperature out")
    told = [
        f"evaluate.{k}={v}"
        for k, v in dict(steps=steps, topk=topk, tokens=tokens, temperature=temperature).items()
        if v is not None
    ]
    if topk == 1 and tokens is None:
        told.append("evaluate.tokens=null")  # a tree's, if the run's configuration has one
    result = commands.evaluate(
        run, (*(overrides or ()), *told), step, save_as=commands.RESULT if saved else None
    )
    print(json.dumps(result, indent=2) if as_json else commands.describe_evaluation(result), flush=True)
    if verify:  # a process: this package knows nothing of the bridge
        raise typer.Exit(subprocess.call([sys.executable, "-m", "bridge.cli", "verify", str(run)]))


@app.command()
def inspect(
    run: Run,
    step: AtStep = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
):
    """What was frozen, what moved, from what: exit code 1 if anything is not as it should be."""
    from eagle3_jax.train.inspect import inspect as look

    report = look(run, step)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        report.render(Console())
    raise typer.Exit(report.code)


@app.command()
def report(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="the file; RUN/report.html unless told")] = None,
):
    """All of a run on one page: curves, evaluation, manifest, configuration and data in one HTML file."""
    from eagle3_jax import commands

    path = commands.report(run, out)
    print(f"{path}: {path.stat().st_size / 1024:,.0f} kB")


@app.command()
def demo(
    config: Config = Path("configs/demo.yaml"),
    export: Annotated[Path, typer.Option(help="where `bridge convert` puts the draft")] = Path(
        "runs/demo-export"
    ),
    summary: Annotated[bool, typer.Option("--summary", help="only print what the last demo reached")] = False,
    minutes: Annotated[
        float | None, typer.Option(envvar="DEMO_MINUTES", help="make it shorter or longer")
    ] = None,
):
    """Train a draft for the built-in target from scratch and evaluate it (`make demo` also exports it)."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what it is tuned and timed for
    from eagle3_jax import demo

    print(demo.summary(demo.run(demo.configure(config, minutes))))


def run(app: typer.Typer, prog: str, arguments: list[str] | None = None) -> None:
    """Run a command; what a person can fix is one line on standard error and exit code 2, a stop has its own."""
    try:
        app(args=arguments, prog_name=prog)
    except UserError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Stopped as why:
        print(f"{prog}: {why}", file=sys.stderr)
        raise SystemExit(Stopped.CODE) from None
    except OSError as error:
        if error.filename is None:
            raise
        print(f"{prog}: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


def main() -> None:
    run(app, "eagle3")
