"""The file that `eagle3 regenerate` writes: a conversation a line, with its exact tokens; beside it how it was made.

A line is an OpenAI-style record: `id`, `messages`, and `token_ids` with `spans`, the [begin, end) of each answer in
them. The tokens are kept because text does not say which of its tokenisations was written.
"""

import json
import os
from pathlib import Path

import numpy as np

from eagle3_jax.data import chat
from eagle3_jax.data.conversations import Conversation
from eagle3_jax.errors import DataError

SCHEMA = 1


def settings_path(path: str | Path) -> Path:
    return Path(f"{path}.json")


def settings(path: str | Path) -> dict | None:
    """How a file was written; None for any other file. Raises DataError."""
    beside = settings_path(path)
    if not beside.is_file():
        return None
    try:
        found = json.loads(beside.read_text())
    except ValueError as error:
        raise DataError(f"{beside}: not JSON ({error}); delete it, or regenerate {path} again") from None
    return found if isinstance(found, dict) and found.get("schema") == SCHEMA else None


def begin(path: str | Path, wanted: dict, block: int, total: int) -> int:
    """Make the file ready to be continued with these settings; how many lines it keeps.

    What follows its last whole line goes, and so do lines of a block that is not whole: blocks are written together,
    and only the last one, at `total` lines, may be short.
    Raises DataError where the file was written with other settings, or by somebody else.
    """
    path, wanted = Path(path), {"schema": SCHEMA} | wanted
    found = settings(path)
    if path.exists() and found is None:
        raise DataError(
            f"regenerate.path={path}: a file that `eagle3 regenerate` did not write; name another one"
        )
    if not path.exists() or found is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = settings_path(path).with_suffix(".part")
        part.write_text(json.dumps(wanted, indent=2) + "\n")
        os.replace(part, settings_path(path))
        path.touch()
        return 0
    if other := [k for k in wanted if found.get(k) != wanted[k]]:
        raise DataError(
            f"regenerate.path={path}: written with {other[0]}={found.get(other[0])!r:.80}, now "
            f"{wanted[other[0]]!r:.80}; set it back or name another file"
        )
    ends = [0]
    with path.open("rb") as file:
        ends.extend(file.tell() for line in iter(file.readline, b"") if line.endswith(b"\n"))
    lines = len(ends) - 1
    if lines != total:
        lines = lines // block * block
    os.truncate(path, ends[lines])
    return lines


def append(path: str | Path, records: list[dict]) -> None:
    """All lines in one write."""
    lines = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    with Path(path).open("ab", buffering=0) as file:
        file.write(lines.encode())


def tokens(tokenizer, conversation: Conversation) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and span ids, as chat.encode gives them, of what was written.

    None where the record has no tokens, or its messages are not what they say.
    """
    ids, spans = conversation.ids, conversation.spans
    answers = [text for role, text in conversation.turns if role == "assistant"]
    if ids is None or not isinstance(spans, list) or len(spans) != len(answers):
        return None
    span = np.zeros(len(ids), np.int32)
    for number, (bounds, text) in enumerate(zip(spans, answers, strict=True), 1):
        match bounds:
            case [int(first), int(end)] if 0 <= first < end <= len(ids):
                if chat.written(tokenizer, ids[first:end]) != text:
                    return None
                span[first:end] = number
            case _:
                return None
    return ids, span
