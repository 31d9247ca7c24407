"""What a setting is worth: drafts trained alike but for that setting, at a tenth of the tokens of a configuration.

    python benchmarks/ablate.py            # what is missing in benchmarks/ablate.json, run after run
    python benchmarks/ablate.py --table    # the runs of that file as Markdown

Every draft is measured on the same texts, the target's greedy answers to MT-bench's first turns, with a chain of three
drafts and one of seven. A run that was cut off goes on where it was; one whose settings have changed is run again. The
baseline has three seeds, and their spread says how large a gain has to be before it means anything.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

from eagle3_jax import axes, commands, defaults
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat
from eagle3_jax.data.features import open_store
from eagle3_jax.decode import evaluate
from eagle3_jax.decode.walk import Text, Texts, walk, written
from eagle3_jax.decode.writer import Writer
from eagle3_jax.errors import DataError
from eagle3_jax.progress import bar
from eagle3_jax.train import checkpoint, metrics, setup
from eagle3_jax.train.loop import train

CONFIG = "configs/smollm2_135m.yaml"
SHARE = 10  # a run has this part of the configuration's tokens
OUT = Path(__file__).with_suffix(".json")
CHAINS = (3, 7)
BASE = {
    "draft.vocab_size": 4096, "draft.head_init": "random", "draft.fc_norm": False, "draft.norm_output": False,
    "train.unroll": 3, "train.mask": "serve", "train.loss": "ce", "train.seed": 0, "train.learning_rate": 1e-3,
}  # fmt: skip
SPECFORGE = {  # as in tests/engines/test_specforge_train.py, where SpecForge itself takes the same steps
    "train.mask": "eagle", "train.normalise": "tokens", "train.oov_rows": "drop", "train.beta2": 0.999,
    "train.weight_decay": 0.0, "train.final_learning_rate": 0.0, "train.clip": 0.5, "train.decay": 0.8,
    "draft.head_init": "random", "draft.fc_norm": False, "draft.norm_output": False,
}  # fmt: skip
RATES = (3e-4, 1e-3, 3e-3)

SETTINGS = {
    **{f"baseline, seed {seed}": {"train.seed": seed} for seed in range(3)},
    "mask eagle": {"train.mask": "eagle"},
    **{f"unroll {k}": {"train.unroll": k} for k in (1, 5, 7)},
    **{f"draft vocabulary {v}": {"draft.vocab_size": v} for v in (2048, 8192, 16384)},
    "head from the target": {"draft.head_init": "target"},
    "fc_norm": {"draft.fc_norm": True},
    "fc_norm, norm_output (EAGLE 3.1)": {"draft.fc_norm": True, "draft.norm_output": True},
    "loss lk_alpha": {"train.loss": "lk_alpha"},
    "loss lk_lambda": {"train.loss": "lk_lambda"},
    "answers of the data set": {"data.answers": "data"},
}


def configured(work: Path, name: str, changes: dict) -> RunConfig:
    """The configuration of a run: the same data for all of one kind of answers."""
    whole = configuration.load(CONFIG)
    settings = BASE | changes
    answers = settings.get("data.answers", whole.data.answers)
    steps = whole.train.steps // SHARE
    settings |= {
        "data.max_tokens": 160_000, "data.prepared": str(work / f"prepared-{answers}"),
        "store.path": str(work / f"features-{answers}"), "train.run": str(work / slug(name)),
        "train.steps": steps, "train.warmup": whole.train.warmup // SHARE, "train.save_every": steps,
    }  # fmt: skip
    return configuration.override(whole, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


class Measure:
    """Accept lengths on the target's own answers, which are written once."""

    def __init__(self, config: RunConfig, file: Path):
        mesh = axes.data_mesh(config.mesh.data)
        files = setup.find_target(config)
        target, params = setup.load_target(config, files, mesh)
        if not file.exists():
            commands.save_json(file, _answers(config, files, target, params, mesh))
        texts = [Text(*fields) for fields in json.loads(file.read_text())]
        self._texts = Texts(target, params, texts, config.evaluate.batch, mesh)

    def __call__(self, run: Path) -> dict:
        draft = commands.serving_draft(checkpoint.load_draft(run))
        return {f"{steps}-1-{steps + 1}": self._chain(draft, steps) for steps in CHAINS}

    def _chain(self, draft, steps: int) -> dict:
        accepted = walk(self._texts, draft, steps)
        counts = evaluate.counts(accepted, steps)
        kept = {k: counts[k] for k in ("accept_length", "interval", "acceptance_by_position")}
        return kept | {"pairs": evaluate.pairs(accepted).tolist()}


def _answers(config: RunConfig, files, target, params: dict, mesh) -> list[Text]:
    tok, e = setup.tokenizer(files), config.evaluate
    prompts = [
        chat.prompt(tok, (("user", p["prompt"]),)).tolist() for p in defaults.evaluation_prompts(e.prompts)
    ]
    with bar("answers", len(prompts) * (e.max_new_tokens + max(CHAINS) + 1), "tokens") as progress:
        return written(
            Writer(target, mesh, features=False), params, prompts, limit=e.max_new_tokens,
            beyond=max(CHAINS) + 1, end_tokens=chat.end_tokens(tok), batch=e.batch, advance=progress.advance,
        )  # fmt: skip


class Results:
    """The JSON file: of every run its changes and what it reached, by name."""

    def __init__(self, file: Path):
        self.file = file
        self.runs = json.loads(file.read_text())["runs"] if file.exists() else {}

    def has(self, name: str, config: dict) -> bool:
        return name in self.runs and self.runs[name]["config"] == config

    def add(self, name: str, found: dict) -> None:
        self.runs[name] = found
        commands.save_json(self.file, {"share": SHARE, "runs": self.runs})


def features(config: RunConfig) -> None:
    """Prepare and capture, where that is still to do."""
    if not (Path(config.data.prepared) / "data.json").exists():
        print(commands.describe(commands.prepare_data(config)))
    try:
        open_store(config.store.path)
    except DataError:
        commands.capture(config)


def taken(config: RunConfig) -> dict:
    """What the training took, of its own log."""
    lines = metrics.read(config.train.run)
    slots = config.train.batch * config.train.row_length
    supervised = sum(line["supervised"][0] for line in lines) / len(lines)
    return {
        "steps": config.train.steps, "tokens": config.train.steps * slots, "supervised_share": supervised / slots,
        "epochs": lines[-1]["epoch"], "train_minutes": lines[-1]["seconds"] / 60,
        "loss": lines[-1]["loss"], "accuracy": lines[-1]["accuracy"],
    }  # fmt: skip


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--out", type=Path, default=OUT, help="the JSON file of results")
    args.add_argument("--work", type=Path, default=Path("runs/ablate"), help="data, features and runs")
    args.add_argument("--only", nargs="*", help="names that start so", default=[""])
    args.add_argument("--table", action="store_true", help="only print the results")
    asked = args.parse_args()
    results = Results(asked.out)
    if asked.table:
        return print(table(results.runs))
    chosen = {name: c for name, c in SETTINGS.items() if name.startswith(tuple(asked.only))}
    axes.virtual_cpus(os.cpu_count() or 1)
    measure = None
    for number, (name, changes) in enumerate(chosen.items(), 1):
        config = configured(asked.work, name, changes)
        plain = configuration.to_dict(config)
        if results.has(name, plain):
            continue
        print(f"== {name} ({number} of {len(chosen)})", flush=True)
        began = time.monotonic()
        features(config)
        measure = measure or Measure(config, asked.work / "texts.json")
        run = train(config)
        results.add(name, {"config": plain, **taken(config), "measured": measure(run)})
        reached = ", ".join(
            f"{k} {x['accept_length']:.3f}" for k, x in results.runs[name]["measured"].items()
        )
        print(f"== {name}: {reached}; {(time.monotonic() - began) / 60:.1f} min", flush=True)
    print(table(results.runs))


def table(runs: dict) -> str:
    """Accept lengths beside the baseline's mean; a gain means something where it exceeds twice the seeds' spread."""
    chain = f"{CHAINS[0]}-1-{CHAINS[0] + 1}"
    value = {name: run["measured"][chain]["accept_length"] for name, run in runs.items()}
    seeds = [value[name] for name in value if name.startswith("baseline")]
    mean, spread = statistics.mean(seeds), statistics.stdev(seeds) if len(seeds) > 1 else math.nan
    lines = [
        f"baseline: {mean:.4f} at {chain}, standard deviation {spread:.4f} over {len(seeds)} seeds",
        "",
        "| setting | "
        + " | ".join(f"{k}-1-{k + 1}" for k in CHAINS)
        + f" | gain at {chain} | in spreads | minutes |",
        "| --- " * (len(CHAINS) + 4) + "|",
    ]
    for name, run in runs.items():
        lengths = " | ".join(f"{run['measured'][f'{k}-1-{k + 1}']['accept_length']:.3f}" for k in CHAINS)
        gain = value[name] - mean
        lines.append(
            f"| {name} | {lengths} | {gain:+.4f} | {gain / spread:+.1f} | {run['train_minutes']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
