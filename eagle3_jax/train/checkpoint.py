"""The only module that speaks Orbax: what a run began with, and its steps.

    RUN/start/   frozen   the embedding as used, frozen draft leaves, d2t (int64)       written once, before the
                 params   the trained leaves at step 0                                  first update, never removed
    RUN/steps/N/ params   the trained leaves       opt   optax state       data   loader position (JSON)

`meta` (JSON) in each, and `metrics` where the step was evaluated on held-out prompts. Trees are nested dicts
under "draft" and, where it is trained, "embedding".
"""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers

from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import CheckpointError
from eagle3_jax.train import manifest

SCHEMA = 1
FULL = os.strerror(errno.ENOSPC)
METRIC, BEST = "accept_length", "best"  # what steps are ranked by; in place of a step's number: the best one

Step = int | Literal["best"] | None  # of a run; None: the newest, 0: the start

# A resumed run may differ in these: none changes what is computed, beyond the rounding of another mesh.
FREE = (
    "mesh", "evaluate", "regenerate", "train.run", "train.save_every", "train.keep", "train.log_every",
    "train.prefetch", "train.evaluate_every", "train.patience",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedDraft:
    """A draft as numpy arrays: what evaluation and export need, and nothing of the optimiser."""

    shape: DraftShape
    params: dict  # float32, the whole tree of draft/model.py: trained and frozen leaves
    embedding: np.ndarray  # [V, D]
    d2t: np.ndarray  # [U] int64 offsets
    step: int
    meta: dict


def holds(run_dir: str | Path, config: dict) -> bool:
    """Whether `run_dir` holds a run of this config (`config.to_dict`); False: nothing has begun there.

    Raises CheckpointError where another config, or anything but a run, is in the way.
    """
    run = Path(run_dir)
    if run.exists() and not run.is_dir():
        raise CheckpointError(f"{run}: a file; train.run wants a directory")
    if (run / "start").exists():
        try:
            meta = _meta(run / "start")
            _item(run / "start" / "frozen"), _item(run / "start" / "params")
        except _DamagedError as error:
            if _steps(run):
                raise CheckpointError(f"{error}; the run cannot be used without it") from None
            print(f"{error}; it has no steps yet and begins again", file=sys.stderr)
            shutil.rmtree(run / "start")
            return False
        _same_config(run, meta["config"], config)
        return True
    # Orbax writes beside the final name: what a killed start leaves behind is a `start.*tmp*` directory.
    there = sorted(p.name for p in run.iterdir()) if run.is_dir() else []
    other = [n for n in there if not n.startswith("start.") and not (n == "steps" and not _steps(run))]
    if other:
        raise CheckpointError(f"{run}: not empty ({other[0]!r}) and not a run; name another train.run")
    return False


def start(run_dir: str | Path, frozen: dict, params: dict, meta: dict) -> bool:
    """Write what the run begins with; False where a run of the same config has already begun.

    `frozen` holds {"embedding": {"embedding": [V, D]}, "d2t": numpy int64} and the frozen draft leaves under
    "draft"; `meta` as in `Steps.save`. Raises CheckpointError as `holds` does.
    """
    run = Path(run_dir).resolve()
    if holds(run, meta["config"]):
        return False
    for half in run.glob("start.*"):
        shutil.rmtree(half)
    run.mkdir(parents=True, exist_ok=True)
    items = {"frozen": frozen, "params": params}
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as writer:
        writer.save(
            run / "start",
            args=ocp.args.Composite(
                meta=ocp.args.JsonSave(_stamped(meta, 0, items)),
                **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
            ),
        )
    return True


class Steps:
    """The steps of a run: the newest `keep` and the best of those that were evaluated.

    Leaving the `with` block waits for what is being written.
    """

    def __init__(self, run_dir: str | Path, keep: int):
        self._run = Path(run_dir).resolve()
        newest = checkpoint_managers.LatestN(keep)
        best = checkpoint_managers.BestN(get_metric_fn=_metric, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            preservation_policy=checkpoint_managers.AnyPreservationPolicy([newest, best]),
            best_fn=_metric, cleanup_tmp_directories=True,
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(self._run / "steps", options=options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._manager.close()

    def wait(self) -> None:
        """Until everything saved so far is on disk."""
        self._manager.wait_until_finished()

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(
        self, step: int, params: dict, opt, data_state: dict, meta: dict, accept_length: float | None = None
    ) -> None:
        """Copy to the host, then write in the background. Raises CheckpointError if the step is there already.

        `meta`: config (`config.to_dict`), shape (`dataclasses.asdict`), target (path, shape, weights_digest),
        aux_layers, manifest. Schema, step and the digests of params and opt are added here. The step with the highest
        `accept_length` is kept.
        """
        items = {"params": params, "opt": opt}
        saved = self._manager.save(
            step,
            metrics=None if accept_length is None else {METRIC: accept_length},
            args=ocp.args.Composite(
                data=ocp.args.JsonSave(_plain(data_state)),
                meta=ocp.args.JsonSave(_stamped(meta, step, items)),
                **{name: ocp.args.StandardSave(tree) for name, tree in items.items()},
            ),
        )
        if not saved:  # Orbax returns False, without a word, for a step that is not newer than its latest
            raise CheckpointError(
                f"{self._run}: step {step} was not written; steps there: {_listed(self._run)}"
            )

    def restore(self, step: int | None, params: dict, opt) -> tuple[dict, object, dict, dict]:
        """(params, opt, data_state, meta) of a step, bit for bit, on the shardings of `params` and `opt`.

        Both may be abstract. With step None the newest whole step is taken: a damaged one is moved to
        RUN/damaged and standard error says so. Raises CheckpointError for a step that is not there, is
        damaged, or does not fit.
        """
        self.wait()
        if step is not None:
            return self._restore(step, params, opt)
        while (newest := self.latest()) is not None:
            try:
                return self._restore(newest, params, opt)
            except _DamagedError as error:
                print(f"{error}; falling back to the step before", file=sys.stderr)
                aside = self._run / "damaged"
                aside.mkdir(exist_ok=True)
                count = len(list(aside.iterdir()))
                # Left in place it would stop this step from being written again.
                (self._run / "steps" / str(newest)).rename(aside / f"{newest}-{count}")
                self._manager.reload()
        raise CheckpointError(f"{self._run}: no whole step to restore; start again in another train.run")

    def _restore(self, step, params, opt):
        where = self._run / "steps" / str(step)
        meta = _meta(_step_dir(self._run, step))
        wanted = {"params": jax.tree.map(_abstract, params), "opt": jax.tree.map(_abstract, opt)}
        for name, tree in wanted.items():
            _fits(where / name, tree)
        with _damage(where):
            restored = self._manager.restore(
                step,
                args=ocp.args.Composite(
                    data=ocp.args.JsonRestore(),
                    **{name: ocp.args.StandardRestore(tree) for name, tree in wanted.items()},
                ),
            )
        for name in wanted:
            _verify(where / name, restored[name], meta)
        return restored["params"], restored["opt"], restored["data"], meta


@contextlib.contextmanager
def room_to_write(run_dir: str | Path) -> Iterator[None]:
    """Around whatever writes into a run: a full disk is a CheckpointError that names the newest whole step."""
    try:
        yield
    except (OSError, ValueError) as error:  # Orbax raises a ValueError, often one save later
        if FULL not in str(error):
            raise
        whole = _steps(Path(run_dir))
        raise CheckpointError(
            f"{run_dir}: {FULL.lower()}; step {whole[-1] if whole else 0} is whole: free some and give the same command"
        ) from None


def _worth_logging(record: logging.LogRecord) -> bool:
    """Not what is raised to the caller anyway: Orbax's threads would log a full disk in hundreds of lines.

    Nor that a step has no metrics: not every one is evaluated.
    """
    raised = record.exc_info[1] if record.exc_info else ""
    text = f"{record.getMessage()} {raised}"
    return FULL not in text and "did not provide metrics" not in text


for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_worth_logging)


def read_meta(run_dir: str | Path, step: Step = None) -> dict:
    """The meta of a step. Raises CheckpointError."""
    return _meta(_step_dir(_run(run_dir), step))


def read_start(run_dir: str | Path) -> tuple[dict, dict, dict]:
    """(frozen, params, meta) of step 0 as numpy arrays. Raises CheckpointError."""
    where = _run(run_dir) / "start"
    meta = _meta(where)
    return _read(where / "frozen", meta), _read(where / "params", meta), meta


def read_step(run_dir: str | Path, step: Step = None) -> tuple[dict, dict]:
    """(params, meta) of a step as numpy arrays. Raises CheckpointError."""
    where = _step_dir(_run(run_dir), step)
    meta = _meta(where)
    return _read(where / "params", meta), meta


def steps_of(run_dir: str | Path) -> list[int]:
    """The steps that can be read, 0 first. Raises CheckpointError."""
    return [0, *_steps(_run(run_dir))]


def load_draft(path: str | Path, step: Step = None) -> LoadedDraft:
    """The draft of a run directory or of RUN/steps/N. Raises CheckpointError."""
    path = Path(path)
    if step is None and path.parent.name == "steps" and path.name.isdigit():
        path, step = path.parent.parent, int(path.name)
    frozen, begun, meta = read_start(path)
    trained = begun
    if step != 0 and (step is not None or _steps(path)):
        trained, meta = read_step(path, step)
    tree = _merge({k: v for k, v in frozen.items() if k != "d2t"}, trained)
    return LoadedDraft(
        shape=shape_of(meta),
        params=tree["draft"],
        embedding=tree["embedding"]["embedding"],
        d2t=frozen["d2t"],
        step=meta["step"],
        meta=meta,
    )


def shape_of(meta: dict) -> DraftShape:
    """DraftShape of a meta: JSON has no tuples."""
    shape = dict(meta["shape"])
    if shape["rope_scaling"] is not None:
        shape["rope_scaling"] = tuple(tuple(item) for item in shape["rope_scaling"])
    return DraftShape(**shape)


class _DamagedError(CheckpointError):
    """Files that are not as they were written: the one case in which an older step may serve."""


@contextlib.contextmanager
def _damage(where: Path):
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise _DamagedError(f"{where}: damaged ({cause[:160]})") from None


def _run(path: str | Path) -> Path:
    run = Path(path)
    if not (run / "start").is_dir():
        found = "no such directory" if not run.is_dir() else "no start/ in it"
        raise CheckpointError(f"{run}: {found}; a run directory, as `eagle3 train` writes it, is wanted")
    return run.resolve()


def _steps(run: Path) -> list[int]:
    return sorted(ocp.utils.checkpoint_steps(run / "steps")) if (run / "steps").is_dir() else []


def _listed(run: Path) -> str:
    return ", ".join(map(str, [0, *_steps(run)]))


def _metric(metrics: dict) -> float:
    return metrics[METRIC]


def _best(run: Path) -> int:
    lengths = {}
    for step in _steps(run):
        with contextlib.suppress(FileNotFoundError):
            lengths[step] = _metric(
                json.loads((run / "steps" / str(step) / "metrics" / "metrics").read_text())
            )
    if not lengths:
        raise CheckpointError(
            f"{run}: no step there was evaluated while training, so none is the best; name one "
            f"({_listed(run)}), or train with train.evaluate_every"
        )
    return max(lengths, key=lambda step: (lengths[step], step))


def _step_dir(run: Path, step: Step) -> Path:
    there = [0, *_steps(run)]
    step = there[-1] if step is None else _best(run) if step == BEST else step
    if step not in there:
        raise CheckpointError(f"{run}: no step {step}; steps there: {_listed(run)}")
    return run / "steps" / str(step) if step else run / "start"


def _meta(where: Path) -> dict:
    with _damage(where / "meta"):
        meta = ocp.JsonCheckpointHandler().restore(where / "meta")
    if meta["schema"] != SCHEMA:
        raise CheckpointError(f"{where}: schema {meta['schema']}; this version reads schema {SCHEMA}")
    return meta


def _stamped(meta: dict, step: int, items: dict) -> dict:
    sums = {name: manifest.digests(tree) for name, tree in items.items()}
    return _plain({"schema": SCHEMA, "step": step} | meta | {"digests": sums})


def _plain(tree: dict) -> dict:
    """A copy in JSON's own types: writing is done later, when the caller may have changed its dict."""
    return json.loads(json.dumps(tree))


def _item(where: Path) -> dict:
    """The tree of what an item holds: shapes and dtypes, no arrays."""
    with _damage(where):
        return ocp.PyTreeCheckpointHandler().metadata(where.resolve()).tree  # it takes no relative path


def _read(where: Path, meta: dict) -> dict:
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), _item(where))
    with _damage(where):
        tree = ocp.PyTreeCheckpointHandler().restore(
            where, args=ocp.args.PyTreeRestore(restore_args=as_numpy)
        )
    _verify(where, tree, meta)
    return tree


def _verify(where: Path, tree, meta: dict) -> None:
    """Orbax keeps no checksum of array data: a flipped bit reads as another number."""
    now, then = manifest.digests(tree), meta["digests"][where.name]
    changed = [path for path in then if now.get(path) != then[path]]
    if changed:
        raise _DamagedError(f"{where}: damaged ({changed[0]!r} is not what was written)")


def _abstract(x) -> jax.ShapeDtypeStruct:
    sharding = getattr(x, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _fits(where: Path, tree) -> None:
    """Names, shapes and dtypes: Orbax would cast to another dtype without a word."""
    there, wanted = manifest.flat(_item(where)), manifest.flat(tree)
    for path in sorted(there.keys() | wanted.keys()):
        found, want = (
            f"{np.dtype(t[path].dtype)} {list(t[path].shape)}" if path in t else "nothing"
            for t in (there, wanted)
        )
        if found != want:
            raise CheckpointError(f"{where}: {path!r} holds {found}, {want} wanted")


def _same_config(run: Path, there: dict, wanted: dict) -> None:
    if "train" not in there:
        raise CheckpointError(
            f"{run}: an imported draft; to start from it set train.init={run} and another train.run"
        )
    there, wanted = _dotted(there), _dotted(_plain(wanted))
    for key in [*wanted, *(k for k in there if k not in wanted)]:
        if there.get(key) != wanted.get(key) and not any(f"{key}.".startswith(f"{f}.") for f in FREE):
            raise CheckpointError(
                f"{run}: holds a run with {key}={there.get(key)!r}, now {wanted.get(key)!r}; "
                "set it back or name another train.run"
            )


def _dotted(tree: dict, prefix: str = "") -> dict:
    out = {}
    for key, value in tree.items():
        out |= _dotted(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def _merge(a: dict, b: dict) -> dict:
    """Two trees with leaves of their own as one."""
    out = dict(a)
    for key, value in b.items():
        out[key] = _merge(a[key], value) if key in a else value
    return out
