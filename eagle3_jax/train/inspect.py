"""What a run really did, recomputed from its files: where each leaf began, whether it moved, what stayed put."""

import dataclasses
import functools
import math
import re
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from eagle3_jax import tensors
from eagle3_jax.config import FREEZE
from eagle3_jax.draft import model
from eagle3_jax.errors import CheckpointError, WeightError
from eagle3_jax.train import checkpoint, manifest

EMBEDDING, EMBEDDING_TENSOR = "embedding/embedding", "model.embed_tokens.weight"
TARGET_HEAD = "target/head/kernel"
NO_TARGET = "not verified: target not found"
CLOSE = 1e-5  # of the leaf's maximum: the same seed on another kind of machine


@dataclasses.dataclass
class Leaf:
    label: str
    shape: list[int]
    origin: str
    origin_check: str = "verified"  # or "wrong", or "not verified: ..."
    moved: float | None = None  # ||now - step 0||; trained leaves, from the files
    relative: float | None = None
    unchanged: bool | None = None  # frozen leaves: the live bits equal those of step 0


@dataclasses.dataclass
class Report:
    run: str
    step: int
    began: str  # from scratch, or what from
    embedding: dict
    leaves: dict[str, Leaf]
    facts: dict
    findings: list[str]

    @property
    def code(self) -> int:
        """Exit code: 1 where anything is not as it should be."""
        return int(bool(self.findings))

    def to_dict(self) -> dict:
        return dataclasses.asdict(self)

    def render(self, console: Console) -> None:
        table = Table(title=f"{self.run}, step {self.step}", box=None)
        for column in ("leaf", "shape", "label", "since step 0", "origin", "check"):
            table.add_column(column, no_wrap=True)
        for path, leaf in self.leaves.items():
            shape = " x ".join(map(str, leaf.shape))
            table.add_row(path, shape, leaf.label, _since(leaf), leaf.origin, leaf.origin_check)
        # A line that runs on reads better than a cell of four lines.
        Console(file=console.file, width=max(console.width, 190)).print(table)
        console.print(f"began: {self.began}", highlight=False, soft_wrap=True)
        for key, value in self.embedding.items():
            console.print(f"embedding, {key.replace('_', ' ')}: {_shown(value)}", highlight=False)
        for key, value in _lines(self.facts):
            console.print(f"{key}: {_shown(value)}", highlight=False, soft_wrap=True)
        for finding in self.findings:
            console.print(f"FINDING: {finding}", style="bold red", highlight=False, markup=False)
        if not self.findings:
            console.print("nothing found: what is frozen stayed, what is trained moved")


def _lines(facts: dict, prefix: str = ""):
    """`held out, share` -> value, for nested dicts."""
    for key, value in facts.items():
        name = prefix + key.replace("_", " ")
        if isinstance(value, dict) and value:
            yield from _lines(value, f"{name}, ")
        else:
            yield name, value


def _shown(value) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _since(leaf: Leaf) -> str:
    if leaf.label == "frozen":
        return "same bits" if leaf.unchanged else "CHANGED"
    if leaf.moved is None:
        return "-"
    return f"moved {leaf.moved:.3g}" + ("" if leaf.relative is None else f" ({leaf.relative:.2%})")


def inspect(run_dir: str | Path, step: checkpoint.Step = None) -> Report:
    """Compare a step (newest unless told) with the run's start and, where it can be read, the target.

    Raises CheckpointError where there is no run or it is damaged. Whatever is wrong with a whole run is in
    `findings`.
    """
    frozen, begun, start_meta = checkpoint.read_start(run_dir)
    params, meta = checkpoint.read_step(run_dir, step)
    told = meta["manifest"]["leaves"]
    held, was, now = (manifest.flat(tree) for tree in (frozen, begun, params))
    freeze = meta["config"].get("train", {}).get("freeze", FREEZE)
    origins = _Origins(start_meta, frozen["d2t"], held | was)
    leaves, findings = {}, []

    for path, entry in told.items():
        leaf = leaves[path] = Leaf(entry["label"], entry["shape"], entry["origin"])
        wanted = manifest.expected_label(path, freeze)
        if leaf.label != wanted:
            findings.append(f"{path} is labelled {leaf.label}; train.freeze={list(freeze)} says {wanted}")
        if leaf.label == "frozen":
            before = manifest.digest(held[path]) if path in held else entry["start_digest"]
            leaf.unchanged = before == entry["digest"] == entry["start_digest"]
            if not leaf.unchanged:
                findings.append(f"{path} is frozen but its bits changed since step 0")
        elif path not in now:
            findings.append(f"{path} is labelled train but the checkpoint does not hold it")
        elif meta["step"]:
            findings += _movement(path, leaf, was[path], now[path])
        leaf.origin_check, problem = origins.check(path, entry)
        findings += problem
    findings += [f"{path} is in the checkpoint but not in the manifest" for path in now if path not in told]

    embedding, problems = _embedding(leaves, told, origins)
    findings += problems
    facts = dict(meta["manifest"]["facts"])
    if facts.get("vocabulary_map") not in (None, manifest.digest(frozen["d2t"])):
        findings.append("the vocabulary map (d2t) is not the one that the manifest names")
    return Report(
        run=str(run_dir),
        step=meta["step"],
        began=_began(leaves),
        embedding=embedding,
        leaves=leaves,
        facts=facts,
        findings=findings,
    )


def _movement(path: str, leaf: Leaf, was: np.ndarray, now: np.ndarray) -> list[str]:
    was, now = (x.astype(np.float32) for x in (was, now))
    if not np.isfinite(now).all():
        return [f"{path} holds NaN or infinity"]
    change = now - was
    norm, size = (math.sqrt(np.sum(np.square(x), dtype=np.float64)) for x in (change, was))
    leaf.moved, leaf.relative = norm, manifest.relative(norm, size)
    if not norm:
        return [f"{path} is trained but did not move since step 0: no gradient reaches it"]
    # Decay alone draws every weight towards 0, along the leaf itself; a gradient never does.
    along = np.sum(change * was, dtype=np.float64) / (norm * size) if size else 0.0
    # Norm scales are not decayed, and a head that is too sure shrinks all of one's entries.
    if was.ndim > 1 and was.size >= 16 and along < -0.9 and not (np.abs(now) > np.abs(was)).any():
        return [f"{path} only shrank towards 0, as weight decay does: no gradient reaches it"]
    return []


def _embedding(leaves: dict[str, Leaf], told: dict, origins: "_Origins") -> tuple[dict, list[str]]:
    if EMBEDDING not in leaves:
        return {}, [f"the manifest says nothing about {EMBEDDING}"]
    leaf, findings = leaves[EMBEDDING], []
    out = {"label": leaf.label, "equals_step_0": leaf.unchanged, "equals_target": NO_TARGET}
    if leaf.label == "train":
        out["equals_step_0"] = not leaf.moved
        findings.append(f"{EMBEDDING} is trained; it should be frozen, for engines serve the target's own")
    if EMBEDDING_TENSOR in origins.target:
        there = manifest.digest(origins.target[EMBEDDING_TENSOR][...])
        out["equals_target"] = there == told[EMBEDDING]["digest"]
        if not out["equals_target"] and leaf.label == "frozen":
            findings.append(f"{EMBEDDING} differs from the target's {EMBEDDING_TENSOR}")
    return out, findings


def _began(leaves: dict[str, Leaf]) -> str:
    """From scratch or not, by what the draft's own leaves were made of."""
    draft = {path: leaf.origin for path, leaf in leaves.items() if path.startswith("draft/")}
    other = {path: origin for path, origin in draft.items() if not origin.startswith(manifest.RANDOM)}
    if other and len(other) == len(draft):
        return "; ".join(sorted(set(other.values())))
    seeds = sorted({origin for path, origin in draft.items() if path not in other})
    return "; ".join([f"from scratch, {', '.join(seeds)}", *(f"but {p} {o}" for p, o in other.items())])


class _Origins:
    """Checks what the manifest says about step 0 against seed, target and earlier run."""

    def __init__(self, meta: dict, d2t: np.ndarray, start: dict[str, np.ndarray]):
        self._shape, self._start = checkpoint.shape_of(meta), start
        self._ids = d2t + np.arange(len(d2t))
        self._same_jax = (
            meta["manifest"]["facts"].get("versions", {}).get("jax") == manifest.versions()["jax"]
        )
        self.target: dict[str, tensors.LazyTensor] = {}
        path = Path(meta["target"]["path"])
        if path.is_dir():
            try:
                self.target = tensors.open_tensors(path)
            except WeightError:  # reads as "target not found" below
                self.target = {}

    def check(self, path: str, entry: dict) -> tuple[str, list[str]]:
        """(verified | wrong | not verified: why, findings) of a leaf with this entry in the manifest."""
        origin = entry["origin"]
        if path == TARGET_HEAD and len(entry["shape"]) == 2 and entry["shape"][0] == len(self._ids):
            return self._head_rows(entry)
        if path not in self._start:
            return "not verified: not in the checkpoint", []
        if origin.startswith(manifest.RANDOM):
            return self._random(path, int(origin.removeprefix(manifest.RANDOM)))
        if origin.startswith(manifest.COPIED):
            return self._copied(path, origin.removeprefix(manifest.COPIED))
        if origin.startswith(manifest.IMPORTED):
            return "not verified: imported", []
        return self._warm(path, origin.removeprefix(manifest.WARM))

    @functools.cache  # noqa: B019 (one per report)
    def _drawn(self, seed: int) -> dict[str, np.ndarray]:
        # A run that is still training may hold all of an accelerator's memory.
        device = None if jax.default_backend() == "cpu" else jax.local_devices(backend="cpu")[0]
        with jax.default_device(device):
            return jax.device_get(manifest.flat({"draft": model.init(self._shape, seed)[1]}))

    def _random(self, path: str, seed: int) -> tuple[str, list[str]]:
        found, drawn = self._start[path], self._drawn(seed).get(path)
        fits = drawn is not None and drawn.shape == found.shape
        if fits and np.abs(drawn - found).max() <= CLOSE * np.abs(drawn).max():
            return "verified", []
        twin = next((name for name in self.target if self._equals(path, name)), None)
        if twin is not None:
            return "wrong", [f"{path} is declared random, but at step 0 it is a copy of target tensor {twin}"]
        if not self._same_jax:
            return "not verified: another version of jax drew it", []
        return "wrong", [f"{path} is declared random from seed {seed}, which draws other numbers"]

    def _copied(self, path: str, name: str) -> tuple[str, list[str]]:
        if not self.target:
            return NO_TARGET, []
        if name in self.target and self._equals(path, name):
            return "verified", []
        return "wrong", [f"{path} is declared a copy of target tensor {name}, but at step 0 it is not"]

    def _head_rows(self, entry: dict) -> tuple[str, list[str]]:
        """The target's head, of which training offline holds the draft vocabulary's rows; only their digest is kept."""
        if not self.target:
            return NO_TARGET, []
        name = entry["origin"].removeprefix(manifest.COPIED)
        rows = (
            self.target[name][...][self._ids].astype(entry["dtype"]) if name in self.target else np.zeros(0)
        )
        if manifest.digest(rows) == entry["start_digest"]:
            return "verified", []
        return "wrong", [f"{TARGET_HEAD} is declared rows of target tensor {name}, but at step 0 it is not"]

    def _warm(self, path: str, source: str) -> tuple[str, list[str]]:
        run, step = re.fullmatch(r"(.*?)(?: step (\d+))?", source).groups()
        try:
            there = self._loaded(run, step and int(step))
        except CheckpointError:
            return "not verified: that run not found", []
        if np.array_equal(there.get(path), self._start[path]):
            return "verified", []
        return "wrong", [f"{path} is declared warm-started from {source}, but at step 0 it is not its"]

    @functools.cache  # noqa: B019 (one per report)
    def _loaded(self, run: str, step: int | None) -> dict[str, np.ndarray]:
        draft = checkpoint.load_draft(run, step)
        return manifest.flat({"draft": draft.params, "embedding": {"embedding": draft.embedding}})

    def _equals(self, path: str, name: str) -> bool:
        """Whether a leaf is a target tensor, as it is or transposed, or its rows of the draft vocabulary."""
        leaf, tensor = self._start[path], self.target[name]
        if tensor.dtype is None or len(tensor.shape) != leaf.ndim or leaf.size < 2:
            return False
        if path == "draft/lm_head/kernel" and tensor.shape == (
            self._shape.vocab_size,
            self._shape.hidden_size,
        ):
            there = tensor[...][self._ids].T
        elif tensor.shape == leaf.shape:
            there = tensor[...]
        elif tensor.shape == leaf.T.shape:
            there = tensor[...].T
        else:
            return False
        return np.array_equal(there.astype(leaf.dtype), leaf)
