"""The two-core recipe from conversations to accept lengths, and docs/results.md with all that benchmarks/ measured.

python benchmarks/results.py           # run what is missing, then write the page
python benchmarks/results.py --page    # only write the page, of benchmarks/recipe.json and benchmarks/ablate.json
"""

import argparse
import json
import time
from pathlib import Path

import ablate

from eagle3_jax import commands
from eagle3_jax import config as configuration
from eagle3_jax.train import checkpoint, manifest, metrics
from eagle3_jax.train.loop import train

OUT, PAGE = Path(__file__).with_name("recipe.json"), Path("docs/results.md")
PROMPTS = {"MT-bench": "mt-bench", "HumanEval": "human-eval"}
PLANS = ((3, 1, "null"), (7, 1, "null"), (4, 3, 10))  # SGLang's steps, topk, tokens


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--page", action="store_true", help="only write docs/results.md")
    if not args.parse_args().page:
        recipe()
    PAGE.write_text(page())
    print(f"written: {PAGE}")


def recipe() -> None:
    """Prepare, capture and train, each timed once; then every set of prompts with every plan."""
    config = configuration.load(ablate.CONFIG)
    found = json.loads(OUT.read_text()) if OUT.exists() else {"minutes": {}, "evaluations": []}
    if found["minutes"] and found["config"] != configuration.to_dict(config):
        raise SystemExit(f"{OUT}: of another {ablate.CONFIG}; move it and {config.train.run} aside")
    found["config"] = configuration.to_dict(config)
    for name, stage in (
        ("prepare", commands.prepare_data), ("capture", commands.capture), ("train", train),
    ):  # fmt: skip
        if name not in found["minutes"]:
            began = time.monotonic()
            stage(config)
            found["minutes"][name] = (time.monotonic() - began) / 60
            commands.save_json(OUT, found)
    run = config.train.run
    card = json.loads((Path(config.data.prepared) / "data.json").read_text())
    lines = metrics.read(run)
    found |= {
        "machine": manifest.machine(), "conversations": card["conversations"], "epochs": lines[-1]["epoch"],
        "supervised": checkpoint.read_meta(run)["manifest"]["facts"]["supervised_tokens"],
    }  # fmt: skip
    for (label, prompts), (steps, topk, tokens) in (
        (p, plan) for plan in PLANS for p in PROMPTS.items()
    ):  # fmt: skip
        if any((e["prompts"], *e["plan"]) == (label, steps, topk, tokens) for e in found["evaluations"]):
            continue
        told = dict(prompts=prompts, steps=steps, topk=topk, tokens=tokens)
        first = not found["evaluations"]  # the one that the curve walks over, and that is exported
        result = commands.evaluate(
            run, [f"evaluate.{k}={v}" for k, v in told.items()], save_as=commands.RESULT if first else None
        )
        if first:
            found["curve"] = commands.curve(run)
        found["evaluations"].append({"prompts": label, "plan": [steps, topk, tokens], "result": result})
        commands.save_json(OUT, found)


def page() -> str:
    """docs/results.md."""
    parts = [
        "# Results",
        "Written by `benchmarks/results.py` from `benchmarks/recipe.json` and `benchmarks/ablate.json`.",
    ]
    if OUT.exists():
        parts += _recipe(json.loads(OUT.read_text()))
    results = ablate.Results(ablate.OUT)
    if results.runs:
        parts += [ablate.tables(results)]
    return "\n\n".join(parts) + "\n"


def _recipe(found: dict) -> list[str]:
    minutes, t = found["minutes"], found["config"]["train"]
    rows = ["| prompts | drafting | accept length | 95 % | by position | looping |", "| --- " * 6 + "|"]
    for e in found["evaluations"]:
        r, (low, high) = e["result"], e["result"]["interval"]
        s = r["settings"]
        positions = " ".join(f"{p:.2f}" for p in r["acceptance_by_position"])
        kind = "chain" if s["topk"] == 1 else "tree"
        rows.append(
            f"| {e['prompts']}, {s['prompts']} | {kind} {s[kind]} | {r['accept_length']:.3f} | {low:.3f} .. {high:.3f} "
            f"| {positions} | {r['looping']:.0%} |"
        )
    curve = ["| step | minutes of training | accept length |", "| --- " * 3 + "|"]
    curve += [f"| {p['step']} | {p['minutes']:.1f} | {p['accept_length']:.3f} |" for p in found["curve"]]
    settings = found["evaluations"][0]["result"]["settings"]
    return [
        "## One run on two cores",
        f"`{ablate.CONFIG}` on {found['machine']}: {minutes['prepare']:.0f} minutes to prepare, "
        f"{minutes['capture']:.0f} for the target to write and capture {found['conversations']:,} answers "
        f"({found['supervised']:,} supervised tokens), {minutes['train']:.0f} for {t['steps']:,} steps of "
        f"{t['batch'] * t['row_length']:,} tokens ({found['epochs']:.1f} epochs). Greedy, {settings['max_new_tokens']} "
        f"new tokens at most, {settings['dtype']}; accept length as in [accept_length.md](accept_length.md).",
        "\n".join(rows),
        "Over the run, on the same MT-bench answers, chain 3-1-4:",
        "\n".join(curve),
    ]


if __name__ == "__main__":
    main()
