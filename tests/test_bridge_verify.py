"""`bridge verify` around the server: what is equal, and what it says where it is not. The real one: tests/engines."""

import copy
import json

import pytest
from test_bridge_cli import run

from bridge import sglang, verify
from eagle3_jax.errors import ConfigError

SETTINGS = dict(steps=2, topk=2, tokens=4, max_new_tokens=5, dtype="float32", prompts=1)
ANSWER = {
    "id": "q1", "prompt": [3, 4], "tokens": [7, 8, 9, 5, 6], "scores": [[2.0, 1, 1.0]] * 4 + [[2.0, 3, 1.999]],
    "rounds": [
        dict(n=2, bonus=7, drafts=[8, 1, 9], parents=[0, 0, 1], accepted=2, emitted=[8, 9, 5]),
        dict(n=5, bonus=5, drafts=[2, 6, 3], parents=[0, 0, 2], accepted=1, emitted=[6, 4]),
    ],
}  # fmt: skip
RESULT = dict(settings=SETTINGS, step=10, target="some/target", verify_forwards=2)
# What the stand-in writes of these rounds: first children and next siblings.
TRACE = """\
{"tokens": [7, 8, 1, 9], "child": [1, 3, -1, -1], "sibling": [-1, 2, -1, -1], "accepted": 2, "bonus": 5}
{"tokens": [5, 2, 6, 3], "child": [1, -1, 3, -1], "sibling": [-1, 2, -1, -1], "accepted": 1, "bonus": 4}
"""


def served(**changes) -> dict:
    found = dict(
        accept_length=2.5, sglang_request=2.5, sglang_server=2.5, verify_forwards=2, accepted_drafts=3,
        tokens=[list(ANSWER["tokens"])], rounds=sglang.read_trace(TRACE), pairs=[[3, 2]],
    )  # fmt: skip
    return copy.deepcopy(found | changes)


def test_a_trace_gives_the_rounds_of_the_decoder():
    told = [{k: r[k] for k in verify.ROUND} for r in ANSWER["rounds"]]
    assert sglang.read_trace(TRACE) == told
    assert sglang.read_trace("") == []


def test_equal_answers_are_equal():
    report = verify.compare(RESULT, [ANSWER], served(), "float32")
    assert report.ok and (report.prompts, report.rounds, report.proposals) == (1, 2, 6)
    assert "1 of 1 prompts equal in every proposal" in str(report) and "2-2-4" in str(report)


def _round(index: int, **fields):
    return lambda found: found["rounds"][index].update(fields)


def _token(index: int, token: int):
    return lambda found: found["tokens"][0].__setitem__(index, token)


FAULTS = {
    "another draft": (
        _round(1, drafts=[2, 6, 4]),
        "nothing like round 1: bonus 5, drafts [2, 6, 3], parents [0, 0, 2]",
    ),
    "another tree": (_round(0, parents=[0, 0, 2]), "nothing like round 0"),
    "another count": (_round(0, accepted=1), "nothing like round 0"),
    "another bonus": (_round(1, bonus=1), "nothing like round 1"),
    "a round less": (lambda f: f["rounds"].pop(), "nothing like round 1"),
    "other counts": (
        lambda f: f.update(pairs=[[3, 3]]),
        "accepted drafts and verifies: ours [3, 2], SGLang [3, 3]",
    ),
    "another token": (_token(4, 1), "token 4: ours 6, SGLang 1\n"),
    "the runner-up": (_token(4, 3), "token 4: ours 6, SGLang 3, of logits 5e-04 apart"),
    "a token more": (lambda f: f["tokens"][0].append(1), "ours has 5 tokens, SGLang 6"),
}


def test_a_round_that_two_prompts_share_has_to_be_there_twice():
    twice, found = [ANSWER, ANSWER | {"id": "q2"}], served()
    found |= {"tokens": found["tokens"] * 2, "pairs": found["pairs"] * 2, "rounds": found["rounds"] * 2}
    assert not verify.compare(RESULT, twice, found, "float32").differences
    found["rounds"].pop()
    (only,) = verify.compare(RESULT, twice, found, "float32").differences
    assert only.prompt == "q2" and "nothing like round 1" in only.what


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_difference_is_named(fault):
    change, said = FAULTS[fault]
    found = served()
    change(found)
    report = verify.compare(RESULT, [ANSWER], found, "float32")
    assert not report.ok and said in f"{report}\n" and "0 of 1 prompts equal" in str(report)


@pytest.mark.parametrize("key", verify.COUNTERS)
def test_each_counter_has_to_be_equal(key):
    found = served()
    assert not verify.compare(RESULT, [ANSWER], found | {key: found[key] + 1}, "float32").ok


def test_a_run_that_was_not_evaluated_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match=r"evaluate\.json: not found; `eagle3 evaluate .*` writes it"):
        verify.evaluated(tmp_path)
    (tmp_path / verify.RESULT).write_text(json.dumps(RESULT))
    (tmp_path / verify.ANSWERS).write_text(json.dumps(ANSWER) + "\n")
    assert verify.evaluated(tmp_path) == (RESULT, [ANSWER])
    (tmp_path / verify.ANSWERS).write_text("")
    with pytest.raises(ConfigError, match="0 rounds in one, 2 in the other"):
        verify.evaluated(tmp_path)
    code, _, said = run(capsys, "verify", tmp_path)
    assert code == 2 and said.startswith("bridge: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "dtype, found, code",
    [("float32", {}, 0), ("float32", {"tokens": [[7]]}, 1), ("bfloat16", {"tokens": [[7]]}, 0)],
)
def test_only_in_the_same_dtype_a_difference_fails(dtype, found, code, monkeypatch, capsys, tmp_path):
    report = verify.compare(RESULT, [ANSWER], served(**found), dtype)
    monkeypatch.setattr(verify, "verify", lambda run, **options: report)
    exit_code, text, _ = run(capsys, "verify", tmp_path)
    assert exit_code == code and ("only claimed in float32" in text) == (dtype != "float32")
