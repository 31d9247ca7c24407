"""Conversations to a directory of tokens: one flat axis, row offsets, and a card (data.json) that says all."""

import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat, split, written
from eagle3_jax.data.conversations import Conversation, Reading, Refused, identity, read, reasons_of
from eagle3_jax.data.vocab import check_ids
from eagle3_jax.errors import DataError
from eagle3_jax.progress import bar

SCHEMA = 1
ARRAYS = ("ids", "span", "offsets", "held_out")


class Tokens(NamedTuple):
    """Prepared conversations, memory-mapped; conversation i is tokens offsets[i] .. offsets[i+1]."""

    ids: np.ndarray  # [N] int32
    span: np.ndarray  # [N] int32: 0, or the number of the assistant turn within its conversation
    offsets: np.ndarray  # [conversations + 1] int64
    held_out: np.ndarray  # [conversations] bool
    card: dict  # data.json


def prepare(
    config: RunConfig,
    tokenizer,
    evaluation_prompts: Sequence[str],
    *,
    source: str | Path | None = None,
    vocab_size: int | None = None,
) -> dict:
    """Write the directory `data.prepared` and return its card; an up-to-date directory is left as it is.

    Of a file that `eagle3 regenerate` wrote with this tokenizer the exact tokens are taken, not those of its text.
    `source` is the file to read where `data.path` is a name; `vocab_size` the target's, where the configuration
    has no shape. Conversations are taken in an order that `train.seed` shuffles, so that `data.max_conversations`
    and `data.max_tokens` cut a fair sample; the latter stops after the conversation that reaches it. With
    `data.answers == "target"` only prompts are written, no token of them supervised, each counted with room for
    its answer. Raises DataError.
    """
    data, path = config.data, Path(source or config.data.path)
    prompts = split.EvaluationPrompts(evaluation_prompts)
    if not path.is_file():
        raise DataError(f"data.path={path}: no such file; JSON or JSONL of conversations is wanted")
    wanted = {
        "schema": SCHEMA,
        "source": identity(path),
        "tokenizer": chat.fingerprint(tokenizer),
        "max_length": data.max_length,
        "max_conversations": data.max_conversations,
        "max_tokens": data.max_tokens,
        "max_new_tokens": data.max_new_tokens if data.answers == "target" else None,
        "answers": data.answers,
        "strict": data.strict,
        "seed": config.train.seed,
        "held_out": data.held_out,
        "evaluation_prompts": prompts.digest,
    }
    made = written.settings(path) if data.answers == "data" else None
    if made is not None:
        wanted["regenerated"] = made
    directory = Path(data.prepared)
    if (card := _current(directory, wanted)) is not None:
        print(f"prepare: {directory} is up to date", file=sys.stderr)
        return card

    reading = read(path, data.strict, "answers" if data.answers == "data" else "prompt")
    side = split.held_out(reading.conversations, data.held_out)
    exact = made is not None and made["tokenizer"] == wanted["tokenizer"]
    encoded = _encode(config, tokenizer, reading, prompts, exact)
    ids, span, offsets = encoded.arrays()
    shape = config.target.shape
    check_ids(ids, vocab_size or (shape.vocab_size if shape else len(tokenizer)))
    if not (span.any() if data.answers == "data" else len(ids)):
        raise DataError(
            f"{path}: no {'supervised token' if data.answers == 'data' else 'prompt'} is left of "
            f"{len(reading.conversations):,} conversations (refused: {reasons_of(encoded.refused)}); "
            f"is data.max_length={data.max_length} too short?"
        )
    held_out = side[encoded.chosen]
    _check_sides(held_out, data.held_out)
    arrays = dict(zip(ARRAYS, (ids, span, offsets, held_out), strict=True))
    refused = sorted([*reading.refused, *encoded.refused])
    card = {
        "request": wanted,
        "fingerprint": _fingerprint(arrays),
        "conversations": len(held_out),
        "refused": reasons_of(refused),
        "file": {"complete": reading.complete, "end": reading.end, "damage": reading.damage},
        "tokens": len(ids),
        "supervised": int(np.count_nonzero(span)),
        "held_out": {
            "conversations": int(held_out.sum()),
            "share": float(held_out.mean()),
            "rule": "hash of the group of conversations that share an id without part suffix or a first user turn",
        },
        "contamination": {
            "prompts": len(prompts.texts),
            "digest": prompts.digest,
            "dropped": sum(r.reason == split.REASON for r in refused),
            "max_overlap": encoded.max_overlap,
            "rule": f"a user turn equals a prompt, or holds over {split.MOST:.0%} of its {split.GRAM}-grams of words",
        },
        "answers": data.answers,
    }
    if made is not None:
        why = "edited since" if exact else "the file was written with another tokenizer or chat template"
        why = why if encoded.exact < len(held_out) else ""
        card["regenerated"] = made | {"exact": encoded.exact, "why": why}
    _write(directory, arrays, refused, card)
    return card


def load(directory: str | Path, verify: bool = False) -> Tokens:
    """Read a prepared directory back; with `verify` its bytes are checked against the card. Raises DataError."""
    directory = Path(directory)
    try:
        card = json.loads((directory / "data.json").read_text())
        arrays = {name: np.load(directory / f"{name}.npy", mmap_mode="r") for name in ARRAYS}
    except (OSError, ValueError) as error:
        raise DataError(f"{directory}: not a prepared data set ({error}); run `eagle3 prepare`") from None
    if (found := card.get("request", {}).get("schema")) != SCHEMA:
        raise DataError(
            f"{directory}: data.json has schema {found}, {SCHEMA} was wanted; run `eagle3 prepare`"
        )
    if verify and _fingerprint(arrays) != card["fingerprint"]:
        raise DataError(f"{directory}: its arrays are not those of data.json; run `eagle3 prepare` again")
    return Tokens(**arrays, card=card)


class _Encoded:
    """Conversations as they are encoded, and why some were not."""

    def __init__(self):
        self.ids, self.span, self.chosen = [], [], []
        self.refused: list[Refused] = []
        self.tokens, self.max_overlap = 0, 0.0
        self.exact = 0  # conversations whose tokens the target wrote

    def add(self, place: int, ids: np.ndarray, span: np.ndarray) -> None:
        self.ids.append(ids)
        self.span.append(span)
        self.chosen.append(place)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        none = np.zeros(0, np.int32)
        offsets = np.cumsum([0, *(len(x) for x in self.ids)], dtype=np.int64)
        return np.concatenate([none, *self.ids]), np.concatenate([none, *self.span]), offsets


def _encode(
    config: RunConfig, tokenizer, reading: Reading, prompts: split.EvaluationPrompts, exact: bool
) -> _Encoded:
    data, found = config.data, _Encoded()
    most, enough = data.max_conversations or sys.maxsize, data.max_tokens or sys.maxsize
    order = np.random.default_rng(config.train.seed).permutation(len(reading.conversations)).tolist()
    total = min(most, len(order)) if data.max_tokens is None else data.max_tokens
    with bar("prepare", total, "conversations" if data.max_tokens is None else "tokens") as progress:
        for place in order:
            if len(found.chosen) >= most or found.tokens >= enough:
                break
            conversation = reading.conversations[place]
            own = written.tokens(tokenizer, conversation) if exact else None
            overlap = prompts.overlap(conversation)
            if overlap > split.MOST:
                reason, detail = split.REASON, f"{overlap:.0%} of its {split.GRAM}-grams"
            else:
                ids, span, reason, detail = _one(config, tokenizer, conversation, own)
            if reason is not None:
                found.refused.append(Refused(reading.places[place], conversation.id, reason, detail))
                continue
            found.add(place, ids, span)
            found.exact += own is not None
            found.max_overlap = max(found.max_overlap, overlap)
            size = len(ids) + (data.max_new_tokens if data.answers == "target" else 0)
            found.tokens += size
            progress.advance(1 if data.max_tokens is None else min(size, total - progress.done))
    return found


def _one(config: RunConfig, tokenizer, conversation: Conversation, own):
    """Ids and spans of one conversation, and the reason and detail if it is refused; `own` are written.tokens."""
    data = config.data
    none = np.zeros(0, np.int32)
    try:
        if own is not None:
            ids, span = (x[: data.max_length] for x in own)
        elif data.answers == "data":
            ids, span = chat.encode(tokenizer, conversation.turns, data.max_length)
        else:
            ids = chat.prompt(tokenizer, conversation.turns)
            span = np.zeros_like(ids)
    except chat.TemplateRefusalError as error:
        return none, none, "chat template", str(error)
    room = data.max_length - data.max_new_tokens
    if data.answers == "target" and len(ids) > room:
        return none, none, "prompt too long", f"{len(ids)} tokens, {room} leave room for the answer"
    if data.answers == "data" and not span.any():
        return none, none, "no answer within max_length", f"the prompt alone fills {data.max_length} tokens"
    return ids, span, None, ""


def _check_sides(held_out: np.ndarray, fraction: float) -> None:
    """A file whose ids are all of one chat, say, cannot be split."""
    if fraction * len(held_out) >= 10 and not held_out.any():
        raise DataError(
            f"data.held_out={fraction} left no conversation out of {len(held_out):,}: they share one id (the part "
            "before a last _number) or one first user turn; give them ids of their own, or set data.held_out=0"
        )


def _current(directory: Path, wanted: dict) -> dict | None:
    """The card of a directory that holds exactly what is wanted."""
    if not (directory / "data.json").is_file():
        return None
    try:
        tokens = load(directory, verify=True)
    except DataError:
        return None
    return tokens.card if tokens.card["request"] == wanted else None


def _write(directory: Path, arrays: dict, refused: list[Refused], card: dict) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "data.json").unlink(
        missing_ok=True
    )  # from here until the last line the directory is no data set
    for name, array in arrays.items():
        # A new file: a reader may still have the old one mapped.
        (directory / f"{name}.npy").unlink(missing_ok=True)
        np.save(directory / f"{name}.npy", array)
    lines = [json.dumps(r._asdict(), ensure_ascii=False) + "\n" for r in refused]
    (directory / "refused.jsonl").write_text("".join(lines), encoding="utf-8")
    (directory / "data.json.new").write_text(json.dumps(card, indent=2) + "\n")
    os.replace(directory / "data.json.new", directory / "data.json")


def _fingerprint(arrays: dict) -> str:
    """sha256 of ids, span, offsets and held_out, with their types and sizes."""
    digest = hashlib.sha256()
    for name in ARRAYS:
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape}".encode())
        digest.update(array.data)
    return digest.hexdigest()
