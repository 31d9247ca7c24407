import json

import pytest

from eagle3_jax.data.conversations import read, reasons_of
from eagle3_jax.errors import DataError


def chat(*texts, first="human", second="gpt", name="a_0"):
    turns = [{"from": (first, second)[i % 2], "value": t} for i, t in enumerate(texts)]
    return {"id": name, "conversations": turns}


def write(path, records, lines=False):
    text = "\n".join(map(json.dumps, records)) + "\n" if lines else json.dumps(records, indent=2)
    path.write_text(text)
    return path


@pytest.mark.parametrize("lines", [False, True])
def test_both_dialects_give_the_same_turns_from_arrays_and_from_lines(tmp_path, lines):
    openai = {
        "id": "a_0",
        "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
    }
    parts = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}, *openai["messages"][1:]]
    }
    found = read(write(tmp_path / "f", [chat("q", "a"), openai, parts], lines)).conversations
    assert {c.turns for c in found} == {(("user", "q"), ("assistant", "a"))}
    assert [c.id for c in found] == ["a_0", "a_0", "record-2"]


@pytest.mark.parametrize("user", ["human", "user", "Human"])
@pytest.mark.parametrize("assistant", ["gpt", "chatgpt", "bing", "bard", "assistant"])
def test_every_role_name_of_real_files_is_known(tmp_path, user, assistant):
    record = chat("q", "a", first=user, second=assistant)
    record["conversations"].insert(0, {"from": "system", "value": "s"})
    found = read(write(tmp_path / "f", [record])).conversations[0]
    assert [role for role, _ in found.turns] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    "record, reason",
    [
        (chat(), "empty"),
        (chat("", " \n"), "empty"),
        (chat("a", "q", "a", first="gpt", second="human"), "assistant first"),
        (chat("q"), "no assistant turn"),
        (chat("q", "q", second="human"), "no assistant turn"),
        (chat("s", first="system"), "no user turn"),
        ({"messages": [*chat("q", "a")["conversations"], {"from": "gpt", "value": "a"}]}, "not alternating"),
        (dict(messages=[dict(role=r, content="x") for r in ("user", "system", "assistant")]), "not alternating"),
        (chat("q", "", "q", "a"), "blank turn"),
        (chat("q", "a", second="tool"), "unknown role"),
        (chat("q", None), "malformed"),
        (chat("q", "half \ud83d"), "malformed"),
        ({"conversations": ["q", "a"]}, "malformed"),
        ({"conversations": "q"}, "malformed"),
        ({"text": "q"}, "malformed"),
        (["q"], "malformed"),
        ({"conversations": [{"value": "q"}]}, "malformed"),
    ],
)  # fmt: skip
def test_a_conversation_that_cannot_be_used_is_refused_by_name(tmp_path, record, reason):
    reading = read(write(tmp_path / "f", [chat("q", "a"), record]))
    assert [(r.index, r.reason) for r in reading.refused] == [(1, reason)]
    assert reasons_of(reading.refused) == {reason: 1}
    assert len(reading.conversations) == 1 and reading.complete == 2


def test_an_open_question_and_a_blank_answer_at_the_end_are_dropped(tmp_path):
    for tail in (("q2",), ("q2", " ")):
        found = read(write(tmp_path / "f", [chat("q", "a", *tail)])).conversations[0]
        assert found.turns == (("user", "q"), ("assistant", "a"))


def test_for_prompts_only_the_first_question_counts(tmp_path):
    records = [
        chat("q"),
        chat("q", "a", "q2", ""),
        chat("", "a", "q"),
        chat("a", "q", first="gpt", second="human"),
    ]
    reading = read(write(tmp_path / "f", records), part="prompt")
    assert [c.turns for c in reading.conversations] == [(("user", "q"),)] * 2
    assert [r.reason for r in reading.refused] == ["blank turn", "assistant first"]


def test_for_questions_all_turns_up_to_the_last_one_count(tmp_path):
    records = [
        chat("q"),
        chat("q", "a", "r"),
        chat("q", "a", "r", "b"),
        chat("q", "a", ""),
        chat("q", "", "r"),
    ]
    reading = read(write(tmp_path / "f", records), part="questions")
    whole = (("user", "q"), ("assistant", "a"), ("user", "r"))
    assert [c.turns for c in reading.conversations] == [whole[:1], whole, whole, whole[:1]]
    assert [r.reason for r in reading.refused] == ["blank turn"]


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_file_cut_at_any_byte_keeps_exactly_its_whole_conversations(tmp_path, bom):
    records = [chat("q €", 'a "quoted" [{'), chat("q2", "a2"), chat("q3", "ä")]
    pieces = [json.dumps(r, ensure_ascii=False).encode() for r in records]
    whole = bom + b"[\n" + b",\n".join(pieces) + b"\n]"
    ends = [whole.index(p) + len(p) for p in pieces]
    path = tmp_path / "f"
    for cut in range(ends[0], len(whole)):
        path.write_bytes(whole[:cut])
        reading = read(path)
        kept = sum(end <= cut for end in ends)
        assert (len(reading.conversations), reading.complete) == (kept, kept)
        assert reading.end == ends[kept - 1] and reading.size == cut
        assert reading.damage == "cut off" or "not UTF-8" in reading.damage
    path.write_bytes(whole)
    assert read(path, strict=True).damage is None


def test_strict_refuses_a_damaged_file_and_says_where(tmp_path):
    path = write(tmp_path / "f", [chat("q", "a"), chat("q2", "a2")])
    path.write_text(path.read_text()[:-60])
    with pytest.raises(
        DataError, match=r"cut off; the last of 1 whole conversations ends at byte \d+ of \d+"
    ):
        read(path, strict=True)


def test_a_wrong_line_is_refused_and_the_lines_after_it_are_kept(tmp_path):
    path = tmp_path / "f"
    good = json.dumps(chat("q", "a\u2028b"), ensure_ascii=False)
    path.write_text(f"{good}\n{{oops\n\n{good}\n{good[:-5]}")
    reading = read(path)
    assert len(reading.conversations) == 2 and reading.conversations[0].turns[1][1] == "a\u2028b"
    assert [(r.reason, r.detail) for r in reading.refused] == [("malformed", "line 2 is not JSON")]
    assert reading.damage == "line 2 is not JSON"
    assert reading.end == len(f"{good}\n{{oops\n\n{good}".encode())


@pytest.mark.parametrize(
    "text", ["", "  \n", "[]", "nonsense", "[" * 100_000, '[{"id": 1, "conversations": []}]']
)
def test_a_file_without_conversations_is_an_error(tmp_path, text):
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(DataError, match="no usable conversation"):
        read(path)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        read(tmp_path / "f")
