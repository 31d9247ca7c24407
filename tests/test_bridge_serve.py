"""`bridge serve` around the server: what it refuses, how it waits, counts and ends. The real one: tests/engines."""

import json
import shlex
import socket
import sys
from pathlib import Path

import bridge_fixture as fixture
import pytest
import tiny
from test_bridge_cli import run
from test_processes import _gone

from bridge import convert, serve, sglang
from eagle3_jax import tensors
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.target import weights

CHAIN = Drafting(3, 1, 4)
FAKE = Path(__file__).with_name("fake_sglang.py")


@pytest.fixture
def pair(tmp_path):
    """(draft directory, target directory) that belong together, with a prediction for the chain of three."""
    target = tiny.target(tmp_path / "target")
    draft = fixture.draft("plain", "float32", str(target), hidden_size=tiny.D, vocab_size=tiny.V)
    draft.meta["target"]["weights_digest"] = weights.digest(target)
    draft.meta["aux_layers"] = [0, 1, 2]
    draft.embedding = tensors.read(target)["model.embed_tokens.weight"]
    run = tmp_path / "run"
    run.mkdir()
    (run / "evaluate.json").write_text(json.dumps(fixture.evaluated(2.0, draft.step)))
    convert.write(draft, run, tmp_path / "draft")
    return tmp_path / "draft", target


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """fake(how) -> an interpreter that behaves so; `fake.gone()` once nothing of it is left.

    Used as on a GPU: on a CPU the environment's stand-in would make it load PyTorch first.
    """
    script, pids = tmp_path / "python", tmp_path / "pids"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("FAKE_SGLANG_PIDS", str(pids))

    def behave(how: str) -> str:
        monkeypatch.setenv("FAKE_SGLANG", how)
        return str(script)

    behave.gone = lambda: all(_gone(int(pid)) for pid in pids.read_text().split())
    return behave


def test_served_counts_are_those_of_the_prompts_alone(pair, fake):
    server = serve.plan(*pair, "cuda", CHAIN, python=fake("ok"))
    with serve.running(server, 60) as url:
        found = serve.measure(url, [[1], [1, 2], [3, 4, 5]], 9, (), 2)
    assert found["accept_length"] == found["sglang_server"] == 1 + 2 * 6 / 6, (
        "the warm-up's 7 in 5 are not in it"
    )
    assert found["histogram"] == [0, 2, 2, 2] and found["sglang_request"] == 27 / 6
    assert fake.gone()


@pytest.mark.parametrize(
    "how, said",
    [
        ("dies", r"ended with status 1; its last lines:\n(.|\n)*mat1 and mat2"),
        ("hangs", r"was not ready in time .*; its last lines:\nloading"),
        ("breaks", r"ended with status 3; its last lines:\n(.|\n)*out of cache"),
    ],
)
def test_a_server_that_fails_shows_its_last_lines_and_leaves_nothing_behind(pair, fake, how, said):
    server = serve.plan(*pair, "cuda", CHAIN, python=fake(how))
    timeout = 5 if how == "hangs" else 60
    with pytest.raises(UserError, match=said), serve.running(server, timeout) as url:
        serve.measure(url, [[1]], 4, (), 1)
    assert fake.gone()


def test_a_taken_port_is_refused_before_anything_starts(pair, fake, tmp_path):
    with socket.socket() as s:
        s.bind((serve.HOST, 0))
        s.listen()
        port = s.getsockname()[1]
        server = serve.plan(*pair, "cuda", CHAIN, port=port, python=fake("ok"))
        with (
            pytest.raises(ConfigError, match=f"port {port}: .*give another --port"),
            serve.running(server, 3),
        ):
            pass
    assert not (tmp_path / "pids").exists()


def test_what_would_be_served_badly_is_refused(pair, tmp_path):
    directory, target = pair
    other = tiny.target(tmp_path / "other", seed=1)
    with pytest.raises(ConfigError, match=r"made for a target with weights .*the draft does not know"):
        serve.plan(directory, other, "cpu", CHAIN, python="python")
    with pytest.raises(ConfigError, match=r"context length 500 must be within 1 \.\. 256"):
        serve.plan(directory, target, "cpu", CHAIN, context_length=500, python="python")
    with pytest.raises(ConfigError, match="topk=20 exceeds the draft vocabulary of 17"):
        serve.plan(directory, target, "cpu", Drafting(3, 20, 30), python="python")
    found = tensors.read(directory)
    tensors.save(directory / tensors.FILE, {k: v for k, v in found.items() if k != "fc.weight"})
    with pytest.raises(ConfigError, match=r"fc\.weight.*bridge check"):
        serve.plan(directory, target, "cpu", CHAIN, python="python")


def test_a_missing_environment_names_the_command_that_makes_it(pair, monkeypatch):
    monkeypatch.setattr(sglang, "ENVIRONMENT", ".venv-of-nobody")
    with pytest.raises(ConfigError, match=r"\.venv-of-nobody: .*`make engines`"):
        serve.plan(*pair, "cpu", CHAIN)


def test_the_printed_line_is_the_command(pair, capsys):
    directory, target = pair
    code, text, _ = run(
        capsys, "serve", directory, "--target", target, "--device", "cuda", "--print", "--steps", "4", "--topk", "3",
        "--tokens", "10", "--port", "4242",
    )  # fmt: skip
    assert code == 0
    words = shlex.split(text)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert options["--speculative-algorithm"] == "EAGLE3" and options["--dtype"] == "float32"
    assert [options[f"--speculative-{k}"] for k in ("num-steps", "eagle-topk", "num-draft-tokens")] == [
        "4",
        "3",
        "10",
    ]
    assert options["--context-length"] == "256" and options["--port"] == "4242"


def test_predicted_stands_beside_served_and_strict_fails_outside_its_interval(pair, fake, tmp_path, capsys):
    directory, target = pair
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a"}) + "\n")
    ask = ["serve", directory, "--target", target, "--python", fake("ok"), "--prompts", tmp_path / "p.jsonl"]
    ask += ["--max-new-tokens", 8, "--device", "cuda"]
    code, text, _ = run(capsys, *ask)
    (line,) = [line for line in text.splitlines() if line.startswith("accept length")]
    assert code == 0 and line.split()[2] == "2.000" and float(line.split()[3]) > 3
    code, text, _ = run(capsys, *ask, "--strict")
    assert code == 1 and "outside the predicted interval" in text
    code, text, _ = run(capsys, *ask, "--steps", 2, "--json")
    assert code == 0 and json.loads(text)["predicted"] is None
    code, _, error = run(capsys, *ask, "--steps", 2, "--strict")
    assert code == 2 and "nothing was predicted for 2-1-3" in error
