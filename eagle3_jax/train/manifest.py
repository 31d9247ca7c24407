"""What every leaf of a run is, where it came from, and proof of what it did since step 0."""

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

# Two independent sums of 32 bits each; any odd looking constants would do.
SEEDS = (0x243F6A88, 0x9E3779B9)
CHUNK = 1 << 20  # words that the numpy version takes at a time

RANDOM, COPIED = "random from seed ", "copied from target tensor "
WARM, IMPORTED = "warm-started from ", "imported from "


def flat(tree) -> dict:
    """`draft/fc/kernel` -> leaf, in tree order."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _mix(x):
    """A bijection of uint32 that spreads every bit (Wellons' lowbias32), for numpy and jax alike."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _terms(word, position, seed: int):
    """What one word adds to the sum. Not linear in the word: a sum of word * weight would miss swapped signs."""
    return _mix(word ^ _mix(position + np.uint32(seed)))


@jax.jit
def _sums(x: jax.Array) -> list[jax.Array]:
    """Two uint32. Elementwise work and an integer sum: any mesh gives the same bits."""
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    width = min(x.dtype.itemsize, 4)
    # 8-byte types gain an axis of two words, least significant first, as numpy's view has them.
    word = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    position, stride = jnp.zeros(word.shape, jnp.uint32), 1
    for axis in reversed(range(word.ndim)):
        iota = jax.lax.broadcasted_iota(jnp.uint32, word.shape, axis)
        position, stride = position + iota * np.uint32(stride & 0xFFFFFFFF), stride * word.shape[axis]
    return [jnp.sum(_terms(word, position, seed), dtype=jnp.uint32) for seed in SEEDS]


def _numpy_sums(x: np.ndarray) -> list[int]:
    x = np.ascontiguousarray(x).reshape(-1)
    word = x.view(np.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}"))
    sums = [0, 0]
    for at in range(0, word.size, CHUNK):
        part = word[at : at + CHUNK].astype(np.uint32)
        position = np.arange(at, at + part.size, dtype=np.uint64).astype(np.uint32)
        sums = [
            (total + int(_terms(part, position, seed).sum(dtype=np.uint64))) & 0xFFFFFFFF
            for total, seed in zip(sums, SEEDS, strict=True)
        ]
    return sums


def digests(tree) -> dict[str, str]:
    """Path -> 16 hex digits of every leaf's bits and their order. Live arrays are summed where they are."""
    leaves = flat(tree)
    sums = {
        p: _sums(x) if isinstance(x, jax.Array) else _numpy_sums(np.asarray(x)) for p, x in leaves.items()
    }
    return {path: "{:08x}{:08x}".format(*map(int, pair)) for path, pair in jax.device_get(sums).items()}


def digest(array: jax.Array | np.ndarray) -> str:
    """16 hex digits: equal bits in the same order, equal digest, on any mesh and in numpy."""
    return digests({"": array})[""]


@jax.jit
def _movement(now: jax.Array, start: jax.Array) -> jax.Array:
    now, start = now.astype(jnp.float32), start.astype(jnp.float32)
    return jnp.sqrt(jnp.stack([jnp.sum(jnp.square(now - start)), jnp.sum(jnp.square(start))]))


def relative(moved: float, size: float) -> float | None:
    """Movement over the leaf's own norm; None where that is 0."""
    return moved / size if size else None


def build(
    state: dict, labels: dict, origins: dict, facts: dict, start: dict | None = None, begun=None
) -> dict:
    """The manifest of this moment, plain JSON values.

    state    live arrays, nested: draft, embedding and, where held in full, target
    labels   same tree, "train" or "frozen" at the leaves; leaves outside `state` are left out
    origins  path -> `RANDOM`, `COPIED`, `WARM` or `IMPORTED` followed by seed, tensor, run or file and tensor
    facts    run level: vocabulary map, tokenizer, data, held-out split, coverage, versions, ...
    start    trained leaves at step 0, numpy or live; None at step 0
    begun    the manifest of step 0; None at step 0
    """
    now, label, start = digests(state), flat(labels), flat(start or {})
    leaves = {}
    for path, x in flat(state).items():
        entry = dict(shape=list(x.shape), dtype=str(x.dtype), origin=origins[path], label=label[path])
        entry["digest"] = now[path]
        if label[path] == "frozen":
            entry["start_digest"] = begun["leaves"][path]["digest"] if begun else now[path]
        else:
            was = jax.device_put(start[path], x.sharding) if path in start else x
            moved, size = (float(v) for v in _movement(x, was))
            entry |= dict(moved=moved, relative=relative(moved, size))
        leaves[path] = entry
    return {"leaves": leaves, "facts": facts}


def expected_label(path: str, freeze) -> str:
    """What the `train.freeze` patterns say about a leaf."""
    return "frozen" if any(re.fullmatch(pattern, path) for pattern in freeze) else "train"


@functools.cache
def versions() -> dict[str, str]:
    """Of everything that the numbers of a run depend on."""
    names = ("eagle3-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
    device = jax.devices()[0]
    return {name: importlib.metadata.version(name) for name in names} | {
        "python": platform.python_version(),
        "device": machine() if device.platform == "cpu" else f"{device.platform} {device.device_kind}",
    }


def machine() -> str:
    """The processor's name and its cores, as far as the system tells."""
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return f"{found[1] if found else platform.machine()}, {os.cpu_count()} cores"
