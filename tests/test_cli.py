"""The commands as their user runs them: what they print, and one clear line with exit code 2 for bad input."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
import yaml

from bridge import cli as bridge_cli
from eagle3_jax import cli, config, tensors


def save_config(root) -> str:
    path = root / "tiny.yaml"
    path.write_text(yaml.safe_dump(config.to_dict(tiny.config(root))))
    return str(path)


@pytest.fixture(scope="module")
def yaml_file(root):
    return save_config(root)


def call(app, prog: str, *arguments) -> int:
    with pytest.raises(SystemExit) as end:
        cli.run(app, prog, [str(a) for a in arguments])
    return end.value.code or 0


def eagle3(*arguments) -> int:
    return call(cli.app, "eagle3", *arguments)


def untied(root, tmp_path):
    """The target without its lm_head."""
    shutil.copytree(root / "target", tmp_path / "t")
    weights = dict(tensors.read(tmp_path / "t"))
    del weights["lm_head.weight"]
    tensors.save(tmp_path / "t" / tensors.FILE, weights)
    return f"target.path={tmp_path / 't'}"


BAD = {
    "unknown key": (("train", "train.lr=1"), "unknown key 'train.lr'"),
    "draft vocabulary 0": (("train", "draft.vocab_size=0"), "draft.vocab_size=0"),
    "draft vocabulary -1": (("train", "draft.vocab_size=-1"), "draft.vocab_size=-1"),
    "draft vocabulary 4.0": (("train", "draft.vocab_size=4.0"), "draft.vocab_size=4.0"),
    "draft vocabulary too big": (("train", "draft.vocab_size=273"), "draft.vocab_size=273 must be within 1 .. 272"),
    "aux ids descending": (("train", "target.aux_layers=[2,1]"), "target.aux_layers=[2, 1] must be strictly ascending"),
    "aux id negative": (("train", "target.aux_layers=[-1,1]"), "within 0 .. 2"),
    "aux id of the last layer": (("train", "target.aux_layers=[1,3]"), "within 0 .. 2 (the target has 4 layers)"),
    "default aux ids on a shallow target": (("train", "target.aux_layers=null"), "need at least 7"),
    "longer than the positions": (
        ("prepare", "data.max_length=300", "train.row_length=300"), "exceeds the target's 256 positions",
    ),
    "frozen pattern without a leaf": (("train", "train.freeze=['embd/.*']"), "'embd/.*' matches no parameter"),
    "nowhere to regenerate to": (("regenerate",), "needs regenerate.path"),
    "unknown key of regenerate": (("regenerate", "regenerate={path: a, temp: 1}"), "unknown key 'regenerate.temp'"),
    "no data to regenerate": (("regenerate", "data.path=nowhere.json", "regenerate={path: a.jsonl}"), "nowhere.json"),
    "answers longer than all": (
        ("regenerate", "regenerate={path: a.jsonl, max_new_tokens: 160}"), "leaves no room for a question within data",
    ),
    "no prompt fits": (
        ("regenerate", "regenerate={path: a.jsonl, max_new_tokens: 150}"),
        "no prompt is left of 24 conversations (refused: {'prompt too long': 24})",
    ),
    "no such data": (("prepare", "data.path=nowhere.json"), "nowhere.json"),
    "store of other data": (("train", "data.prepared=elsewhere"), "elsewhere"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, yaml_file, capsys, tmp_path):
    (command, *overrides), text = BAD[case]
    run = tmp_path / "run"
    assert eagle3(command, yaml_file, f"train.run={run}", *overrides) == 2
    out, err = capsys.readouterr()
    last = err.strip().splitlines()[-1]
    assert last.startswith("eagle3: ") and text in last
    assert "Traceback" not in out + err
    assert not run.exists()


def test_empty_data_is_refused(yaml_file, capsys, tmp_path):
    (tmp_path / "none.json").write_text("[]")
    assert (
        eagle3("prepare", yaml_file, f"data.path={tmp_path / 'none.json'}", f"data.prepared={tmp_path / 'd'}")
        == 2
    )
    assert "none.json" in capsys.readouterr().err


def test_a_token_id_beyond_the_vocabulary_is_refused(root, yaml_file, capsys, tmp_path):
    """A tokenizer with more tokens than the target has rows."""
    shutil.copytree(root / "target", tmp_path / "t")
    told = json.loads((tmp_path / "t/config.json").read_text()) | {"vocab_size": 100}
    (tmp_path / "t/config.json").write_text(json.dumps(told))
    overrides = (f"target.path={tmp_path / 't'}", f"data.prepared={tmp_path / 'd'}", "draft.vocab_size=20")
    assert eagle3("prepare", yaml_file, *overrides) == 2
    assert "outside the target's vocabulary 0 .. 99" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_an_untied_target_without_a_head_is_refused(mode, root, yaml_file, capsys, tmp_path):
    command = "capture" if mode == "offline" else "train"
    overrides = (
        untied(root, tmp_path),
        f"train.mode={mode}",
        f"store.path={tmp_path / 's'}",
        f"train.run={tmp_path / 'r'}",
    )
    assert eagle3(command, yaml_file, *overrides) == 2
    assert "lm_head.weight" in capsys.readouterr().err


def test_a_run_directory_of_another_config_is_refused_and_kept(yaml_file, capsys, tmp_path):
    run = tmp_path / "run"
    assert eagle3("train", yaml_file, f"train.run={run}", "train.steps=3", "train.save_every=3") == 0
    before = sorted(run.rglob("*"))
    assert (
        eagle3("train", yaml_file, f"train.run={run}", "train.steps=3", "train.save_every=3", "train.seed=1")
        == 2
    )
    assert "train.seed=0, now 1" in capsys.readouterr().err
    assert sorted(run.rglob("*")) == before


def test_the_whole_path_by_its_commands(root, yaml_file, capsys, tmp_path, monkeypatch):
    run, out = tmp_path / "run", tmp_path / "draft"
    assert eagle3("prepare", yaml_file, "--preview", "1") == 0
    assert "supervised" in capsys.readouterr().out
    assert eagle3("capture", yaml_file) == 0
    assert eagle3("train", yaml_file, f"train.run={run}") == 0
    assert eagle3("inspect", run) == 0
    assert "what is frozen stayed, what is trained moved" in capsys.readouterr().out
    assert eagle3("evaluate", run, "evaluate.max_new_tokens=12") == 0
    said = capsys.readouterr().out
    result = json.loads((run / "evaluate.json").read_text())
    assert f"accept length {result['accept_length']:.3f}" in said and "chain 3-1-4" in said
    assert (
        result["step"] == 10
        and result["target"] == str(root / "target")
        and 1 <= result["accept_length"] <= 4
    )
    told = []
    monkeypatch.setattr(subprocess, "call", lambda words: told.append(words) or 1)
    assert eagle3("evaluate", run, "evaluate.max_new_tokens=12", "--verify") == 1
    assert told == [[sys.executable, "-m", "bridge.cli", "verify", str(run)]]
    assert eagle3("evaluate", run, "--verify", "--step", "5") == 2
    assert "leave one out" in capsys.readouterr().err
    assert eagle3("evaluate", run, "--topk", "2") == 2
    assert "wants evaluate.tokens: within 2 .. 11" in capsys.readouterr().err
    tree = ("evaluate.topk=2", "evaluate.tokens=6", "evaluate.max_new_tokens=12")
    assert eagle3("evaluate", run, *tree, "--steps", "2", "--tokens", "5", "--step", "5", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["tree"] == "2-2-5" and len(told["histogram"]) == 3
    assert eagle3("evaluate", run, *tree, "--topk", "1", "--step", "5") == 0
    assert "  chain 3-1-4, " in capsys.readouterr().out
    assert json.loads((run / "evaluate.json").read_text()) == result, "of another step"
    assert call(bridge_cli.app, "bridge", "convert", run, out) == 0
    assert "--speculative-algorithm EAGLE3" in capsys.readouterr().out
    assert (
        json.loads((out / "config.json").read_text())["provenance"]["predicted_accept_length"]
        == result["accept_length"]
    )
    assert call(bridge_cli.app, "bridge", "check", out, "--target", root / "target") == 0
    assert call(bridge_cli.app, "bridge", "parity", run, out) == 0
    assert np.array_equal(
        tensors.read(out)["embed_tokens.weight"], tensors.read(root / "target")["model.embed_tokens.weight"]
    )


@pytest.mark.parametrize(("family", "mode"), [("qwen2", "offline"), ("mistral", "online")])
def test_targets_of_other_families_go_the_whole_way_on_their_own_answers(family, mode, tmp_path, capsys):
    file, run, out = save_config(tiny.project(tmp_path, family)), tmp_path / "run", tmp_path / "draft"
    own = tmp_path / "own.jsonl"
    settings = (f"regenerate={{path: {own}, max_new_tokens: 12, batch: 8}}", f"train.mode={mode}")
    assert eagle3("regenerate", file, *settings) == 0
    assert "regenerated 24 conversations" in capsys.readouterr().out
    assert eagle3("regenerate", file, *settings, f"data.path={own}") == 2
    assert "is regenerate.path, too" in capsys.readouterr().err
    short = (
        *settings,
        f"data.path={own}",
        "train.steps=2",
        "train.save_every=2",
        "train.warmup=1",
        "train.unroll=1",
    )
    assert eagle3("prepare", file, *short) == 0
    assert "at temperature 0; the exact tokens of 24 conversations" in capsys.readouterr().out
    for command in ("capture", "train") if mode == "offline" else ("train",):
        assert eagle3(command, file, *short) == 0
    assert eagle3("inspect", run) == 0
    if family == "mistral":
        assert eagle3("evaluate", run, "evaluate.max_new_tokens=180") == 2
        assert "the target has 200 tokens of sliding window" in capsys.readouterr().err
    else:
        assert eagle3("evaluate", run, "evaluate.max_new_tokens=8", "--steps", "1") == 0
    assert call(bridge_cli.app, "bridge", "convert", run, out) == 0
    assert call(bridge_cli.app, "bridge", "check", out, "--target", tmp_path / "target") == 0
