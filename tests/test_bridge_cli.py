"""The `bridge` command: exit codes, one-line errors, and no PyTorch where none is needed."""

import json
import subprocess
import sys

import bridge_fixture as fixture
import pytest

from bridge import cli, convert
from eagle3_jax.train import checkpoint


@pytest.fixture
def draft(monkeypatch):
    """What `load_draft` finds in any run."""
    draft = fixture.draft()
    monkeypatch.setattr(checkpoint, "load_draft", lambda path, step=None: draft)
    return draft


def run(capsys, *arguments):
    """(exit code, standard output, standard error)."""
    with pytest.raises(SystemExit) as caught:
        cli.main([str(a) for a in arguments])
    out = capsys.readouterr()
    return caught.value.code or 0, out.out, out.err


def test_convert_then_check_then_parity(draft, tmp_path, capsys):
    out = tmp_path / "draft"
    code, text, _ = run(capsys, "convert", tmp_path / "run", out)
    assert code == 0
    (launch,) = [line for line in text.splitlines() if line.startswith("python -m sglang.launch_server")]
    assert "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4" in launch
    assert f"--speculative-draft-model-path {out}" in launch and "--dtype bfloat16" in launch
    code, text, _ = run(capsys, "check", out)
    assert code == 0 and "every tensor loads" in text
    code, text, _ = run(capsys, "parity", tmp_path / "run", out)
    assert code == 0 and "computes what" in text


def test_check_exits_1_on_errors_and_0_on_notes(draft, tmp_path, capsys):
    convert.write(draft, "run", tmp_path)
    fixture.edit_config(tmp_path, tie_word_embeddings=True)
    code, text, _ = run(capsys, "check", tmp_path)
    assert code == 1 and "1 error" in text
    code, text, _ = run(capsys, "check", tmp_path, "--json")
    (finding,) = json.loads(text)
    assert code == 1 and finding["where"] == "config.json: tie_word_embeddings"
    fixture.edit_config(tmp_path, tie_word_embeddings=False, torch_dtype=..., dtype=...)
    assert run(capsys, "check", tmp_path)[0] == 0


def test_parity_exits_1_and_names_the_first_stage(draft, tmp_path, capsys):
    convert.write(draft, "run", tmp_path)
    fixture.edit_config(tmp_path, rms_norm_eps=0.1)
    code, text, _ = run(capsys, "parity", tmp_path / "run", tmp_path)
    assert code == 1 and "first difference: input_layernorm of the prefill" in text


def test_what_a_person_can_fix_is_one_line_and_exit_code_2(draft, tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("")
    for arguments, words in (
        (["check", tmp_path / "nowhere"], "nowhere/config.json: not found"),
        (["convert", "run", tmp_path], "not an earlier export"),
    ):
        code, out, err = run(capsys, *arguments)
        assert (
            code == 2 and out == "" and err.startswith("bridge: ") and words in err and err.count("\n") == 1
        )
    assert run(capsys, "convert", "RUN", "OUT", "--step", "x")[0] == 2
    assert run(capsys, "chekc")[0] == 2
    assert (tmp_path / "mine.txt").exists()


def test_convert_and_check_need_no_torch_and_parity_says_that_it_does(draft, tmp_path, capsys):
    convert.write(draft, "run", tmp_path)
    code = f"""
import sys
sys.modules["torch"] = None
import bridge.convert, bridge.parity, bridge.reference, bridge.check, bridge.cli
try:
    bridge.reference.Reference({str(tmp_path)!r})
except bridge.reference.UserError as error:
    print(error)
bridge.cli.main(["check", {str(tmp_path)!r}])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("PyTorch is missing: pip install 'eagle3-jax[bridge]'")
    assert "every tensor loads" in done.stdout
