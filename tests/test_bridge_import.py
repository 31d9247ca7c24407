"""A draft directory becomes a run: nothing of it changes on the way, and training goes on from it."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from bridge_fixture import edit_config
from typer.testing import CliRunner

from bridge import cli as bridge_cli
from bridge import convert, imports
from eagle3_jax import cli, commands, tensors
from eagle3_jax.errors import CheckpointError, ConfigError
from eagle3_jax.train import checkpoint
from eagle3_jax.train.inspect import inspect
from eagle3_jax.train.loop import train


@pytest.fixture(scope="module")
def exported(root):
    """A trained draft in bfloat16, with fc_norm and a feed-forward width of its own."""
    told = ("train.steps=4", "train.warmup=0", "draft.fc_norm=true", "draft.intermediate_size=20")
    run = train(tiny.config(root, *told, f"train.run={root / 'first'}", "target.dtype=bfloat16"))
    convert.convert(run, root / "export")
    return root / "export"


@pytest.fixture(scope="module")
def imported(root, exported):
    shown = CliRunner().invoke(bridge_cli.app, ["import", str(exported), str(root / "imported")])
    assert shown.exit_code == 0 and "train.init=" in shown.output
    return root / "imported"


def same_tensors(a, b):
    a, b = tensors.read(a), tensors.read(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        assert x.dtype == b[name].dtype and x.tobytes() == b[name].tobytes(), name


def test_import_and_convert_give_the_same_tensors(exported, imported, tmp_path):
    convert.convert(imported, tmp_path / "again")
    same_tensors(exported, tmp_path / "again")
    then, now = (convert.read_config(d) for d in (exported, tmp_path / "again"))
    assert {k for k in then if then[k] != now.get(k)} == {"provenance"}


def test_an_imported_draft_is_evaluated_as_the_run_that_it_came_from(root, imported):
    told = (f"evaluate.prompts={root / 'prompts.jsonl'}", "evaluate.steps=2")
    then, now = (commands.evaluate(run, told) for run in (root / "first", imported))
    assert now["step"] == 0 and {k for k in then if then[k] != now[k]} == {"run", "step"}
    with pytest.raises(ConfigError, match=r"unknown key 'train'; known: evaluate, mesh, target"):
        commands.evaluate(imported, ("train.steps=3",))


def test_a_run_says_that_it_was_imported_and_trains_no_further(root, exported, imported):
    report = inspect(imported)
    assert report.code == 0 and report.embedding["equals_target"] is True
    assert f"imported from {exported} fc.weight" in report.began
    assert report.leaves["draft/fc/kernel"].origin_check == "not verified: imported"
    with pytest.raises(CheckpointError, match=r"an imported draft; to start from it set train.init="):
        train(tiny.config(root, f"train.run={imported}"))


def test_training_starts_from_it_with_its_vocabulary_and_shape(root, imported, tmp_path):
    there = checkpoint.load_draft(imported)
    told = ("train.steps=2", "train.warmup=0", "draft.fc_norm=true", f"train.init={imported}")
    run = train(tiny.config(root, *told, f"train.run={tmp_path / 'run'}"))
    begun, now = checkpoint.load_draft(run, 0), checkpoint.load_draft(run)
    np.testing.assert_array_equal(begun.d2t, there.d2t)
    jax.tree.map(np.testing.assert_array_equal, begun.params, there.params)
    assert now.shape.intermediate_size == 20
    report = inspect(run)
    assert report.code == 0 and report.began == f"warm-started from {imported} step 0"
    assert report.facts["warm_start"]["vocabulary_map"] == "kept"
    assert report.facts["warm_start"]["trained_for"] == "this target"


def test_a_map_that_the_data_would_not_give_is_kept_through_warm_start_and_resume(root, exported, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(exported, other)
    found = tensors.read(other)
    ids = np.flatnonzero(~found["t2d"])[:48]  # none of the tokens that the data would choose
    found["d2t"] = ids - np.arange(48)
    found["t2d"] = np.isin(np.arange(tiny.V), ids)
    tensors.save(other / tensors.FILE, found)
    imports.import_draft(other, tmp_path / "imported")
    told = (f"train.init={tmp_path / 'imported'}", f"train.run={tmp_path / 'run'}", "draft.fc_norm=true")
    run = train(tiny.config(root, *told, "train.save_every=10"))
    shutil.rmtree(run / "steps" / "10")
    train(tiny.config(root, *told, "train.save_every=10"))
    np.testing.assert_array_equal(checkpoint.load_draft(run).d2t + np.arange(48), ids)
    assert inspect(run).facts["coverage"] == 0.0 and inspect(run).code == 0


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(target="nowhere"), r"nowhere"),
        (dict(provenance=None), r"names no target; say which one: --target DIR"),
        (dict(num_key_value_heads=4), r"k_proj.weight: .* wanted"),
        (dict(hidden_act="gelu"), r"config.json: hidden_act: 'gelu'; 'silu' wanted"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_nothing_is_written(exported, tmp_path, change, message):
    bad = tmp_path / "bad"
    shutil.copytree(exported, bad)
    target = change.pop("target", None)
    edit_config(bad, **change)
    arguments = ["import", str(bad), str(tmp_path / "run"), *(["--target", target] if target else [])]
    with pytest.raises(ConfigError, match=message):
        CliRunner().invoke(bridge_cli.app, arguments, catch_exceptions=False)
    assert not (tmp_path / "run").exists()


def test_another_draft_than_the_configuration_describes_is_refused(root, imported, tmp_path):
    for told, message in (
        ("draft.vocab_size=40", r"its draft has draft_vocab_size=48, this config 40"),
        ("draft.fc_norm=false", r"its draft has fc_norm=True, this config False"),
        ("draft.intermediate_size=24", r"its draft has intermediate_size=20, this config 24"),
    ):
        with pytest.raises(ConfigError, match=message):
            train(
                tiny.config(
                    root, "draft.fc_norm=true", f"train.init={imported}", told, f"train.run={tmp_path / 'r'}"
                )
            )
    assert not (tmp_path / "r").exists()
    assert (
        json.loads(CliRunner().invoke(cli.app, ["inspect", str(imported), "--json"]).output)["findings"] == []
    )
