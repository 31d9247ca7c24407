"""Turns to tokens by the target's own chat template, and which tokens are whose answer."""

import hashlib
import itertools
import json

import jinja2
import numpy as np
from rich.text import Text

from eagle3_jax.data.conversations import Turns
from eagle3_jax.errors import DataError

COLOURS = ("black on green", "black on cyan")


class TemplateRefusalError(DataError):
    """The chat template does not take this conversation, or hides where its answers are."""


def encode(tokenizer, turns: Turns, max_length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [n] and span ids int32 [n]: 0 outside, 1, 2, ... the tokens of each assistant turn.

    A span holds what the target generates: everything after the generation prompt up to and including its
    end-of-turn token. Longer conversations are cut at `max_length` tokens. Raises DataError where the tokenizer
    or its template cannot do it.
    """
    text, bounds = _answers(tokenizer, turns)
    tokens = _tokens(tokenizer, text, return_offsets_mapping=True)
    ids, offsets = np.asarray(tokens["input_ids"], np.int32), np.asarray(tokens["offset_mapping"])
    begin, end = offsets.reshape(-1, 2).T
    begin = np.where(begin == end, begin - 1, begin)  # byte-level tokenizers trim a lone space to nothing
    span = np.zeros(len(ids), np.int32)
    for number, (first, last) in enumerate(bounds, 1):
        span[(begin >= first) & (begin < last)] = number
    return ids[:max_length], span[:max_length]


def prompt(tokenizer, turns: Turns) -> np.ndarray:
    """Token ids int32 [n] of turns that end with the user's, ready for the answer."""
    text = _render(tokenizer, turns, add_generation_prompt=True)
    return np.asarray(_tokens(tokenizer, text)["input_ids"], np.int32)


def following(tokenizer, turns: Turns, closed: bool) -> np.ndarray:
    """Token ids int32 [n] that come after the last answer of `turns`, which end with another question.

    `closed` says that the answer's own tokens hold its end of turn. Raises TemplateRefusalError where the template
    would not leave the earlier answers as they are.
    """
    text = _render(tokenizer, turns, add_generation_prompt=True)
    marked, marks, answers = _marked(turns)
    rest = _render(tokenizer, marked, add_generation_prompt=True)
    after, whole = rest.partition(marks[-1])[2], rest
    for mark, answer in zip(marks, answers, strict=True):
        whole = whole.replace(mark, answer)
    if whole != text:
        raise TemplateRefusalError("the chat template drops or rewrites an earlier answer")
    ids = np.asarray(_tokens(tokenizer, after)["input_ids"], np.int32)
    ends = np.flatnonzero(ids == end_of_turn(tokenizer))
    return ids[ends[0] + 1 :] if closed and len(ends) else ids


def written(tokenizer, ids: np.ndarray) -> str:
    """The text of an answer's tokens, without its end token and the white space around."""
    ends = np.isin(ids[-1:], end_tokens(tokenizer)).any()
    return tokenizer.decode(ids[: len(ids) - ends].tolist(), clean_up_tokenization_spaces=False).strip()


def end_of_turn(tokenizer) -> int | None:
    """Id of the token that the template writes after an answer, if it is a special one."""
    closing = _end_of_turn(tokenizer)
    return closing and tokenizer.convert_tokens_to_ids(closing)


def end_tokens(tokenizer) -> tuple[int, ...]:
    """Ids at which generation stops: the template's end of turn and the end of text, ascending."""
    ids = {tokenizer.eos_token_id, end_of_turn(tokenizer)}
    return tuple(sorted(ids - {None}))


def fingerprint(tokenizer) -> str:
    """sha256 of vocabulary and chat template."""
    content = [sorted(tokenizer.get_vocab().items()), tokenizer.chat_template]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def preview(tokenizer, ids: np.ndarray, span: np.ndarray) -> Text:
    """The text of a conversation, its supervised tokens on a colour that changes with each answer."""
    text, at = Text(), 0
    for number, run in itertools.groupby(span.tolist()):
        size = len(list(run))
        part = tokenizer.decode(ids[at : at + size].tolist(), clean_up_tokenization_spaces=False)
        text.append(part, style=COLOURS[number % 2] if number else None)
        at += size
    return text


def _tokens(tokenizer, text: str, **kwargs):
    if not tokenizer.is_fast:
        raise DataError(
            f"{tokenizer.name_or_path}: a tokenizer.json (a fast tokenizer) is wanted, found {type(tokenizer).__name__}"
        )
    # The template has already written the special tokens: adding them again would double the first one.
    return tokenizer(text, add_special_tokens=False, verbose=False, **kwargs)


def _render(tokenizer, turns: Turns, **kwargs) -> str:
    if not tokenizer.chat_template:
        raise DataError(
            f"{tokenizer.name_or_path}: the tokenizer has no chat template; put the one that the target is served "
            "with beside it as chat_template.jinja"
        )
    messages = [{"role": role, "content": text} for role, text in turns]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
    except jinja2.TemplateError as error:
        raise TemplateRefusalError(f"the chat template refuses the conversation: {error}") from None


def _answers(tokenizer, turns: Turns) -> tuple[str, list[tuple[int, int]]]:
    """The rendered conversation, and where in it each answer begins and ends (characters).

    Rendered once more with a mark for each answer, the same text falls into its fixed parts. They are found
    one after the other, so an answer that looks like the template's own text misleads nobody.
    """
    text = _render(tokenizer, turns)
    marked, marks, answers = _marked(turns)
    rest = _render(tokenizer, marked)
    fixed = []
    for mark in marks:
        before, found, rest = rest.partition(mark)
        if not found:
            raise TemplateRefusalError(
                "the chat template drops or rewrites an answer: its tokens cannot be told apart"
            )
        fixed.append(before)
    fixed.append(rest)

    opening, lead = _generation_prompt(tokenizer)
    closing = _end_of_turn(tokenizer)
    # What stands between the generation prompt and the answer (an empty thought, say) is generated, too.
    heads = [
        part[: part.rfind(opening) + len(opening)] if opening and opening in part else part.removesuffix(lead)
        for part in fixed[:-1]
    ]
    heads.append(fixed[-1])
    bounds, at = [], 0
    for i, content in enumerate(answers):
        if not text.startswith(heads[i], at):
            raise TemplateRefusalError(
                "the chat template changes with the answers: their tokens cannot be told apart"
            )
        first = at + len(heads[i])
        at = _end(text, first, fixed[i].removeprefix(heads[i]), content, heads[i + 1])
        last = at
        if closing and heads[i + 1].lstrip().startswith(closing):
            last = text.index(closing, at) + len(closing)
        bounds.append((first, last))
    return text, bounds


def _marked(turns: Turns) -> tuple[Turns, list[str], list[str]]:
    """The turns with a mark for each answer, the marks, the answers."""
    answers = [content for role, content in turns if role == "assistant"]
    marks = [f"\ue000{i}\ue001" for i in range(len(answers))]
    names = iter(marks)
    marked = tuple((role, next(names) if role == "assistant" else content) for role, content in turns)
    return marked, marks, answers


def _end(text: str, first: int, thought: str, content: str, following: str) -> int:
    """Where the answer that begins at `first` ends: there, `following` continues the text."""
    for answer in (content, content.strip(), content.lstrip(), content.rstrip()):
        at = first + len(thought + answer)
        if text.startswith(thought + answer, first) and text.startswith(following, at):
            return at
    at = text.find(following, first)  # a template that shortens answers, such as one that leaves out thoughts
    if at < 0 or not following:
        raise TemplateRefusalError("the chat template rewrites an answer: its tokens cannot be told apart")
    return at


def _generation_prompt(tokenizer) -> tuple[str, str]:
    """What the template appends to ask for an answer, and what it writes between that and the answer."""
    question, mark = ("user", "?"), "\ue000"
    plain = _render(tokenizer, (question,))
    asking = _render(tokenizer, (question,), add_generation_prompt=True)
    before = _render(tokenizer, (question, ("assistant", mark))).partition(mark)[0]
    opening = asking[len(plain) :] if asking.startswith(plain) else ""
    return opening, before[len(asking) :] if before.startswith(asking) else ""


def _end_of_turn(tokenizer) -> str | None:
    """The special token that the template writes after an answer."""
    mark = "\ue000"
    after = _render(tokenizer, (("user", "?"), ("assistant", mark))).partition(mark)[2].lstrip()
    special = [str(t) for t in tokenizer.added_tokens_decoder.values()]
    return max((t for t in special if t and after.startswith(t)), key=len, default=None)
