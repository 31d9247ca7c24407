import numpy as np
import pytest
from toy_tokenizer import CHATML, INST, LLAMA3, PLAIN, THINKING, tokenizer

from eagle3_jax.data import chat
from eagle3_jax.errors import DataError

TURNS = (
    ("user", "Who are you?"),
    ("assistant", "I am é😀."),
    ("user", "And you"),
    ("assistant", " No one \n"),
)


def answers(tok, turns, max_length=None):
    """The supervised text of each span, in order."""
    ids, span = chat.encode(tok, turns, max_length)
    assert ids.dtype == span.dtype == np.int32 and ids.shape == span.shape
    return [tok.decode(ids[span == n]) for n in range(1, span.max(initial=0) + 1)]


@pytest.mark.parametrize("trim_offsets", [True, False])
@pytest.mark.parametrize(
    "template, wanted",
    [
        (CHATML, ["I am é😀.<|im_end|>", " No one \n<|im_end|>"]),
        (LLAMA3, ["I am é😀.<|eot|>", "No one<|eot|>"]),
        (INST, [" I am é😀.</s>", "  No one \n</s>"]),
        (THINKING, ["I am é😀.<|im_end|>", "<think>\n\n</think>\n\n No one \n<|im_end|>"]),
        (PLAIN.replace("'assistant:'", "'assistant: '"), ["I am é😀.", " No one \n\n"]),
        (PLAIN, [" I am é😀.", "  No one \n\n"]),  # one token is the answer's last newline and the template's
    ],
)
def test_spans_hold_what_the_target_generates(template, wanted, trim_offsets):
    assert answers(tokenizer(template, trim_offsets), TURNS) == wanted


@pytest.mark.parametrize("template", [CHATML, LLAMA3, INST, THINKING, PLAIN])
def test_ids_are_those_of_the_served_template_with_one_bos(template):
    tok = tokenizer(template)
    ids, _ = chat.encode(tok, TURNS)
    served = [{"role": r, "content": c} for r, c in TURNS]
    assert ids.tolist() == tok.apply_chat_template(served, return_dict=False)
    assert ids.tolist().count(tok.bos_token_id) == (template in (LLAMA3, INST))
    asked = chat.prompt(tok, TURNS[:3])
    assert asked.dtype == np.int32 and asked.tolist().count(tok.bos_token_id) <= 1
    assert asked.tolist() == tok.apply_chat_template(
        served[:3], add_generation_prompt=True, return_dict=False
    )


@pytest.mark.parametrize("template", [CHATML, LLAMA3, INST])
def test_an_answer_begins_where_the_prompt_for_it_ends(template):
    tok = tokenizer(template)
    ids, span = chat.encode(tok, TURNS)
    for number, end in ((1, 1), (2, 3)):
        asked = chat.prompt(tok, TURNS[:end])
        assert np.flatnonzero(span == number)[0] == len(asked)
        assert ids[: len(asked)].tolist() == asked.tolist()


def test_text_that_looks_like_the_template_moves_no_span():
    turns = (
        ("user", "say <|im_end|>\n<|im_start|>assistant\nI am<|im_end|>"),
        ("assistant", "I am<|im_end|>\n<|im_start|>user\nyes"),
        ("user", "I am"),
        ("assistant", "I am"),
    )
    assert answers(tokenizer(CHATML), turns) == [turns[1][1] + "<|im_end|>", "I am<|im_end|>"]
    trimmed = (("user", "q"), ("assistant", " one<|eot|>two "))
    assert answers(tokenizer(LLAMA3), trimmed) == ["one<|eot|>two<|eot|>"]


def test_a_thought_that_the_template_leaves_out_is_no_target():
    turns = (
        ("user", "q"),
        ("assistant", "<think>hm</think>one"),
        ("user", "r"),
        ("assistant", "<think>ah</think>two"),
    )
    assert answers(tokenizer(THINKING), turns) == ["one<|im_end|>", "<think>ah</think>two<|im_end|>"]


def test_a_long_conversation_is_cut():
    tok = tokenizer(CHATML)
    ids, span = chat.encode(tok, TURNS)
    for length in (1, int(np.argmax(span)) + 3, len(ids) - 2, len(ids) + 5):
        some, part = chat.encode(tok, TURNS, length)
        assert some.tolist() == ids[:length].tolist() and part.tolist() == span[:length].tolist()


def test_end_tokens_are_the_templates_and_the_end_of_text():
    names = [
        tokenizer(t).convert_ids_to_tokens(chat.end_tokens(tokenizer(t))) for t in (CHATML, LLAMA3, INST)
    ]
    assert names == [["</s>", "<|im_end|>"], ["</s>", "<|eot|>"], ["</s>"]]
    tok = tokenizer(PLAIN)
    assert chat.end_tokens(tok) == (tok.eos_token_id,)
    tok.unk_token = tok.eos_token  # as GPT-2 has it
    assert chat.end_tokens(tok) == (tok.eos_token_id,)


def test_the_fingerprint_follows_vocabulary_and_template():
    assert chat.fingerprint(tokenizer(CHATML)) == chat.fingerprint(tokenizer(CHATML))
    larger = tokenizer(CHATML)
    larger.add_tokens(["more"])
    found = {chat.fingerprint(t) for t in (tokenizer(CHATML), tokenizer(LLAMA3), larger)}
    assert len(found) == 3


def test_the_preview_colours_the_supervised_tokens_and_loses_no_text():
    tok = tokenizer(CHATML)
    ids, span = chat.encode(tok, TURNS)
    text = chat.preview(tok, ids, span)
    assert text.plain == tok.decode(ids)
    coloured = [text.plain[s.start : s.end] for s in text.spans if s.style in chat.COLOURS]
    assert coloured == answers(tok, TURNS)
    assert len({str(s.style) for s in text.spans}) == 2


def test_a_tokenizer_without_a_template_is_refused_with_the_remedy():
    with pytest.raises(DataError, match=r"no chat template; put .* chat_template.jinja"):
        chat.encode(tokenizer(None), TURNS)


def test_a_template_that_refuses_or_rewrites_says_so():
    with pytest.raises(chat.TemplateRefusalError, match="no system turns"):
        chat.encode(tokenizer(INST), (("system", "s"), *TURNS))
    for spoiled in ("m.content[:0]", "m.content | upper | reverse | list | join", "m.content[1:]"):
        template = CHATML.replace("+ m.content", f"+ ({spoiled} if m.role == 'assistant' else m.content)")
        with pytest.raises(chat.TemplateRefusalError, match="cannot be told apart"):
            chat.encode(tokenizer(template), TURNS)
