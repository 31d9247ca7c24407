"""The target's own answers to a data set's questions, as a data set: `eagle3 regenerate`."""

import collections
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat, written
from eagle3_jax.data.conversations import Turns, identity, read
from eagle3_jax.data.vocab import check_ids
from eagle3_jax.decode.sampling import Sampling
from eagle3_jax.decode.speculate import CACHE, PROMPT, cache_room
from eagle3_jax.decode.writer import CHUNK, Writer
from eagle3_jax.errors import ConfigError, DataError
from eagle3_jax.progress import Bar, bar
from eagle3_jax.target.model import Target

BLOCK = (
    4  # batches whose conversations are answered, and written, together; a killed run repeats at most so many
)


@dataclasses.dataclass
class Summary:
    """What one call did."""

    path: str
    lines: int = 0  # conversations in the file
    conversations: int = 0  # of them this call's; so are the answers
    answers: int = 0
    ended: int = 0  # answers that the target ended by itself
    tokens: int = 0  # of the answers
    seconds: float = 0.0
    refused: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by reason


@dataclasses.dataclass
class _Talk:
    """A conversation as far as it is answered."""

    place: int  # in the source file
    id: str
    turns: Turns
    ids: np.ndarray
    questions: list[str]  # to come
    spans: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def record(self) -> dict:
        """Up to the last answer, if there is one."""
        turns, ids = self.turns, self.ids
        if self.spans and turns[-1][0] == "user":
            turns, ids = turns[:-1], ids[: self.spans[-1][1]]
        messages = [{"role": role, "content": text} for role, text in turns]
        return {"id": self.id, "messages": messages, "token_ids": ids.tolist(), "spans": self.spans}


def regenerate(
    config: RunConfig,
    target: Target,
    load: Callable[[], dict],
    tokenizer,
    source: str | Path,
    digest: str,
    mesh: Mesh,
) -> Summary:
    """Answer the questions of the file `source` into `regenerate.path`; goes on where an earlier call was stopped.

    A conversation is asked its questions in order, each after the target's own earlier answers, as long as a question
    and regenerate.max_new_tokens fit within data.max_length. `train.seed` shuffles the conversations, as
    `eagle3 prepare` does. `load` gives the target's parameters, once there is something to do; `digest` names them.
    Raises ConfigError, DataError.
    """
    r = config.regenerate
    if r is None:
        raise ConfigError("regenerate needs regenerate.path: the file that the answers go to")
    if (room := config.data.max_length - r.max_new_tokens) < 1:
        raise ConfigError(
            f"regenerate.max_new_tokens={r.max_new_tokens} leaves no room for a question within "
            f"data.max_length={config.data.max_length}"
        )
    if Path(source).resolve() == Path(r.path).resolve():
        raise ConfigError(f"data.path={source} is regenerate.path, too: name the data set with the questions")
    summary = Summary(r.path)
    talks = _talks(config, tokenizer, source, room, target.shape.vocab_size, summary)
    settings = {
        "source": identity(source), "target": digest, "tokenizer": chat.fingerprint(tokenizer),
        "dtype": config.target.dtype, "max_length": config.data.max_length, "order": config.train.seed,
        **r.model_dump(include={"turns", "max_new_tokens", "temperature", "top_p", "seed"}),
    }  # fmt: skip
    batch = axes.round_up(r.batch, mesh.shape["data"])
    block = BLOCK * batch
    summary.lines = written.begin(r.path, settings, block, len(talks))
    if summary.lines >= len(talks):
        return summary
    largest = cache_room(config.data.max_length + PROMPT + CHUNK)
    writer = Writer(
        target, mesh, features=False, sampling=Sampling(r.temperature, r.top_p, r.seed),
        room=lambda length: min(max(CACHE, 1 << (length - 1).bit_length()), largest),
    )  # fmt: skip
    asking = _Asking(writer, load(), tokenizer, r.max_new_tokens, room, batch, summary)
    with bar("regenerate", sum(1 + len(t.questions) for t in talks[summary.lines :]), "answers") as progress:
        for first in range(summary.lines, len(talks), block):
            part = talks[first : first + block]
            asking.answer(part, progress)
            written.append(r.path, [t.record() for t in part])
            summary.lines += len(part)
            summary.conversations += len(part)
        summary.seconds = progress.seconds
    return summary


def _talks(config: RunConfig, tokenizer, source, room: int, vocab_size: int, summary: Summary) -> list[_Talk]:
    """The conversations to answer, in order, each with its first prompt; the others are counted as refused."""
    r, data = config.regenerate, config.data
    reading = read(source, data.strict, "questions" if r.turns == "all" else "prompt")
    most = r.max_conversations or data.max_conversations or sys.maxsize
    talks = []
    for i in np.random.default_rng(config.train.seed).permutation(len(reading.conversations)).tolist():
        if len(talks) == most:
            break
        turns = reading.conversations[i].turns
        first = 1 + [role for role, _ in turns].index("user")
        questions = [text for role, text in turns[first:] if role == "user"]
        try:
            ids = chat.prompt(tokenizer, turns[:first])
        except chat.TemplateRefusalError:
            summary.refused["chat template"] += 1
            continue
        if len(ids) > room:
            summary.refused["prompt too long"] += 1
            continue
        talks.append(_Talk(reading.places[i], reading.conversations[i].id, turns[:first], ids, questions))
    if not talks:
        raise DataError(
            f"{source}: no prompt is left of {len(reading.conversations):,} conversations (refused: "
            f"{dict(summary.refused)}); data.max_length={data.max_length} less regenerate.max_new_tokens="
            f"{r.max_new_tokens} leaves {room} tokens for one"
        )
    check_ids(np.concatenate([t.ids for t in talks]), vocab_size)
    return talks


@dataclasses.dataclass
class _Asking:
    """Answers a block of conversations, those of like length together, one turn of all after the other."""

    writer: Writer
    params: dict
    tokenizer: object
    limit: int  # new tokens of an answer
    room: int  # tokens before an answer
    batch: int
    summary: Summary

    def __post_init__(self):
        self.ends = chat.end_tokens(self.tokenizer)
        self.end_of_turn = chat.end_of_turn(self.tokenizer)

    def answer(self, talks: Sequence[_Talk], progress: Bar) -> None:
        """Fill in the answers; `progress` counts those that were asked for, given or not."""
        open_ = list(talks)
        while open_:
            open_.sort(key=lambda t: (len(t.ids), t.place))
            for start in range(0, len(open_), self.batch):
                self._write(open_[start : start + self.batch], progress)
            left = sum(len(t.questions) for t in open_)
            open_ = [t for t in open_ if self._ask(t)]
            progress.advance(left - sum(1 + len(t.questions) for t in open_))

    def _write(self, talks: list[_Talk], progress: Bar) -> None:
        filled, begun = talks + [talks[-1]] * (self.batch - len(talks)), progress.done
        share = len(talks) / (self.batch * axes.round_up(self.limit, CHUNK))
        texts = self.writer.write(
            self.params, [t.ids for t in filled], self.limit, self.ends,
            advance=lambda tokens: progress.advance(tokens * share), streams=[t.place for t in filled],
        )  # fmt: skip
        for talk, text in zip(talks, texts, strict=False):
            new = text.ids[text.answer :]
            self.summary.tokens += len(new)
            if said := chat.written(self.tokenizer, new):
                self.summary.answers += 1
                self.summary.ended += int(new[-1] in self.ends)
                talk.spans.append((text.answer, len(text.ids)))
                talk.ids, talk.turns = text.ids, (*talk.turns, ("assistant", said))
        rate = self.summary.tokens / progress.seconds
        progress.advance(
            begun + len(talks) - progress.done, f"{self.summary.tokens:,} tokens, {rate:,.1f} tokens/s"
        )

    def _ask(self, talk: _Talk) -> bool:
        """Put the next question, if there is one, room for it, and an answer to the last one."""
        if not talk.questions or talk.turns[-1][0] == "user":
            return False
        turns = (*talk.turns, ("user", talk.questions.pop(0)))
        try:
            more = chat.following(self.tokenizer, turns, closed=talk.ids[-1] == self.end_of_turn)
        except chat.TemplateRefusalError:
            return False
        if len(talk.ids) + len(more) > self.room:
            return False
        check_ids(more, self.writer.target.shape.vocab_size)
        talk.ids, talk.turns = np.concatenate([talk.ids, more]), turns
        return True
