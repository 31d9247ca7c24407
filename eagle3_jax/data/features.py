"""The feature store: what the target says about every token, captured once and read many times.

One flat token axis per array, in TensorStore's zarr3 with shards and checksums; `rows` holds where each
conversation ends. A token counts once `commit.json` says so, which is written after its data.
"""

import functools
import json
import os
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import tensorstore as ts

from eagle3_jax.errors import DataError

CHUNK, SHARD = 256, 4096  # tokens: the least that is read, and what is written at once
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
HEADER, COMMIT, ROWS = "header.json", "commit.json", "rows.int64"


def columns(aux_width: int, hidden_size: int, dtype: str) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Array name -> (shape of one token, dtype)."""
    if dtype not in DTYPES:
        raise DataError(f"store.dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    return {
        "ids": ((), np.dtype(np.int32)),
        "span": ((), np.dtype(np.int32)),  # 0, or the id of the assistant span
        "aux": ((aux_width,), DTYPES[dtype]),  # low to high layer, side by side
        "final": ((hidden_size,), DTYPES[dtype]),  # after the target's last norm
        "top": ((), np.dtype(np.int32)),  # argmax of the unrounded logits over the full vocabulary
        "lse": ((), np.dtype(np.float32)),  # their log-sum-exp
    }


def estimate(tokens: int, aux_width: int, hidden_size: int, dtype: str) -> int:
    """Bytes on disk of `tokens` tokens."""
    chunks = -(-tokens // CHUNK)
    per_token = sum(
        int(np.prod(shape)) * kind.itemsize for shape, kind in columns(aux_width, hidden_size, dtype).values()
    )
    checksums = 6 * (chunks * 4 + -(-tokens // SHARD) * (16 * SHARD // CHUNK + 4))
    return chunks * CHUNK * per_token + checksums


def check_space(path: str | Path, tokens: int, aux_width: int, hidden_size: int, dtype: str) -> int:
    """The estimate, once it is sure that the disk of `path` has that much left. Raises DataError."""
    needed = estimate(tokens, aux_width, hidden_size, dtype)
    there = Path(path).resolve()
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if needed > free:
        raise DataError(
            f"{path}: {tokens:,} tokens of features take {needed / 1e9:,.1f} GB, {free / 1e9:,.1f} GB are free; "
            "set data.max_tokens lower, store.dtype=bfloat16, or store.path to another disk"
        )
    return needed


class Writer:
    """Appends conversations. What a killed capture had committed is kept: go on at `conversations`.

    `header` says what the features are of (plain JSON values: target digest, aux layers, data fingerprint,
    ...): a store begun with another one is refused. Leaving the `with` block without an error marks the
    store complete.
    """

    def __init__(self, path: str | Path, header: dict, dtype: str, aux_width: int, hidden_size: int):
        self.path = Path(path).resolve()
        self._columns = columns(aux_width, hidden_size, dtype)
        card = json.loads(
            json.dumps(header | dict(dtype=dtype, aux_width=aux_width, hidden_size=hidden_size))
        )
        self._begin(card)
        commit = _json(self.path / COMMIT)
        self.conversations, self.tokens = commit["conversations"], commit["tokens"]
        self._changed = not commit["complete"]
        rows = _rows(self.path, commit)
        _write(self.path / ROWS, rows.tobytes())  # without rows that were never committed
        self._pending: list[tuple[int, bool]] = []
        self._arrays = {n: _array(self.path, n, *kind) for n, kind in self._columns.items()}
        self._buffer = {n: np.empty((SHARD, *shape), kind) for n, (shape, kind) in self._columns.items()}
        # The last shard is written again as a whole.
        self._first = self.tokens - self.tokens % SHARD
        self._filled = self.tokens % SHARD
        for name, array in self._arrays.items():
            if self._filled:
                self._buffer[name][: self._filled] = _read(self.path, name, array, self._first, self.tokens)

    def _begin(self, card: dict) -> None:
        if (self.path / COMMIT).exists():
            there = _json(self.path / HEADER)
            for key in [*card, *(k for k in there if k not in card)]:
                if there.get(key) != card.get(key):
                    raise DataError(
                        f"{self.path}: {key} was {there.get(key)!r} when this store was begun, now {card.get(key)!r}; "
                        "name another store.path or delete this one"
                    )
            return
        if self.path.exists() and (other := sorted({p.name for p in self.path.iterdir()} - {HEADER})):
            raise DataError(f"{self.path}: not empty ({other[0]!r}) and not a feature store")
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / HEADER, json.dumps(card, indent=1).encode())
        self._commit(0, 0, complete=False)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._pending:
            self._flush()
        if kind is None and self._changed:
            self._commit(self.conversations, self.tokens, complete=True)

    def append(self, ids, span, aux, final, top, lse, held_out: bool = False) -> None:
        """One conversation of T tokens.

        ids    [T]     int32    token ids
        span   [T]     int32    0, or the id of the assistant span
        aux    [T, M]  float    aux states, low to high layer
        final  [T, D]  float    the target's last state, normed
        top    [T]     int32    argmax of the logits
        lse    [T]     float32  log-sum-exp of the logits

        Raises DataError for a NaN or infinity, and where lengths or widths differ.
        """
        given = dict(ids=ids, span=span, aux=aux, final=final, top=top, lse=lse)
        number, length = self.conversations + len(self._pending), len(ids)
        if not length:
            raise DataError(f"conversation {number}: no tokens")
        for name, (shape, kind) in self._columns.items():
            x = np.asarray(given[name])
            if x.shape != (length, *shape):
                raise DataError(
                    f"conversation {number}: {name} is {list(x.shape)}, {[length, *shape]} wanted"
                )
            given[name] = x = x.astype(kind, copy=False)
            if not np.issubdtype(kind, np.integer) and not (good := np.isfinite(x)).all():
                token = int(np.argmin(good.reshape(length, -1).all(axis=1)))
                value = x[token][~good[token]].flat[0]
                raise DataError(f"conversation {number}: {name} is {value} at token {token}")
        done = 0
        while done < length:
            take = min(SHARD - self._filled, length - done)
            for name, x in given.items():
                self._buffer[name][self._filled : self._filled + take] = x[done : done + take]
            self._filled, done = self._filled + take, done + take
            if done == length:
                self._pending.append((self._first + self._filled, held_out))
            if self._filled == SHARD:
                self._flush()
                self._first, self._filled = self._first + SHARD, 0

    def _flush(self) -> None:
        """The buffered shard to disk, then the conversations that are whole with it."""
        end = self._first + self._filled
        writes = []
        for name, array in self._arrays.items():
            if array.shape[0] < end:
                array = array.resize(exclusive_max=[end, *array.shape[1:]], expand_only=True).result()
                self._arrays[name] = array
            writes.append(array[self._first : end].write(self._buffer[name][: self._filled]))
        for write in writes:
            write.result()
        if self._pending:
            with open(self.path / ROWS, "ab") as file:
                file.write(np.asarray(self._pending, np.int64).tobytes())
                file.flush()
                os.fsync(file.fileno())
            self._commit(self.conversations + len(self._pending), self._pending[-1][0], complete=False)
            self._pending = []

    def _commit(self, conversations: int, tokens: int, complete: bool) -> None:
        state = dict(conversations=conversations, tokens=tokens, complete=complete)
        _write(self.path / COMMIT, json.dumps(state).encode())
        self.conversations, self.tokens, self._changed = conversations, tokens, not complete


class Column:
    """One array of a store, read by token range: `store.aux[a:b]` -> numpy in the stored dtype."""

    def __init__(self, path: Path, name: str, tokens: int, shape: tuple[int, ...], dtype: np.dtype):
        self._path, self._name, self._array = path, name, _array(path, name, shape, dtype, create=False)
        self.shape, self.dtype = (tokens, *shape), dtype
        if self._array.shape[0] < tokens:
            raise DataError(f"{path / name}: damaged: {self._array.shape[0]} tokens, {tokens} wanted")

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, tokens: slice) -> np.ndarray:
        start, stop, stride = tokens.indices(len(self))
        return _read(self._path, self._name, self._array, start, max(start, stop))[::stride]


class Store:
    """A complete store, for reading. Arrays of states are read by range, small ones are held in memory.

    offsets   [C + 1] int64   conversation c is tokens offsets[c] : offsets[c + 1]
    held_out  [C] bool        not to be trained on
    card      dict            the header, dtype, widths, tokens, conversations
    """

    def __init__(self, path: Path):
        self._path = path
        self.card = _json(path / HEADER) | (commit := _json(path / COMMIT))
        rows = _rows(path, commit)
        self.offsets = np.concatenate([[0], rows[:, 0]])
        self.held_out = rows[:, 1].astype(bool)
        kinds = columns(self.card["aux_width"], self.card["hidden_size"], self.card["dtype"])
        self._columns = {n: Column(path, n, commit["tokens"], *kind) for n, kind in kinds.items()}
        self.aux, self.final, self.top, self.lse = (self._columns[n] for n in ("aux", "final", "top", "lse"))

    @functools.cached_property
    def ids(self) -> np.ndarray:
        return self._columns["ids"][:]

    @functools.cached_property
    def span(self) -> np.ndarray:
        return self._columns["span"][:]


def open_store(path: str | Path) -> Store:
    """Raises DataError where there is no store, or its capture is not finished."""
    path = Path(path).resolve()
    if not (path / COMMIT).is_file():
        raise DataError(f"{path}: no feature store; `eagle3 capture` writes one to store.path")
    commit = _json(path / COMMIT)
    if not commit["complete"]:
        raise DataError(
            f"{path}: capture is not finished ({commit['conversations']} conversations so far); "
            "run `eagle3 capture` again, it goes on from there"
        )
    return Store(path)


def _array(
    path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype, create: bool = True
) -> ts.TensorStore:
    checked = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": [CHUNK, *shape], "codecs": checked, "index_codecs": checked}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": str(path / name)},
        # Without these two a lost shard would read as zeros.
        "fill_missing_data_reads": False,
        "store_data_equal_to_fill_value": True,
        "metadata": {
            "data_type": dtype.name,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [SHARD, *shape]}},
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        },
    }
    if create and not (path / name / "zarr.json").exists():
        spec["metadata"]["shape"] = [0, *shape]
        return ts.open(spec, create=True).result()
    try:
        return ts.open(spec, open=True).result()
    except ValueError as error:
        raise DataError(f"{path / name}: damaged or not of this store ({_line(error)})") from None


def _read(path: Path, name: str, array: ts.TensorStore, start: int, stop: int) -> np.ndarray:
    try:
        return array[start:stop].read().result()
    except ValueError as error:
        raise DataError(
            f"{path / name}: shard damaged within tokens {start} .. {stop - 1} ({_line(error)}); "
            "delete the store and capture it again"
        ) from None


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


def _rows(path: Path, commit: dict) -> np.ndarray:
    """[C, 2] int64: end of each committed conversation, held out."""
    if not commit["conversations"]:
        return np.zeros((0, 2), np.int64)
    rows = np.fromfile(path / ROWS, np.int64, count=2 * commit["conversations"])
    if len(rows) != 2 * commit["conversations"] or rows[-2] != commit["tokens"]:
        raise DataError(
            f"{path / ROWS}: damaged: it does not hold the {commit['conversations']} committed rows"
        )
    return rows.reshape(-1, 2)


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: damaged or missing ({_line(error)})") from None


def _write(path: Path, data: bytes) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
