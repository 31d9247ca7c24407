"""Safetensors in and out. No other module reads or writes such a file; pickles are never opened."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from eagle3_jax.errors import WeightError

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class LazyTensor:
    """One tensor of a file: `t[3:5]` reads two rows, `t[...]` all of it. Shape and dtype cost no read.

    `dtype` is None where numpy has no such type (float8); reading such a tensor raises WeightError.
    """

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: np.dtype | None
    _handle: object

    def __getitem__(self, index) -> np.ndarray:
        if self.dtype is None:
            kind = self._handle.get_slice(self.name).get_dtype()
            raise WeightError(f"{self.file}: {self.name!r} is {kind}; known: {', '.join(DTYPES)}")
        if index is Ellipsis:
            return self._handle.get_tensor(self.name)
        return self._handle.get_slice(self.name)[index]

    def blocks(self, rows: int = 4096) -> Iterator[np.ndarray]:
        """All of it, some rows at a time."""
        for i in range(
            0, self.shape[0], rows
        ):  # the library's slices, unlike numpy's, end where the tensor does
            yield self[i : min(i + rows, self.shape[0])]


def save(path: str | Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str] | None = None) -> None:
    """Write one file, whole or not at all."""
    path = Path(path)
    # The library writes a transposed view's buffer as it lies in memory: wrong numbers and no error.
    # (np.ascontiguousarray would give scalars an axis.)
    solid = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        save_file(solid, part, metadata={"format": "pt"} | (metadata or {}))
        os.replace(part, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def open_tensors(path: str | Path) -> dict[str, LazyTensor]:
    """Every tensor of a .safetensors file or of a model directory (one file, or shards with an index).

    Raises WeightError for a missing shard, a damaged file, and a directory that only holds pickles.
    """
    path = Path(path)
    if path.is_file():
        return _open(path)
    if not path.is_dir():
        raise WeightError(f"{path}: not found; a .safetensors file or a model directory is wanted")
    if (path / INDEX).is_file():
        return _open_shards(path)
    if (path / FILE).is_file():
        return _open(path / FILE)
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return _open(found[0])
    if found:
        raise WeightError(f"{path}: {len(found)} .safetensors files without {INDEX}; which one is meant?")
    if pickles := sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in path.glob(pattern)):
        raise WeightError(
            f"{path}: only {pickles[0]}, a pickle, which is never opened; save it as safetensors"
        )
    raise WeightError(f"{path}: no {FILE} and no {INDEX}")


def read(path: str | Path) -> dict[str, np.ndarray]:
    """Every tensor of a file or model directory, in memory; bfloat16 as ml_dtypes.bfloat16."""
    return {name: tensor[...] for name, tensor in open_tensors(path).items()}


def metadata(path: str | Path) -> dict[str, str]:
    """The text that `save` stored beside the tensors of one file."""
    return dict(_handle(Path(path)).metadata() or {})


def _handle(file: Path):
    if file.suffix in (".bin", ".pt", ".pth"):
        raise WeightError(f"{file}: a pickle is never opened; save it as safetensors")
    try:
        return safe_open(file, "numpy")
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file}: truncated or not safetensors ({error})") from None


def _open(file: Path) -> dict[str, LazyTensor]:
    handle, out = _handle(file), {}
    for name in handle.keys():  # noqa: SIM118 (the handle is no dict)
        slot = handle.get_slice(name)
        kind = DTYPES.get(slot.get_dtype())
        dtype = None if kind is None else np.dtype(kind)
        out[name] = LazyTensor(name, file, tuple(slot.get_shape()), dtype, handle)
    return out


def _open_shards(directory: Path) -> dict[str, LazyTensor]:
    index = directory / INDEX
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise WeightError(f"{index}: not an index of shards ({error!r})") from None
    shards = {}
    for shard in sorted(set(where.values())):
        file = directory / shard
        if file.parent != directory or not file.is_file():
            raise WeightError(f"{index}: names the shard {shard!r}, which is not there")
        shards[shard] = _open(file)
    out = {}
    for name, shard in where.items():
        if name not in shards[shard]:
            raise WeightError(f"{index}: {name!r} is said to be in {shard!r}, which has no such tensor")
        out[name] = shards[shard][name]
    return out
