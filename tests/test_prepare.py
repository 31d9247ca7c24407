import json

import numpy as np
import pytest
from toy_tokenizer import CHATML, INST, tokenizer

from eagle3_jax import config
from eagle3_jax.data import chat
from eagle3_jax.data.conversations import read
from eagle3_jax.data.prepare import load, prepare
from eagle3_jax.data.split import held_out
from eagle3_jax.errors import DataError

PROMPT = "Compose an engaging travel blog post about a recent trip to Hawaii"


@pytest.fixture
def tok():
    return tokenizer(CHATML)


def talk(i, question="Question {}?", answer="Answer {}."):
    turns = [("human", question.format(i)), ("gpt", answer.format(i)), ("human", "More"), ("gpt", "No")]
    return {"id": f"c{i}_0", "conversations": [{"from": r, "value": t} for r, t in turns]}


def run(tmp_path, records, **data):
    seed = data.pop("seed", 0)
    path = tmp_path / "source.json"
    if records is not None:
        path.write_text(json.dumps(records))
    tree = dict(
        target=dict(path="t"),
        data=dict(path=str(path), prepared=str(tmp_path / "prepared"), max_length=200) | data,
        draft=dict(vocab_size=8),
        train=dict(mode="online", run="r", steps=1, batch=1, row_length=256, learning_rate=0.1, save_every=1)
        | dict(seed=seed),
    )
    return config.from_dict(tree)


def test_what_is_written_is_what_the_template_encodes(tmp_path, tok):
    records = [talk(i) for i in range(30)]
    card = prepare(run(tmp_path, records, held_out=0.3), tok, [PROMPT])
    found = load(tmp_path / "prepared", verify=True)
    assert (found.ids.dtype, found.span.dtype, found.offsets.dtype) == (np.int32, np.int32, np.int64)
    wanted = {}
    for r in records:
        turns = tuple((("user", "assistant")[i % 2], t["value"]) for i, t in enumerate(r["conversations"]))
        ids, span = chat.encode(tok, turns)
        wanted[tuple(ids.tolist())] = span.tolist()
    bounds = list(zip(found.offsets[:-1], found.offsets[1:], strict=True))
    assert {tuple(found.ids[a:b].tolist()): found.span[a:b].tolist() for a, b in bounds} == wanted
    assert card == found.card
    source = read(tmp_path / "source.json").conversations
    held = {
        tuple(chat.encode(tok, c.turns)[0]) for c, h in zip(source, held_out(source, 0.3), strict=True) if h
    }
    assert {tuple(found.ids[a:b]) for (a, b), h in zip(bounds, found.held_out, strict=True) if h} == held
    assert card["conversations"] == 30 == len(found.held_out)
    assert card["tokens"] == len(found.ids) and card["supervised"] == np.count_nonzero(found.span)
    assert card["held_out"]["conversations"] == found.held_out.sum() > 0


def test_refused_conversations_are_counted_and_listed_by_their_place_in_the_file(tmp_path, tok):
    bad = {"id": "b", "conversations": []}
    records = [talk(0), bad, talk(1, question="x" * 300), talk(2), talk(3, question=PROMPT + " {}")]
    card = prepare(run(tmp_path, records), tok, [PROMPT])
    lines = [json.loads(line) for line in (tmp_path / "prepared" / "refused.jsonl").read_text().splitlines()]
    reasons = ["empty", "no answer within max_length", "holds an evaluation prompt"]
    assert [(r["index"], r["reason"]) for r in lines] == list(zip((1, 2, 4), reasons, strict=True))
    assert card["refused"] == dict.fromkeys(reasons, 1) and card["conversations"] == 2
    assert card["contamination"]["dropped"] == 1 and card["contamination"]["max_overlap"] == 0.0
    assert (card["contamination"]["prompts"], card["file"]["complete"]) == (1, 5)


def test_a_second_run_reuses_the_directory_and_any_change_prepares_again(tmp_path, tok, capsys):
    directory = tmp_path / "prepared"

    def writes(settings, prompts=(PROMPT,), t=tok):
        before = (directory / "data.json").stat().st_ino if directory.exists() else None
        (tmp_path / "hold").unlink(missing_ok=True)
        if before:
            (tmp_path / "hold").hardlink_to(directory / "data.json")  # keeps the inode from being used again
        prepare(settings, t, prompts)
        return (directory / "data.json").stat().st_ino != before

    records = [talk(i) for i in range(8)]
    assert writes(run(tmp_path, records))
    assert not writes(run(tmp_path, records))
    assert "is up to date" in capsys.readouterr().err
    assert writes(run(tmp_path, records, max_length=90))
    assert writes(run(tmp_path, records, max_length=90, seed=1))
    assert writes(run(tmp_path, records, max_length=90, seed=1), prompts=["other"])
    assert writes(run(tmp_path, records[1:], max_length=90, seed=1), prompts=["other"])
    assert writes(
        run(tmp_path, None, max_length=90, seed=1),
        prompts=["other"],
        t=tokenizer(CHATML.replace("kind", "good")),
    )
    last = run(tmp_path, None, max_length=90, seed=1)
    assert writes(last)
    damaged = np.load(directory / "ids.npy")
    damaged[3] += 1
    np.save(directory / "ids.npy", damaged)
    with pytest.raises(DataError, match="its arrays are not those"):
        load(directory, verify=True)
    assert writes(last)
    (directory / "span.npy").unlink()
    assert writes(last)


def test_limits_take_a_sample_that_the_seed_decides(tmp_path, tok):
    records = [talk(i) for i in range(40)]

    def ids(**kwargs):
        prepare(run(tmp_path, records, **kwargs), tok, [])
        found = load(tmp_path / "prepared")
        return found.ids.tolist(), np.diff(found.offsets)

    whole, sizes = ids()
    some, few = ids(max_conversations=10)
    assert len(few) == 10 and whole[: len(some)] == some
    some, few = ids(max_tokens=int(sizes[:4].sum()) + 1)
    assert len(few) == 5 and whole[: len(some)] == some
    assert ids(max_conversations=10, seed=1)[0] != ids(max_conversations=10)[0]
    numbers = [i for i in range(40) if tok.decode(whole).find(f"Question {i}?") < len(tok.decode(whole)) / 2]
    assert numbers != list(range(20))


def test_the_split_does_not_hang_on_the_limits(tmp_path, tok):
    records = [talk(i) for i in range(40)]
    prepare(run(tmp_path, records, held_out=0.3), tok, [])
    whole = np.array(load(tmp_path / "prepared").held_out)
    prepare(run(tmp_path, records, held_out=0.3, max_conversations=15), tok, [])
    assert load(tmp_path / "prepared").held_out.tolist() == whole[:15].tolist()


def test_for_the_targets_answers_only_prompts_are_written(tmp_path, tok):
    records = [talk(0), talk(1, question="x" * 150), {"conversations": talk(2)["conversations"][:1]}]
    card = prepare(run(tmp_path, records, answers="target", max_new_tokens=64), tok, [])
    found = load(tmp_path / "prepared")
    texts = {tok.decode(found.ids[a:b]) for a, b in zip(found.offsets[:-1], found.offsets[1:], strict=True)}
    wanted = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nQuestion {}?<|im_end|>\n<|im_start|>assistant\n"
    assert texts == {wanted.format(0), wanted.format(2)}
    assert not found.span.any() and card["supervised"] == 0 and card["answers"] == "target"
    assert card["refused"] == {"prompt too long": 1}


def test_a_template_that_refuses_a_conversation_costs_only_that_one(tmp_path):
    system = {"conversations": [{"from": "system", "value": "s"}, *talk(1)["conversations"]]}
    card = prepare(run(tmp_path, [talk(0), system]), tokenizer(INST), [])
    assert card["conversations"] == 1 and card["refused"] == {"chat template": 1}


def test_data_without_a_supervised_token_is_refused(tmp_path, tok):
    with pytest.raises(
        DataError, match=r"no supervised token is left of 3 conversations .*data.max_length=20 too short"
    ):
        prepare(run(tmp_path, [talk(i) for i in range(3)], max_length=20), tok, [])
    with pytest.raises(DataError, match="no prompt is left of 3 conversations"):
        prepare(run(tmp_path, [talk(i) for i in range(3)], answers="target", max_length=100), tok, [])
    assert not (tmp_path / "prepared").exists()


def test_a_token_beyond_the_targets_vocabulary_is_refused(tmp_path, tok):
    with pytest.raises(DataError, match=r"token id \d+ is outside the target's vocabulary 0 .. 99"):
        prepare(run(tmp_path, [talk(0)]), tok, [], vocab_size=100)


def test_a_file_that_cannot_be_split_says_so(tmp_path, tok):
    records = [talk(i) | {"id": f"chat_{i}"} for i in range(40)]
    with pytest.raises(
        DataError, match=r"data.held_out=0.3 left no conversation out of 40: they share one id"
    ):
        prepare(run(tmp_path, records, held_out=0.3), tok, [])
    prepare(run(tmp_path, records, held_out=0), tok, [])


def test_strict_refuses_a_cut_file_and_a_missing_one_is_named(tmp_path, tok):
    settings = run(tmp_path, [talk(i) for i in range(4)], strict=True)
    path = tmp_path / "source.json"
    path.write_text(path.read_text()[:-30])
    with pytest.raises(DataError, match="cut off"):
        prepare(settings, tok, [])
    path.unlink()
    with pytest.raises(DataError, match=r"data.path=.*no such file"):
        prepare(settings, tok, [])


def test_a_directory_that_is_not_prepared_is_refused(tmp_path, tok):
    with pytest.raises(DataError, match="not a prepared data set"):
        load(tmp_path)
    prepare(run(tmp_path, [talk(0)]), tok, [])
    card = json.loads((tmp_path / "prepared" / "data.json").read_text())
    card["request"]["schema"] = 99
    (tmp_path / "prepared" / "data.json").write_text(json.dumps(card))
    with pytest.raises(DataError, match="schema 99, 1 was wanted"):
        load(tmp_path / "prepared")
