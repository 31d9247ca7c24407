"""Whole runs on a tiny target: resume, inspect, planted faults, and features online against offline."""

import json
import os
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from typer.testing import CliRunner

from eagle3_jax import axes, cli, commands, tensors
from eagle3_jax.data import features, prepare
from eagle3_jax.data.loader import Batches
from eagle3_jax.draft import model
from eagle3_jax.errors import CheckpointError, ConfigError, DataError, Stopped
from eagle3_jax.train import checkpoint, manifest, optim, setup
from eagle3_jax.train.inspect import inspect
from eagle3_jax.train.loop import train
from eagle3_jax.train.step import Step


@pytest.fixture(scope="module")
def whole(root):
    """A run of ten steps that nothing interrupted."""
    return train(tiny.config(root))


def short(root, run, *overrides):
    """A run of two steps."""
    return train(tiny.config(root, f"train.run={run}", "train.steps=2", "train.warmup=0", *overrides))


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def only_finding(run, text):
    """Exactly what was planted is reported."""
    report = inspect(run)
    assert report.code == 1
    assert len(report.findings) == 1 and text in report.findings[0], report.findings


@pytest.mark.parametrize("prefetch", [0, 2])
def test_five_steps_a_stop_and_five_more_equal_ten_steps_bit_for_bit(root, whole, tmp_path, prefetch):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "steps" / "10")
    lines = (run / "metrics.jsonl").read_text()  # of steps that were not saved, the last one cut off
    (run / "metrics.jsonl").write_text("".join(lines.splitlines(True)[:8]) + lines.splitlines()[8][:20])
    train(tiny.config(root, f"train.run={run}", f"train.prefetch={prefetch}"))
    then, now = (checkpoint.read_meta(r, 10) for r in (whole, run))
    assert now["digests"] == then["digests"] and {"params", "opt"} <= now["digests"].keys()
    assert now["manifest"]["leaves"] == then["manifest"]["leaves"]
    assert losses(run) == losses(whole) and len(losses(run)) == 10
    positions = [json.loads((r / "steps/10/data/metadata").read_text()) for r in (whole, run)]
    assert positions[0]["consumed"] == 10 and positions[0] == positions[1]


def test_a_run_of_eight_devices_goes_on_with_two(root, tmp_path):
    told = ("train.batch=8", f"train.run={tmp_path / 'eight'}")
    eight = train(tiny.config(root, *told, "mesh.data=8"))
    two = tmp_path / "two"
    shutil.copytree(eight, two)
    shutil.rmtree(two / "steps" / "10")
    train(tiny.config(root, told[0], f"train.run={two}", "mesh.data=2"))
    assert losses(two)[:5] == losses(eight)[:5] and len(losses(two)) == 10
    np.testing.assert_allclose(losses(two), losses(eight), rtol=1e-5)
    then, now = (json.loads((r / "steps/10/data/metadata").read_text()) for r in (eight, two))
    assert then == now
    a, b = (manifest.flat(checkpoint.load_draft(r).params) for r in (eight, two))
    for name, x in a.items():
        np.testing.assert_allclose(b[name], x, atol=1e-4 * np.abs(x).max(), err_msg=name)


def test_a_finished_run_trains_no_further_and_another_config_is_refused(root, whole):
    before = (whole / "metrics.jsonl").read_text()
    train(tiny.config(root))
    assert (whole / "metrics.jsonl").read_text() == before
    with pytest.raises(CheckpointError, match=r"holds a run with train.learning_rate=0.01, now 0.02"):
        train(tiny.config(root, "train.learning_rate=0.02"))


def test_inspect_finds_nothing_wrong_with_a_sound_run(whole):
    shown = CliRunner().invoke(cli.app, ["inspect", str(whole)])
    assert shown.exit_code == 0 and "from scratch, random from seed 0" in shown.output
    told = CliRunner().invoke(cli.app, ["inspect", str(whole), "--json"])
    report = json.loads(told.output)
    assert told.exit_code == 0 and report["findings"] == [] and report["step"] == 10
    assert report["embedding"] == {"label": "frozen", "equals_step_0": True, "equals_target": True}
    trained = {name for name, leaf in report["leaves"].items() if leaf["label"] == "train"}
    assert trained == {name for name in report["leaves"] if name.startswith("draft/")}
    assert all(report["leaves"][name]["moved"] > 0 for name in trained)
    assert all(report["leaves"][name]["origin_check"] == "verified" for name in trained)
    assert losses(whole)[-1] < losses(whole)[0]


def test_a_head_that_is_not_the_targets_file_is_reported(whole, monkeypatch):
    """Of the frozen head a checkpoint has the digest alone."""
    assert inspect(whole).leaves["target/head/kernel"].origin_check == "verified"
    real = tensors.open_tensors

    def other(path):
        files = dict(real(path))
        head = files["lm_head.weight"][...].copy()
        head[checkpoint.load_draft(whole).d2t[-1] + len(checkpoint.load_draft(whole).d2t) - 1, 0] += 1e-3
        return files | {"lm_head.weight": head}

    monkeypatch.setattr(tensors, "open_tensors", other)
    only_finding(
        whole, "target/head/kernel is declared rows of target tensor lm_head.weight, but at step 0 it is not"
    )


def test_an_embedding_that_is_trained_moves_and_inspect_fails(root, tmp_path):
    run = short(root, tmp_path / "run", 'train.freeze=["target/.*"]')
    leaf = inspect(run).leaves["embedding/embedding"]
    assert leaf.label == "train" and leaf.moved > 0
    only_finding(run, "embedding/embedding is trained; it should be frozen")
    assert CliRunner().invoke(cli.app, ["inspect", str(run)]).exit_code == 1


def test_a_head_from_the_target_is_named_and_verified_as_a_copy(root, tmp_path):
    report = inspect(short(root, tmp_path / "run", "draft.head_init=target"))
    assert report.findings == []
    for path, tensor in {"lm_head/kernel": "lm_head.weight"}.items():
        leaf = report.leaves[f"draft/{path}"]
        assert (leaf.origin, leaf.origin_check) == (f"copied from target tensor {tensor}", "verified")
    assert report.began.startswith("from scratch, random from seed 0; but draft/lm_head/kernel copied")


def test_a_run_that_starts_from_another_says_so_and_begins_with_its_draft(root, whole, tmp_path):
    run = short(root, tmp_path / "run", f"train.init={whole}")
    report = inspect(run)
    assert report.findings == [] and report.began == f"warm-started from {whole} step 10"
    assert {leaf.origin_check for n, leaf in report.leaves.items() if n.startswith("draft/")} == {"verified"}
    start, end = checkpoint.load_draft(run, 0).params, checkpoint.load_draft(whole).params
    jax.tree.map(np.testing.assert_array_equal, start, end)
    assert losses(run)[0] < 0.9 * losses(whole)[0]


def test_a_leaf_that_no_gradient_reaches_is_reported(root, tmp_path, monkeypatch):
    fuse = model.Draft.fuse
    monkeypatch.setattr(model.Draft, "fuse", lambda self, aux: jax.lax.stop_gradient(fuse(self, aux)))
    only_finding(
        short(root, tmp_path / "still", "train.weight_decay=0.0"),
        "draft/fc/kernel is trained but did not move since step 0",
    )
    only_finding(
        short(root, tmp_path / "decayed"), "draft/fc/kernel only shrank towards 0, as weight decay does"
    )


def test_a_target_tensor_that_slipped_into_the_draft_is_reported(root, tmp_path, monkeypatch):
    drawn = setup.initial_draft

    def planted(config, shape, files, *given):
        graph, params, origins = drawn(config, shape, files, *given)
        params["midlayer"]["gate"]["kernel"] = files.rows("model.layers.1.mlp.gate_proj.weight").T
        return graph, params, origins

    monkeypatch.setattr(setup, "initial_draft", planted)
    only_finding(
        short(root, tmp_path / "run"),
        "draft/midlayer/gate/kernel is declared random, but at step 0 it is a copy of target tensor "
        "model.layers.1.mlp.gate_proj.weight",
    )


def test_a_leaf_labelled_against_the_configuration_is_reported(root, tmp_path, monkeypatch):
    right = optim.labels

    def planted(tree, freeze):
        return optim.nested(optim.flat(right(tree, freeze)) | {"draft/fc/kernel": "frozen"})

    monkeypatch.setattr(optim, "labels", planted)
    only_finding(short(root, tmp_path / "run"), "draft/fc/kernel is labelled frozen; train.freeze=")


def test_decay_outside_the_partition_reaches_no_frozen_leaf(root, tmp_path, monkeypatch):
    """Whatever the optimiser does, frozen arrays are inputs of the step and never its outputs."""
    right = optim.make
    monkeypatch.setattr(
        optim, "make", lambda *told: optax.chain(right(*told), optax.add_decayed_weights(-0.3))
    )
    run = short(root, tmp_path / "run")
    assert inspect(run).leaves["embedding/embedding"].unchanged
    leaves = checkpoint.read_meta(run)["manifest"]["leaves"]
    assert leaves["draft/fc/kernel"]["relative"] > 0.3  # the fault was there
    there = tensors.read(root / "target")["model.embed_tokens.weight"]
    assert leaves["embedding/embedding"]["digest"] == manifest.digest(there)


def test_online_and_offline_features_give_the_same_losses(root, whole, tmp_path):
    online = short(root, tmp_path / "online", "train.mode=online")
    offline = short(root, tmp_path / "offline")
    np.testing.assert_allclose(losses(online), losses(offline), rtol=1e-6)
    assert inspect(online).findings == []
    commands.capture(rounded := tiny.config(root, f"store.path={tmp_path / 'store'}", "store.dtype=bfloat16"))
    coarse = short(root, tmp_path / "bfloat16", f"store.path={rounded.store.path}", "store.dtype=bfloat16")
    difference = np.abs(np.subtract(losses(coarse), losses(offline))) / losses(offline)
    print(f"bfloat16 store: loss differs by {difference.max():.1e}")
    assert 0 < difference.max() < 0.01


def test_captured_features_are_those_of_each_conversation_alone(root):
    config = tiny.config(root)
    target, params = setup.load_target(config, setup.find_target(config), axes.make_mesh())
    tokens, store = prepare.load(root / "data"), features.open_store(root / "store")
    forward = jax.jit(lambda ids, position, segment: target.features(params, ids, position, segment))
    head = tensors.read(root / "target")["lm_head.weight"]
    np.testing.assert_array_equal(store.offsets, tokens.offsets)
    for i in range(0, len(tokens.held_out), 4):
        a, b = map(int, tokens.offsets[i : i + 2])
        ids, segment = np.zeros((2, 1, 160), np.int32)
        ids[0, : b - a], segment[0, : b - a] = tokens.ids[a:b], 1
        aux, final = (np.asarray(x)[0, : b - a] for x in forward(ids, np.arange(160)[None], segment))
        np.testing.assert_array_equal(store.ids[a:b], tokens.ids[a:b])
        np.testing.assert_array_equal(store.span[a:b], tokens.span[a:b])
        np.testing.assert_allclose(store.aux[a:b], aux, rtol=0, atol=1e-5 * np.abs(aux).max())
        np.testing.assert_allclose(store.final[a:b], final, rtol=0, atol=1e-5 * np.abs(final).max())
        logits = final.astype(np.float64) @ head.T
        np.testing.assert_array_equal(store.top[a:b], logits.argmax(-1))
        np.testing.assert_allclose(store.lse[a:b], np.log(np.exp(logits).sum(-1)), rtol=1e-5)


def test_features_that_are_not_finite_are_refused(root, tmp_path):
    shutil.copytree(root / "target", tmp_path / "target")
    weights = tensors.read(root / "target")
    weights["model.embed_tokens.weight"][prepare.load(root / "data").ids[5]] = np.nan
    tensors.save(tmp_path / "target" / tensors.FILE, weights)
    with pytest.raises(DataError, match=r"conversation 0: aux is nan at token \d"):
        commands.capture(
            tiny.config(root, f"target.path={tmp_path / 'target'}", f"store.path={tmp_path / 's'}")
        )


def test_features_of_another_target_are_refused_before_anything_is_written(root, tmp_path):
    tiny.target(tmp_path / "target", seed=1)
    with pytest.raises(DataError, match="captured from another target"):
        short(root, tmp_path / "run", f"target.path={tmp_path / 'target'}")
    assert not (tmp_path / "run").exists()


def test_a_batch_that_the_mesh_does_not_divide_is_refused_before_anything_is_written(root, tmp_path):
    with pytest.raises(ConfigError, match=r"micro_batches=1 rows do not divide over mesh.data=2; nearest: 2"):
        short(root, tmp_path / "run", "train.micro_batches=2", "mesh.data=2")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_not_finite_stops_with_its_step_and_batch_and_saves_nothing(
    root, tmp_path, monkeypatch
):
    """From step 4 on, though only every tenth step is logged: the parameters of step 5 would be saved."""
    real = Step.__call__

    def call(self, trained, opt, frozen, batch):
        trained, opt, log = real(self, trained, opt, frozen, batch)
        (_, count), *_ = optax.tree.get_all_with_path(opt, "count")
        return trained, opt, log | {"grad_norm": jnp.where(count >= 4, jnp.inf, 1.0)}

    monkeypatch.setattr(Step, "__call__", call)
    run = tmp_path / "run"
    said = r"step 4: grad_norm is inf in a batch of (\d+) conversations \((\d+)(, \d+)*\)"
    with pytest.raises(DataError, match=said):
        train(tiny.config(root, f"train.run={run}", "train.log_every=10"))
    assert checkpoint.steps_of(run) == [0]


def test_sigterm_saves_the_step_and_the_run_goes_on_bit_for_bit(root, whole, tmp_path, monkeypatch):
    run, real = tmp_path / "run", Batches.__next__

    def third(self):
        if self.consumed == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self)

    monkeypatch.setattr(Batches, "__next__", third)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped, match=r"step 3 of 10 is saved in .*/run; the same command goes on"):
        train(tiny.config(root, f"train.run={run}"))
    assert signal.getsignal(signal.SIGTERM) is before and checkpoint.steps_of(run) == [0, 3]
    monkeypatch.setattr(Batches, "__next__", real)
    train(tiny.config(root, f"train.run={run}"))
    then, now = (checkpoint.read_meta(r, 10) for r in (whole, run))
    assert now["digests"] == then["digests"] and losses(run) == losses(whole)


def test_a_stop_has_an_exit_code_of_its_own(monkeypatch, capsys):
    def stopped(**_):
        raise Stopped("SIGTERM: saved")

    with pytest.raises(SystemExit) as caught:
        cli.run(stopped, "eagle3", [])
    assert caught.value.code == 75 and capsys.readouterr().err == "eagle3: SIGTERM: saved\n"
