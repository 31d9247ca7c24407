"""Conversations out of JSON or JSONL, in ShareGPT's dialect (from, value) or OpenAI's (role, content)."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from eagle3_jax.errors import DataError

ROLES = {
    "system": "system",
    "human": "user", "user": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
    "model": "assistant",
}  # fmt: skip

BOM = b"\xef\xbb\xbf"

Turns = tuple[tuple[str, str], ...]  # (system | user | assistant, text)


class Conversation(NamedTuple):
    id: str
    turns: Turns
    ids: np.ndarray | None = None  # [n] int32: `token_ids` of the record, if it has such
    spans: object = None  # `spans` of the record, as found


class Refused(NamedTuple):
    index: int  # place in the file, from 0
    id: str
    reason: str
    detail: str


class Reading(NamedTuple):
    conversations: list[Conversation]
    places: list[int]  # of the conversations in the file
    refused: list[Refused]
    complete: int  # conversations that the file holds whole, kept or refused
    end: int  # byte at which the last whole one ends
    size: int  # bytes
    damage: str | None  # what is wrong with the rest of the file


class _Broken(NamedTuple):
    """A line of JSONL that is not JSON."""

    detail: str


class _UnusableError(Exception):
    def __init__(self, reason: str, detail: str = ""):
        self.reason, self.detail = reason, detail


# What is wanted of a conversation, in which user and assistant alternate: all of it up to its last answer (a question
# left open is dropped), up to its last question, or only the system turn, if any, and the first question.
Part = Literal["answers", "questions", "prompt"]


def read(path: str | Path, strict: bool = False, part: Part = "answers") -> Reading:
    """`part` of all usable conversations of a file, and why the others are not usable.

    A damaged file gives its whole conversations, or with `strict` a DataError. A file without any
    usable conversation is a DataError.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; JSON or JSONL of conversations is wanted")
    data = path.read_bytes()
    text, damage = _decode(data)
    records, end, trouble = _array(text) if text.startswith("[", _skip(text, 0)) else _lines(text)
    damage = trouble or damage
    end = (end if text.isascii() else len(text[:end].encode())) + len(BOM) * data.startswith(BOM)
    complete = sum(not isinstance(record, _Broken) for record in records)
    if strict and damage:
        raise DataError(
            f"{path}: {damage}; the last of {complete:,} whole conversations ends at byte {end:,} of {len(data):,}; "
            "mend the file, or set data.strict=false to keep them"
        )
    kept, places, refused = [], [], []
    for index, record in enumerate(records):
        name = _name(record, index)
        try:
            turns = _turns(record, part)
            kept.append(Conversation(name, turns, _ids(record), record.get("spans")))
            places.append(index)
        except _UnusableError as refusal:
            refused.append(Refused(index, name, refusal.reason, refusal.detail))
    if not kept:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in reasons_of(refused).items())
        raise DataError(
            f"{path}: no usable conversation in {len(data):,} bytes ({reasons or damage or 'empty'})"
        )
    return Reading(kept, places, refused, complete, end, len(data), damage)


def identity(path: str | Path) -> dict:
    """Name, size and sha256 of a file."""
    path = Path(path)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"name": path.name, "bytes": path.stat().st_size, "sha256": digest}


def reasons_of(refused: Iterable[Refused]) -> dict[str, int]:
    """Reason -> how many, most frequent first."""
    return dict(Counter(r.reason for r in refused).most_common())


def _turns(record: object, part: Part) -> Turns:
    found = [_turn(item) for item in _items(record)]
    if not any(text for _, text in found):
        raise _UnusableError("empty", f"{len(found)} turns without text")
    start = 1 if found[0][0] == "system" else 0
    spoken = {role for role, text in found if text}
    if found[start:] and found[start][0] == "assistant":
        raise _UnusableError("assistant first", f"{len(found)} turns")
    if "user" not in spoken:
        raise _UnusableError("no user turn", f"{len(found)} turns")
    if part == "answers" and "assistant" not in spoken:
        raise _UnusableError("no assistant turn", f"{len(found)} turns")
    if part == "prompt":
        found = found[: start + 1]
    else:
        last = "assistant" if part == "answers" else "user"
        while found[-1][0] != last or not found[-1][1]:
            found.pop()
    for i, (role, text) in enumerate(found[start:]):
        wanted = ("user", "assistant")[i % 2]
        if role != wanted:
            raise _UnusableError("not alternating", f"turn {start + i} is {role}, {wanted} was wanted")
        if not text:
            raise _UnusableError("blank turn", f"turn {start + i}, {role}")
    return tuple(found)


def _items(record: object) -> list:
    if isinstance(record, _Broken):
        raise _UnusableError("malformed", record.detail)
    if not isinstance(record, dict):
        raise _UnusableError("malformed", f"an object was wanted, found {type(record).__name__}")
    key = next((k for k in ("conversations", "messages", "conversation") if k in record), None)
    if key is None:
        raise _UnusableError("malformed", f"no conversations or messages; keys: {', '.join(record)[:80]}")
    if not isinstance(record[key], list):
        raise _UnusableError("malformed", f"{key} is {type(record[key]).__name__}, a list was wanted")
    return record[key]


def _turn(item: object) -> tuple[str, str]:
    if not isinstance(item, dict):
        raise _UnusableError("malformed", f"a turn is {type(item).__name__}, an object was wanted")
    role, text = item.get("from", item.get("role")), item.get("value", item.get("content"))
    if isinstance(text, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in text):
        text = "".join(p["text"] for p in text)
    if not isinstance(role, str):
        raise _UnusableError("malformed", "a turn without a role (from or role)")
    if role.lower() not in ROLES:
        raise _UnusableError("unknown role", role)
    if not isinstance(text, str):
        raise _UnusableError("malformed", f"a {role} turn without text (value or content)")
    if re.search("[\ud800-\udfff]", text):  # JSON escapes can hold halves of pairs
        raise _UnusableError("malformed", f"a {role} turn with half a surrogate pair")
    return ROLES[role.lower()], text if text.strip() else ""


def _ids(record: dict) -> np.ndarray | None:
    ids = record.get("token_ids")
    return ids if isinstance(ids, np.ndarray) else None


def _compact(node: dict) -> dict:
    """Token ids as the JSON is read: as a list of numbers they would take ten times the memory."""
    ids = node.get("token_ids")
    if isinstance(ids, list) and all(type(i) is int and 0 <= i < 2**31 for i in ids):
        node["token_ids"] = np.array(ids, np.int32)
    return node


def _name(record: object, index: int) -> str:
    keys = ("id", "conversation_id", "prompt_id")
    found = next((record[k] for k in keys if k in record), None) if isinstance(record, dict) else None
    return str(found) if isinstance(found, str | int) else f"record-{index}"


def _decode(data: bytes) -> tuple[str, str | None]:
    data = data.removeprefix(BOM)
    try:
        return data.decode(), None
    except UnicodeDecodeError as error:
        return data[: error.start].decode(), f"not UTF-8 at byte {error.start:,}"


# Both readers return the records, the character at which the last whole one ends, and what is wrong after it.


def _array(text: str) -> tuple[list, int, str | None]:
    decoder, records, end = json.JSONDecoder(object_hook=_compact), [], 0
    at = _skip(text, _skip(text, 0) + 1)
    while not text.startswith("]", at):
        try:
            record, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            return records, end, "cut off" if _runs_out(error, text) else f"not JSON after character {at:,}"
        records.append(record)
        end, at = at, _skip(text, at)
        if text.startswith(",", at):
            at = _skip(text, at + 1)
        elif not text.startswith("]", at):
            return records, end, "cut off" if at == len(text) else f"not JSON at character {at:,}"
    rest = _skip(text, at + 1)
    return records, end, None if rest == len(text) else f"more text after the array, at character {rest:,}"


def _lines(text: str) -> tuple[list, int, str | None]:
    records, end, at, damage = [], 0, 0, None
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also split inside JSON strings
        at += len(line) + 1
        if not line.strip():
            continue
        try:
            records.append(json.loads(line, object_hook=_compact))
            end = at - 1
        except (ValueError, RecursionError):
            last = at > len(text)
            damage = damage or ("cut off" if last else f"line {number:,} is not JSON")
            if not last:
                records.append(_Broken(f"line {number:,} is not JSON"))
    return records, end, damage


def _runs_out(error: Exception, text: str) -> bool:
    """Whether the text stopped in the middle of a value, rather than holding a wrong one."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated string") or error.pos >= len(text.rstrip())


_SPACE = re.compile(r"[ \t\r\n]*")


def _skip(text: str, at: int) -> int:
    return _SPACE.match(text, at).end()
