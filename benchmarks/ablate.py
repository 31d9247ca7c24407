"""What a setting is worth: drafts trained alike but for that setting, at a tenth of the tokens of a configuration.

    python benchmarks/ablate.py settings   # each setting beside the plain baseline
    python benchmarks/ablate.py recipes    # the configuration as it is beside SpecForge's recipe
    python benchmarks/ablate.py table      # what there is in benchmarks/ablate.json, as Markdown

Every draft is measured on the same texts, the target's greedy answers to MT-bench's first turns, with a chain of three
drafts and one of seven. A run that was cut off goes on where it was; one whose settings have changed is run again. The
baseline has three seeds, and their spread says how large a gain has to be before it means anything. Of the recipes each
has the best of the same three learning rates, and then three seeds.
"""

import argparse
import json
import math
import os
import statistics
import time
from pathlib import Path

import numpy as np

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
CHAINS = (3, 7)  # drafts a round
BASE = {
    "draft.vocab_size": 4096, "draft.head_init": "random", "draft.fc_norm": False, "draft.norm_output": False,
    "train.unroll": 3, "train.mask": "serve", "train.loss": "ce", "train.seed": 0, "train.learning_rate": 1e-3,
}  # fmt: skip
SPECFORGE = {  # as in tests/engines/test_specforge_train.py, where SpecForge itself takes the same steps
    "train.mask": "eagle", "train.normalise": "tokens", "train.oov_rows": "drop", "train.beta2": 0.999,
    "train.weight_decay": 0.0, "train.final_learning_rate": 0.0, "train.clip": 0.5, "train.decay": 0.8,
    "draft.head_init": "random", "draft.fc_norm": False, "draft.norm_output": False,
}  # fmt: skip
RECIPES = {"ours": {}, "SpecForge's": SPECFORGE}
RATES = (3e-4, 1e-3, 3e-3)
SEEDS = range(3)

SETTINGS = {
    **{f"baseline, seed {seed}": {"train.seed": seed} for seed in SEEDS},
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
    whole, settings = configuration.load(CONFIG), dict(changes)
    answers = settings.get("data.answers", whole.data.answers)
    steps = whole.train.steps // SHARE
    settings |= {
        "data.max_tokens": 160_000, "data.prepared": str(work / f"prepared-{answers}"),
        "store.path": str(work / f"features-{answers}"), "train.run": str(work / slug(name)),
        "train.steps": steps, "train.warmup": whole.train.warmup // SHARE, "train.save_every": steps,
    }  # fmt: skip
    return configuration.override(whole, [f"{key}={json.dumps(value)}" for key, value in settings.items()])


def chain_name(steps: int) -> str:
    return f"{steps}-1-{steps + 1}"


CHAIN = chain_name(CHAINS[0])  # the one that settings are compared by


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
        return {chain_name(steps): self._chain(draft, steps) for steps in CHAINS}

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

    def value(self, name: str) -> float:
        return self.runs[name]["measured"][CHAIN]["accept_length"]

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


def settings(results: Results):
    """(name, changes) of every run of the first part."""
    for name, changes in SETTINGS.items():
        yield name, BASE | changes


def recipes(results: Results):
    """The same of the second: all rates with one seed, then the best one's other seeds."""
    for recipe, changes in RECIPES.items():
        for rate in RATES:
            yield f"{recipe}, rate {rate:g}, seed 0", changes | {"train.learning_rate": rate, "train.seed": 0}
    for recipe, changes in RECIPES.items():
        best = max(RATES, key=lambda rate: results.value(f"{recipe}, rate {rate:g}, seed 0"))
        for seed in SEEDS[1:]:
            changed = changes | {"train.learning_rate": best, "train.seed": seed}
            yield f"{recipe}, rate {best:g}, seed {seed}", changed


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("part", choices=["settings", "recipes", "table"])
    args.add_argument("--out", type=Path, default=OUT, help="the JSON file of results")
    args.add_argument("--work", type=Path, default=Path("runs/ablate"), help="data, features and runs")
    asked = args.parse_args()
    results = Results(asked.out)
    if asked.part != "table":
        axes.virtual_cpus(os.cpu_count() or 1)
        measure = None
        for name, changes in {"settings": settings, "recipes": recipes}[asked.part](results):
            config = configured(asked.work, name, changes)
            plain = configuration.to_dict(config)
            if results.has(name, plain):
                continue
            print(f"== {name}", flush=True)
            began = time.monotonic()
            features(config)
            measure = measure or Measure(config, asked.work / "texts.json")
            run = train(config)
            results.add(name, {"config": plain, **taken(config), "measured": measure(run)})
            took = (time.monotonic() - began) / 60
            print(f"== {name}: {results.value(name):.3f} at {CHAIN}; {took:.1f} min", flush=True)
    print(tables(results))


def tables(results: Results) -> str:
    """What there is, as Markdown."""
    names = list(results.runs)
    of_settings = [n for n in names if n in SETTINGS]
    parts = []
    if of_settings:
        parts.append(_settings_table(results, of_settings))
    if others := [n for n in names if n not in SETTINGS]:
        parts.append(_recipes_table(results, others))
    return "\n\n".join(parts)


def _row(results: Results, name: str, *cells: str) -> str:
    run = results.runs[name]
    lengths = [f"{x['accept_length']:.3f}" for x in run["measured"].values()]
    return "| " + " | ".join([name, *lengths, *cells, f"{run['train_minutes']:.1f}"]) + " |"


def _settings_table(results: Results, names: list[str]) -> str:
    """Beside the baseline's mean: a gain means something where it exceeds twice the seeds' spread."""
    seeds = [results.value(name) for name in names if name.startswith("baseline")]
    mean, spread = statistics.mean(seeds), statistics.stdev(seeds) if len(seeds) > 1 else math.nan
    lines = [
        f"Baseline: {mean:.4f} at {CHAIN}, standard deviation {spread:.4f} over {len(seeds)} seeds.",
        "",
        f"| setting | {' | '.join(chain_name(k) for k in CHAINS)} | gain | in deviations | minutes |",
        "| --- " * (len(CHAINS) + 4) + "|",
    ]
    for name in names:
        gain = results.value(name) - mean
        lines.append(_row(results, name, f"{gain:+.4f}", f"{gain / spread:+.1f}"))
    return "\n".join(lines)


def _recipes_table(results: Results, names: list[str]) -> str:
    head = f"| recipe | {' | '.join(chain_name(k) for k in CHAINS)} | minutes |"
    lines = [head, "| --- " * (len(CHAINS) + 2) + "|", *(_row(results, name) for name in names)]
    chosen = [_best(results, recipe) for recipe in RECIPES]
    if all(len(runs) == len(SEEDS) for runs in chosen):
        ratio, (low, high) = ratio_of(*chosen)
        lines += ["", f"Ratio of accept lengths at {CHAIN}: {ratio:.3f} (95 % {low:.3f} .. {high:.3f})."]
    return "\n".join(lines)


def _best(results: Results, recipe: str) -> list[np.ndarray]:
    """Of the rate with all seeds: [prompts, (accepted, forwards)] of each."""
    for rate in RATES:
        names = [f"{recipe}, rate {rate:g}, seed {seed}" for seed in SEEDS]
        if all(name in results.runs for name in names):
            return [np.array(results.runs[name]["measured"][CHAIN]["pairs"]) for name in names]
    return []


def ratio_of(
    ours: list[np.ndarray], theirs: list[np.ndarray], draws: int = 2000
) -> tuple[float, list[float]]:
    """Ratio of the accept lengths' means over seeds, and its 95 % bootstrap interval over prompts and seeds."""

    def mean(runs, prompts):
        return np.mean([evaluate.accept_length(pairs[prompts]) for pairs in runs])

    rng, everything = np.random.default_rng(0), np.arange(len(ours[0]))
    drawn = []
    for _ in range(draws):
        prompts = rng.choice(everything, len(everything))
        a, b = ([runs[i] for i in rng.integers(len(runs), size=len(runs))] for runs in (ours, theirs))
        drawn.append(mean(a, prompts) / mean(b, prompts))
    return mean(ours, everything) / mean(theirs, everything), np.percentile(drawn, [2.5, 97.5]).tolist()


if __name__ == "__main__":
    main()
