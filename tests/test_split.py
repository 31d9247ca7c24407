import numpy as np
import pytest

from eagle3_jax.data.conversations import Conversation
from eagle3_jax.data.split import EvaluationPrompts, assert_clean, contaminated, held_out
from eagle3_jax.errors import DataError


def talk(name, *questions):
    turns = [turn for q in questions for turn in (("user", q), ("assistant", "a"))]
    return Conversation(name, tuple(turns))


def plain(n):
    return [talk(f"chat{i}_0", f"question number {i}") for i in range(n)]


def test_parts_duplicates_and_chains_of_them_never_straddle_the_split():
    groups = []
    for i in range(60):
        groups += [
            [talk(f"part{i}_0", f"p {i}"), talk(f"part{i}_17", f"other {i}")],
            [talk(f"dup{i}_0", f"Same, question: {i}!"), talk(f"again{i}", f" same question {i}\n")],
            [
                talk(f"x{i}_0", f"start {i}"),
                talk(f"y{i}_0", f"Start {i}?"),
                talk(f"y{i}_1", f"middle {i}"),
                talk(f"z{i}", f"middle {i}", f"start {i + 1}"),
            ],
        ]
    members = [(g, c) for g, group in enumerate(groups) for c in group]
    order = np.random.default_rng(0).permutation(len(members))
    side = held_out([members[i][1] for i in order], 0.4)
    assert held_out([c for _, c in members], 0.4)[order].tolist() == side.tolist()
    by_group = {}
    for i, held in zip(order, side, strict=True):
        by_group.setdefault(members[i][0], set()).add(bool(held))
    assert all(len(sides) == 1 for sides in by_group.values())
    assert {s for sides in by_group.values() for s in sides} == {True, False}


def test_the_share_is_as_asked_and_does_not_hang_on_the_order():
    chats = plain(4000)
    side = held_out(chats, 0.1)
    assert side.dtype == bool and 0.08 < side.mean() < 0.12
    assert held_out(chats[::-1], 0.1)[::-1].tolist() == side.tolist()
    assert not held_out(chats, 0.0).any()
    assert held_out(chats, 0.2)[side].all()  # a larger share holds the smaller one


def test_one_huge_group_is_not_the_validation_set():
    for opening in range(30):
        chats = [talk(f"c{opening}-{i}", f"continue {opening}") for i in range(200)] + plain(200)
        side = held_out(chats, 0.1)
        assert not side[:200].any() and 5 < side[200:].sum() < 50


PROMPT = "Compose an engaging travel blog post about a recent trip to Hawaii, highlighting cultural events and food"


@pytest.mark.parametrize(
    "question, hit",
    [
        (PROMPT, True),
        (PROMPT.upper().replace(",", " -- "), True),
        ("Please! " + PROMPT + " and must-see attractions", True),
        (" ".join(PROMPT.split()[:12]) + " and so on", False),  # 5 of its 10 grams: half is allowed
        (" ".join(PROMPT.split()[:13]) + " and so on", True),
        (" ".join(reversed(PROMPT.split())), False),
        ("x = 3?", True),
        ("So what if x = 3?", False),
    ],
)
def test_an_evaluation_prompt_is_found_in_any_user_turn(question, hit):
    prompts = EvaluationPrompts([PROMPT, "X = 3?"])
    chats = [talk("a", "hello", question), talk("b", "hello")]
    assert contaminated(chats, prompts).tolist() == [hit, False]
    assert prompts.overlap(Conversation("c", (("user", "hi"), ("assistant", question)))) == 0.0


def test_the_overlap_is_measured_inside_one_turn():
    words = PROMPT.split()
    prompts = EvaluationPrompts([PROMPT])
    assert prompts.overlap(talk("a", " ".join(words[:11]))) == 4 / 10
    assert prompts.overlap(talk("a", " ".join(words[:11]), " ".join(words[7:]))) == 4 / 10


def test_training_on_unchecked_or_spoiled_data_is_refused():
    prompts = EvaluationPrompts([PROMPT, "x"])
    record = {"prompts": 2, "digest": prompts.digest, "max_overlap": 0.5}
    assert_clean(record, ["X!", PROMPT])
    with pytest.raises(DataError, match="holds an evaluation prompt: 51% of its 8-grams"):
        assert_clean(record | {"max_overlap": 0.51}, [PROMPT, "x"])
    with pytest.raises(DataError, match="checked against 2 other evaluation prompts than these 1"):
        assert_clean(record, [PROMPT])
