"""`bridge`: from a training run to a draft directory that SGLang loads, and the proof that it is the same draft."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from eagle3_jax.cli import AtStep
from eagle3_jax.cli import run as run_app
from eagle3_jax.errors import ConfigError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip

RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="run directory that `eagle3 train` wrote")]
Directory = Annotated[Path, typer.Argument(metavar="DIR", help="draft directory")]

COLOUR = {"error": "red", "warning": "yellow", "note": "cyan"}


@app.command()
def convert(
    run: RunPath,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="draft directory to write")],
    step: AtStep = None,
    force: Annotated[bool, typer.Option("--force", help="replace OUT whatever it holds")] = False,
) -> None:
    """Export a run's draft for SGLang and print the line that serves it."""
    from bridge import convert as module

    report = module.convert(run, out, step, force)
    predicted = report["accept_length"]
    table = Table(show_header=False, box=None)
    table.add_row("draft directory", escape(report["directory"]))
    table.add_row("checkpoint", f"step {report['step']} of {escape(report['run'])}")
    table.add_row("tensors", f"{report['tensors']} in {report['dtype']}, {report['bytes'] / 1e6:,.1f} MB")
    table.add_row("predicted accept length", "not evaluated" if predicted is None else f"{predicted:.3f}")
    console = Console()
    console.print(table)
    console.print("\nServe it with SGLang:")
    print(report["launch"])  # plain, so that it can be copied whatever the terminal's width


@app.command("import")
def import_(
    directory: Directory,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="run directory to write")],
    target: Annotated[
        str | None, typer.Option(help="the model that it was trained for; an export of ours names it")
    ] = None,
) -> None:
    """A draft directory becomes a run: evaluate it, or train on from it with train.init=RUN."""
    from bridge import imports as module

    done = module.import_draft(directory, run, target)
    print(
        f"{done['run']}: {done['tensors']} tensors in {done['dtype']} of {done['directory']}, for {done['target']}"
    )
    print(f"next: eagle3 evaluate {run}, or train with train.init={run}")


@app.command()
def check(
    directory: Directory,
    target: Annotated[
        str | None, typer.Option(help="Hugging Face directory of the target: compare with it")
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="NAME or NAME:VERSION, as sglang:0.5.11, vllm, sglang-jax; SGLang 0.5.23"),
    ] = None,
    launch: Annotated[str | None, typer.Option(help="the command that serves it, to be checked, too")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the findings as JSON")] = False,
) -> None:
    """Will an engine load every tensor and read the config as meant? Exit code 1 where it will not."""
    from bridge import check as module

    findings = module.check(directory, target, engine, launch)
    if as_json:
        print(json.dumps([dataclasses.asdict(f) for f in findings], indent=2))
    elif findings:
        table = Table(
            *(Column(name, overflow="fold") for name in ("", "where", "found", "wanted", "why, what to do"))
        )
        for f in findings:
            mark = f"[{COLOUR[f.severity]}]{f.severity}[/]"
            table.add_row(mark, *(escape(text) for text in (f.where, f.found, f.wanted, f.fix)))
        Console().print(table)
    errors = sum(f.severity == "error" for f in findings)
    if not as_json:
        verdict = _verdict(errors, len(findings))
        print(f"{directory}: {verdict}")
    raise typer.Exit(1 if errors else 0)


def _verdict(errors: int, findings: int) -> str:
    if errors:
        return f"{errors} error{'s' * (errors > 1)}"
    return "every tensor loads, the config is consistent" + (" but for the above" if findings else "")


@app.command()
def parity(
    run: RunPath,
    directory: Directory,
    step: AtStep = None,
    seed: Annotated[int, typer.Option(help="of the random tokens and states")] = 0,
) -> None:
    """Does DIR compute what RUN's checkpoint computes? Exit code 1, and the first stage that differs, where not."""
    from bridge import parity as module

    report = module.parity(run, directory, step, seed)
    table = Table("stage", "max |difference|")
    for stage, size in report.largest.items():
        table.add_row(stage, f"{size:.1e}")
    Console().print(table)
    rows = " + ".join(str(n) for n in report.prompts)
    print(
        f"compared: step {report.step}, {rows} prompt rows and {report.steps} drafting steps each, "
        f"weights in {report.dtype}, computed in float32, logits within {module.TOLERANCE:.0e}, same proposals"
    )
    if report.ok:
        print(f"{directory} computes what {run} computes")
        return
    at = report.first
    print(f"first difference: {at.stage} of the {at.row} (prompt of {at.prompt} rows): {at.size:.1e}")
    raise typer.Exit(1)


@app.command()
def serve(
    directory: Directory,
    target: Annotated[
        str, typer.Option(help="Hugging Face directory, GGUF file or built-in name of the target")
    ],
    device: Annotated[str, typer.Option(help="cpu (SGLang from `make engines`) or cuda")] = "cpu",
    steps: Annotated[int, typer.Option(help="levels of drafts")] = 3,
    topk: Annotated[int, typer.Option(help="1 drafts a chain, more a tree")] = 1,
    tokens: Annotated[int | None, typer.Option(help="verified together; a tree's size")] = None,
    prompts: Annotated[str | None, typer.Option(help="JSONL as for evaluate.prompts; MT-bench")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="only the first ones")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="per answer")] = 96,
    dtype: Annotated[str | None, typer.Option(help="float32 on a CPU, else the draft's")] = None,
    context_length: Annotated[int | None, typer.Option(help="positions a request may take")] = None,
    port: Annotated[int | None, typer.Option(help="a free one unless given")] = None,
    python: Annotated[str | None, typer.Option(help="the interpreter that has SGLang")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for the server to come up")] = 600,
    only_print: Annotated[bool, typer.Option("--print", help="print the launch line alone")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="exit 1 where served leaves the interval")] = False,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Serve DIR with the real SGLang, send it prompts, and print what it accepts beside what was predicted."""
    from bridge import serve as module
    from eagle3_jax import defaults
    from eagle3_jax.decode.drafting import drafting

    if device not in module.TOGETHER:
        raise ConfigError(f"--device {device}: cpu or cuda")
    where = defaults.resolve_target(target)
    server = module.plan(
        directory, where, device, drafting(steps, topk, tokens), dtype=dtype, context_length=context_length,
        port=port, python=python,
    )  # fmt: skip
    if only_print:
        print(server.line())
        return
    before = module.predicted(directory, server.drafting)
    if strict and before is None:
        raise ConfigError(
            f"{directory}: nothing was predicted for {server.drafting.name}; evaluate with it, convert again"
        )
    ids, ends = module.prompts(where, prompts, max_prompts, server.context_length - max_new_tokens)
    with module.running(server, timeout) as url:
        found = module.measure(url, ids, max_new_tokens, ends, module.TOGETHER[device])
    if as_json:
        print(json.dumps({"predicted": before, "served": found}, indent=2))
    else:
        print(module.describe(server, before, found, len(ids)))
    if strict and not before["interval"][0] <= found["accept_length"] <= before["interval"][1]:
        print("served accept length is outside the predicted interval")
        raise typer.Exit(1)


@app.command()
def verify(
    run: RunPath,
    dtype: Annotated[str | None, typer.Option(help="SGLang's; the evaluation's unless given")] = None,
    max_prompts: Annotated[int | None, typer.Option(help="only the first ones")] = None,
    timeout: Annotated[float, typer.Option(help="seconds for the server to come up")] = 600,
) -> None:
    """Serve RUN's last evaluation with the real SGLang on the CPU: is every proposal and accept count the same?"""
    from bridge import verify as module

    report = module.verify(run, dtype=dtype, max_prompts=max_prompts, timeout=timeout)
    print(report)
    if report.dtype == report.ours["settings"]["dtype"] == "float32":
        raise typer.Exit(0 if report.ok else 1)
    print(f"equality is only claimed in float32: eagle3 evaluate {run} target.dtype=float32 --verify")


def main(arguments: list[str] | None = None) -> None:
    run_app(app, "bridge", arguments)


if __name__ == "__main__":
    main()
