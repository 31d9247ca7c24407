"""The target's own answers as a data set: whose tokens they are, and that stops and batches change nothing."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny
from toy_tokenizer import THINKING, tokenizer

from eagle3_jax import axes, commands, tensors
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat, prepare, regenerate, written
from eagle3_jax.decode.writer import Writer
from eagle3_jax.errors import DataError
from eagle3_jax.train import setup

SETTINGS = (
    "regenerate={path: FILE, max_new_tokens: 12, batch: 2}",
    "data.max_length=150",
    "train.row_length=150",
)
SAMPLED = (
    "regenerate.turns=first",
    "regenerate.temperature=0.9",
    "regenerate.top_p=0.9",
    "regenerate.seed=5",
)


@pytest.fixture(scope="module", autouse=True)
def compile_once():
    """One writer for all calls that need the same programs: the targets are alike, their weights are arguments."""
    made = {}

    def writer(target, mesh, *, features, sampling, room):
        found = made.setdefault((mesh, sampling), Writer(target, mesh, features=features, sampling=sampling))
        found.room = room
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(regenerate, "Writer", writer)
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A project whose target ends an answer now and then."""
    root = tiny.project(tmp_path_factory.mktemp("project"))
    weights = dict(tensors.read(root / "target"))
    end = chat.end_of_turn(setup.tokenizer(files(root)))
    weights["lm_head.weight"] = weights["lm_head.weight"].copy()
    weights["lm_head.weight"][end] *= 3
    tensors.save(root / "target" / tensors.FILE, weights)
    return root


def files(root: Path) -> setup.TargetFiles:
    return setup.find_target(tiny.config(root))


def config(root: Path, file: Path, *overrides: str) -> RunConfig:
    return tiny.config(root, SETTINGS[0].replace("FILE", str(file)), *SETTINGS[1:], *overrides)


def run(root: Path, file: Path, *overrides: str) -> list[dict]:
    commands.regenerate(config(root, file, *overrides))
    return records(file)


def records(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def greedy(root) -> Path:
    run(root, root / "greedy.jsonl")
    return root / "greedy.jsonl"


@pytest.fixture(scope="module")
def sampled(root) -> Path:
    run(root, root / "sampled.jsonl", *SAMPLED)
    return root / "sampled.jsonl"


def test_every_question_is_answered_and_all_else_stays(root, greedy):
    source = {c["id"]: c["conversations"] for c in json.loads((root / "chats.json").read_text())}
    found = {r["id"]: r for r in records(greedy)}
    assert found.keys() == source.keys()
    turns = []
    for name, record in found.items():
        asked = [t["value"] for t in source[name] if t["from"] == "human"]
        messages = record["messages"]
        assert [m["content"] for m in messages if m["role"] == "user"] == asked[: len(messages) // 2]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        assert len(record["spans"]) == len(messages) // 2
        turns.append((len(asked), len(messages) // 2))
    assert (2, 2) in turns and (1, 1) in turns


def test_tokens_are_the_templates_around_what_was_written(root, greedy):
    """Some answers end by themselves, others are cut: only the former's spans hold an end of turn."""
    tok = setup.tokenizer(files(root))
    end, kinds = chat.end_of_turn(tok), set()
    for record in records(greedy):
        ids, text = record["token_ids"], ""
        rendered = tok.apply_chat_template(record["messages"], tokenize=False)
        for first, last in record["spans"]:
            answer = ids[first:last]
            kinds.add((answer[-1] == end, last == len(ids)))
            assert end not in answer[:-1] and (answer[-1] == end or len(answer) == 12)
        text = tok.decode(ids)
        # White space around an answer is all that its message lacks; a cut answer at the end has no end of turn.
        squeezed = "".join(text.split()), "".join(rendered.split())
        assert squeezed[1].removeprefix(squeezed[0]) in ("", "<|im_end|>")
    assert kinds == {(a, b) for a in (True, False) for b in (True, False)}


def test_prepared_tokens_are_those_of_the_file_and_each_is_the_targets_choice(root, greedy, tmp_path):
    settings = config(root, greedy, f"data.path={greedy}", f"data.prepared={tmp_path / 'd'}")
    card = commands.prepare_data(settings)
    found = prepare.load(tmp_path / "d")
    wanted = {tuple(r["token_ids"]): r["spans"] for r in records(greedy)}
    assert (
        card["regenerated"]["exact"] == card["conversations"] == len(wanted)
        and not card["regenerated"]["why"]
    )
    assert card["regenerated"]["temperature"] == 0 and "exact tokens of 24" in commands.describe(card)
    target, params = setup.load_target(settings, files(root), axes.make_mesh())
    run = jax.jit(
        lambda ids, place: target.top_and_lse(params, target.features(params, ids, place, place * 0)[1])[0]
    )
    for a, b in zip(found.offsets, found.offsets[1:], strict=False):
        ids, span = np.array(found.ids[a:b]), np.array(found.span[a:b])
        spans = wanted.pop(tuple(ids.tolist()))
        assert [np.flatnonzero(span == i + 1)[[0, -1]].tolist() for i in range(len(spans))] == [
            [x, y - 1] for x, y in spans
        ]
        padded = np.pad(ids, (0, 150 - len(ids)))[None]
        top = np.asarray(run(padded, np.arange(150)[None]))[0]
        taught = np.flatnonzero(span)
        np.testing.assert_array_equal(top[taught - 1], ids[taught])
    assert not wanted


@pytest.mark.parametrize("kind", ["greedy", "sampled"])
def test_a_stop_anywhere_changes_no_byte(kind, root, request, tmp_path):
    """In the middle of a line, and after a line in the middle of what is written together."""
    whole = request.getfixturevalue(kind)
    lines = whole.read_bytes().splitlines(keepends=True)
    file, overrides = tmp_path / "part.jsonl", SAMPLED if kind == "sampled" else ()
    written.settings_path(file).write_text(written.settings_path(whole).read_text())
    for kept, torn in ((9, b""), (23, lines[23][:-1])):
        file.write_bytes(b"".join(lines[:kept]) + torn)
        run(root, file, *overrides)
        assert file.read_bytes() == whole.read_bytes()


def test_other_batches_give_the_same_tokens(root, sampled, tmp_path):
    assert run(root, tmp_path / "a.jsonl", *SAMPLED, "regenerate.batch=5", "mesh.data=2") == records(sampled)


def test_a_file_is_continued_where_more_conversations_are_wanted(root, greedy, tmp_path):
    some = run(root, tmp_path / "a.jsonl", "regenerate.max_conversations=11")
    assert some == records(greedy)[:11]
    assert run(root, tmp_path / "a.jsonl") == records(greedy)


def test_sampled_answers_are_others_and_not_all_alike(greedy, sampled):
    pairs = list(zip(records(greedy), records(sampled), strict=True))
    assert sum(a["token_ids"] != b["token_ids"] for a, b in pairs) > 20
    assert len({b["messages"][1]["content"] for _, b in pairs}) == len(pairs)


def test_only_first_turns(root, greedy, tmp_path):
    some = run(root, tmp_path / "a.jsonl", "regenerate.turns=first", "data.max_conversations=8")
    assert [r["messages"] for r in some] == [r["messages"][:2] for r in records(greedy)[:8]]


def test_a_conversation_without_room_ends_at_its_last_answer(root, greedy, tmp_path):
    longest = max(len(r["token_ids"]) for r in records(greedy))
    some = run(
        root, tmp_path / "a.jsonl", f"data.max_length={longest - 8}", "regenerate.max_conversations=24"
    )
    whole = {r["id"]: r for r in records(greedy)}
    for r in some:
        assert r["token_ids"] == whole[r["id"]]["token_ids"][: r["spans"][-1][1]]
        assert len(r["token_ids"]) <= longest - 8 and r["spans"] == whole[r["id"]]["spans"][: len(r["spans"])]
    assert {len(r["spans"]) for r in some if len(whole[r["id"]]["spans"]) == 2} == {1, 2}


def test_a_blank_answer_is_left_out_and_ends_the_conversation(root, greedy, tmp_path, monkeypatch):
    said = chat.written
    monkeypatch.setattr(chat, "written", lambda tok, ids: said(tok, ids) if ids[0] % 3 else "")
    kept = []
    for got, whole in zip(run(root, tmp_path / "a.jsonl"), records(greedy), strict=True):
        good = [whole["token_ids"][first] % 3 != 0 for first, _ in whole["spans"]]
        count = [*good, False].index(False)
        assert got["spans"] == whole["spans"][:count] and len(got["messages"]) == max(2 * count, 1)
        end = whole["spans"][count - 1][1] if count else whole["spans"][0][0]
        assert got["token_ids"] == whole["token_ids"][:end]
        kept.append((count, len(good)))
    assert {(0, 1), (1, 2), (2, 2)} <= set(kept)


def test_without_its_settings_tokenizer_or_words_the_text_is_tokenised(root, greedy, tmp_path):
    tok, name = setup.tokenizer(files(root)), tmp_path / "copy.jsonl"
    edited = records(greedy)
    edited[0]["messages"][-1]["content"] = "Something else."
    edited[1]["spans"] = [[5, 3]]
    name.write_text("\n".join(map(json.dumps, edited)))
    settings = written.settings(greedy)

    def made(t=tok):
        card = prepare.prepare(
            config(root, greedy, f"data.path={name}", f"data.prepared={tmp_path / 'd'}"),
            t,
            [],
            vocab_size=tiny.V,
        )
        return card, prepare.load(tmp_path / "d")

    def texts(found):
        return {
            tuple(found.ids[a:b].tolist()) for a, b in zip(found.offsets, found.offsets[1:], strict=False)
        }

    turns = [tuple((m["role"], m["content"]) for m in r["messages"]) for r in edited]
    encoded = [tuple(chat.encode(tok, t, 150)[0].tolist()) for t in turns]
    card, found = made()
    assert "regenerated" not in card and texts(found) == set(encoded)
    written.settings_path(name).write_text(json.dumps(settings))
    card, found = made()
    assert (card["regenerated"]["exact"], card["regenerated"]["why"]) == (22, "edited since")
    assert texts(found) == {*encoded[:2], *(tuple(r["token_ids"]) for r in edited[2:])}
    card, _ = made(tokenizer(THINKING))
    assert card["regenerated"]["exact"] == 0 and "another tokenizer" in commands.describe(card)


def test_a_template_that_rewrites_answers_ends_the_conversation_there(root, tmp_path):
    """The thought of an earlier answer is dropped by the template: what follows would be asked of another text."""
    tok = tokenizer(THINKING)
    turns = (("user", "q"), ("assistant", "<think>hm</think>one"), ("user", "r"))
    with pytest.raises(chat.TemplateRefusalError, match="drops or rewrites an earlier answer"):
        chat.following(tok, turns, closed=True)
    plain = (("user", "q"), ("assistant", "one"), ("user", "r"))
    whole = chat.prompt(tok, plain).tolist()
    head = chat.prompt(tok, plain[:1]).tolist() + tok("one<|im_end|>")["input_ids"][1:]
    assert head + chat.following(tok, plain, closed=True).tolist() == whole
    assert head[:-1] + chat.following(tok, plain, closed=False).tolist() == whole


def test_other_settings_and_other_files_are_refused(root, greedy, tmp_path):
    before = greedy.read_bytes()
    for override, text in (
        ("regenerate.temperature=0.5", "written with temperature=0.0, now 0.5"),
        ("train.seed=1", "written with order=0, now 1"),
    ):
        with pytest.raises(DataError, match=text):
            run(root, greedy, override)
    assert greedy.read_bytes() == before
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match="did not write; name another one"):
        run(root, tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "mine"
