"""Evaluation while training: what it measures, that it changes nothing, which step it keeps and when it stops."""

import json

import numpy as np
import pytest
import tiny
from typer.testing import CliRunner

from eagle3_jax import axes, cli
from eagle3_jax.data import chat, features
from eagle3_jax.decode import evaluate, speculate
from eagle3_jax.draft import model
from eagle3_jax.errors import ConfigError, DataError
from eagle3_jax.train import checkpoint, metrics, setup
from eagle3_jax.train.held_out import HeldOut, stalled
from eagle3_jax.train.loop import train

EVERY = ("train.evaluate_every=4", "evaluate.max_new_tokens=24", "evaluate.steps=2")


@pytest.fixture(scope="module")
def run(root):
    return train(tiny.config(root, *EVERY))


def test_accept_length_is_that_of_decoding_the_held_out_prompts(root, run):
    config = tiny.config(root, *EVERY)
    lines = metrics.read_evaluations(run)
    assert [line["step"] for line in lines] == [0, 4, 8, 10]
    files, store = setup.find_target(config), features.open_store(config.store.path)
    prompts = []
    for i in np.flatnonzero(np.asarray(store.held_out)):
        a, b = store.offsets[i : i + 2]
        n = int(np.flatnonzero(np.asarray(store.span[a:b]))[0])
        prompts.append(np.asarray(store.ids[a : a + n]).tolist())
    assert len(prompts) > 1
    mesh = axes.make_mesh()
    target, params = setup.load_target(config, files, mesh)
    speculator = speculate.Speculator(target, speculate.Drafting(2, 1, 3), mesh)
    ends = chat.end_tokens(setup.tokenizer(files))
    found = set()
    for line in lines:
        draft = checkpoint.load_draft(run, line["step"]) if line["step"] in (0, 10) else None
        if draft is not None:
            graph, _, _ = model.abstract(draft.shape)
            weights = speculate.DraftWeights(graph, draft.params, draft.embedding, draft.d2t.astype(np.int32))
            answers = speculate.decode(
                speculator, params, weights, prompts, max_new_tokens=24, end_tokens=ends, batch=2
            )
            pairs = [[sum(r.accepted for r in a.rounds), len(a.rounds)] for a in answers]
            assert sorted(pairs) == sorted(line["pairs"])
            assert line["accept_length"] == evaluate.accept_length(np.array(pairs))
            found.add(line["accept_length"])
    assert len(found) == 2  # training changed it
    assert lines[-1]["held_out"]["loss"] < lines[0]["held_out"]["loss"]


def test_it_changes_nothing_of_the_training_and_comes_once_after_a_stop(root, run, tmp_path):
    plain = train(tiny.config(root, f"train.run={tmp_path / 'plain'}"))
    part = tmp_path / "part"
    five = tiny.config(root, *EVERY, f"train.run={part}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.Steps, "save", _until(6))
        with pytest.raises(KeyboardInterrupt):
            train(five)
    assert checkpoint.steps_of(part)[-1] < 6 and metrics.read_evaluations(part)[-1]["step"] == 8
    train(five)
    digests = [checkpoint.read_meta(r, 10)["digests"] for r in (run, plain, part)]
    assert digests[0] == digests[1] == digests[2]
    then, now = (
        [{k: v for k, v in line.items() if k != "seconds"} for line in metrics.read_evaluations(r)]
        for r in (run, part)
    )
    assert now == then


def _until(step):
    save = checkpoint.Steps.save

    def stop(self, at, *arguments):
        if at > step:
            raise KeyboardInterrupt
        save(self, at, *arguments)

    return stop


def test_held_out_loss_does_not_depend_on_how_its_rows_are_packed(root, run, tmp_path):
    told = ("train.batch=3", "train.row_length=160", "train.steps=1", "train.warmup=0")
    other = train(tiny.config(root, *EVERY, f"train.run={tmp_path / 'run'}", *told))
    then, now = (metrics.read_evaluations(r)[0]["held_out"] for r in (run, other))
    for name, value in then.items():
        np.testing.assert_allclose(now[name], value, rtol=1e-5, err_msg=name)


def measured(*lengths, prompts=20):
    """HeldOut.__call__ that finds these accept lengths, one after the other, alike on all prompts."""
    left = iter(lengths)

    def call(self, trained, frozen):
        length = next(left)
        return {"accept_length": length, "pairs": [[round(100 * (length - 1)), 100]] * prompts}

    return call


def test_training_stops_without_a_clear_gain_keeps_its_best_step_and_stays_so(
    root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(HeldOut, "__init__", lambda self, *a: None)
    monkeypatch.setattr(HeldOut, "__call__", measured(1.0, 1.2, 1.3, 1.29, 1.28, 1.5))
    told = ("train.evaluate_every=1", "train.keep=1", "train.save_every=3", f"train.run={tmp_path / 'r'}")
    for _ in range(2):  # the second time there is nothing left to do
        there = train(tiny.config(root, *told, "train.patience=2"))
        said = capsys.readouterr().err
        assert "stopped at step 4 of 10" in said and "the best, 1.300 held-out accept length" in said
        assert checkpoint.steps_of(there) == [0, 2, 4]
    shown = CliRunner().invoke(cli.app, ["inspect", str(there), "--step", "best", "--json"])
    assert json.loads(shown.output)["step"] == 2
    # Asked for more patience it goes on, and what it finds then is compared with what it found before.
    monkeypatch.setattr(HeldOut, "__call__", measured(1.29, 1.4, 1.3, 1.3, 1.3, 1.3))
    train(tiny.config(root, *told, "train.patience=4"))
    assert checkpoint.steps_of(there) == [0, 6, 10]


def test_a_gain_is_judged_on_the_same_prompts():
    rng = np.random.default_rng(1)
    easy = rng.integers(5, 60, 40)  # prompts differ far more than drafts do

    def line(better):
        return {"pairs": np.stack([easy + better, np.full(40, 60)], axis=1).tolist()}

    low, high = evaluate.interval(np.array(line(0)["pairs"]))
    assert high - low > 0.1
    small = [0, 1, 2, 3]  # 1/60 of a token each
    assert stalled([line(b) for b in small]) == 0
    noise = rng.normal(0, 2, (4, 40)).round().astype(int)
    noise -= noise.mean(axis=1, keepdims=True).round().astype(int)
    assert stalled([line(n) for n in noise]) == 3
    assert stalled([line(3), line(2), line(0)]) == 2


def test_what_cannot_be_measured_is_said_first(root, tmp_path):
    with pytest.raises(ConfigError, match=r"train.patience=2 needs train.evaluate_every"):
        tiny.config(root, "train.patience=2")
    with pytest.raises(ConfigError, match=r"set data.held_out above 0"):
        tiny.config(root, "train.evaluate_every=2", "data.held_out=0")
    with pytest.raises(DataError, match=r"none of 6 held-out conversations has a prompt of at most 5 tokens"):
        told = ("evaluate.max_new_tokens=248", "evaluate.steps=2", "train.evaluate_every=2")
        train(tiny.config(root, *told, f"train.run={tmp_path / 'r'}"))
