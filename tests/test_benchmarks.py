"""benchmarks/: what it would run, and how it judges; the runs themselves are not a test's."""

import sys
from pathlib import Path

import numpy as np
import pytest

from eagle3_jax import config as configuration

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def ablate():
    sys.path.insert(0, str(BENCHMARKS))
    yield __import__("ablate")
    sys.path.remove(str(BENCHMARKS))


def pairs(accepted: float, prompts: int = 40) -> list:
    """Every prompt with 10 rounds."""
    return [[accepted * 10, 10]] * prompts


def results(ablate, tmp_path, lengths: dict[str, float]):
    found = ablate.Results(tmp_path / "out.json")
    for name, length in lengths.items():
        measured = {c: {"accept_length": length, "pairs": pairs(length - 1)} for c in ("3-1-4", "7-1-8")}
        found.add(name, {"config": {"of": name}, "train_minutes": 1.0, "measured": measured})
    return ablate.Results(tmp_path / "out.json")  # as it is read again


def test_every_setting_is_a_run_of_its_own_beside_the_baseline(ablate, tmp_path, monkeypatch):
    monkeypatch.chdir(BENCHMARKS.parent)
    runs = {name: ablate.configured(tmp_path, name, c) for name, c in ablate.settings(None)}
    plain = {name: configuration.to_dict(config) for name, config in runs.items()}
    assert len({config.train.run for config in runs.values()}) == len(runs)
    base = plain["baseline, seed 0"]
    for name, tree in plain.items():
        changed = {
            f"{s}.{k}" for s in tree if tree[s] for k in tree[s] if tree[s][k] != base[s][k]
        } - {"train.run"}  # fmt: skip
        own = set(ablate.SETTINGS[name]) - {"train.seed"}
        assert own <= changed and (name.startswith("baseline") or "answers" in name or changed == own), name
        whole = configuration.load(ablate.CONFIG)
        assert tree["train"]["steps"] * ablate.SHARE == whole.train.steps


def test_a_recipe_has_its_best_rate_and_then_all_seeds(ablate, tmp_path):
    first = {f"ours, rate {r:g}, seed 0": 1.4 + (r == 1e-3) for r in ablate.RATES}
    first |= {f"SpecForge's, rate {r:g}, seed 0": 1.3 + (r == 3e-3) for r in ablate.RATES}
    names = [name for name, _ in ablate.recipes(results(ablate, tmp_path, first))]
    assert names[:6] == list(first)
    assert names[6:] == [
        "ours, rate 0.001, seed 1", "ours, rate 0.001, seed 2",
        "SpecForge's, rate 0.003, seed 1", "SpecForge's, rate 0.003, seed 2",
    ]  # fmt: skip


def test_gains_are_measured_in_the_seeds_spread(ablate, tmp_path):
    lengths = {"baseline, seed 0": 1.30, "baseline, seed 1": 1.32, "baseline, seed 2": 1.34, "fc_norm": 1.37}
    text = ablate.tables(results(ablate, tmp_path, lengths))
    assert "Baseline: 1.3200 at 3-1-4, standard deviation 0.0200 over 3 seeds." in text
    assert "| fc_norm | 1.370 | 1.370 | +0.0500 | +2.5 | 1.0 |" in text


def test_the_ratio_has_an_interval_over_prompts_and_seeds(ablate):
    ours, theirs = ([np.array(pairs(x)) for x in seeds] for seeds in ((0.6, 0.5, 0.7), (0.3, 0.4, 0.5)))
    ratio, (low, high) = ablate.ratio_of(ours, theirs)
    assert ratio == pytest.approx(1.6 / 1.4)
    assert 1.5 / 1.5 <= low < 1.07 and 1.2 < high <= 1.7 / 1.3  # no prompt differs: the seeds make it
    one = [np.array([[6, 10]] * 20 + [[0, 10]] * 20)] * 3
    _, (low, high) = ablate.ratio_of(one, one)
    assert (low, high) == (1.0, 1.0)  # both on the same prompts
