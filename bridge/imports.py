"""A draft directory -> a run: to evaluate any public draft here, and to start training from it (`train.init`)."""

import dataclasses
from pathlib import Path

import numpy as np

from bridge import check, convert, fields, weight_map
from bridge.weight_map import D2T, EMBEDDING, T2D
from eagle3_jax import config as configuration
from eagle3_jax import tensors
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import CheckpointError, ConfigError
from eagle3_jax.target import weights


def import_draft(directory: str | Path, run: str | Path, target: str | Path | None = None) -> dict:
    """Write the draft of `directory`, in SGLang's layout, to the new run directory `run`, as its step 0.

    `target` is the model that it was trained for; unless given, the one that our own exports name. The embedding is
    the target's: it is what engines serve. Returns what was written: run, directory, tensors, dtype, target. Raises
    ConfigError or WeightError where `bridge check` finds an error, CheckpointError where `run` is something already.
    """
    from eagle3_jax.train import checkpoint, manifest, optim, setup  # Orbax is slow to import

    directory, run = Path(directory), Path(run)
    if run.exists() and (not run.is_dir() or any(run.iterdir())):
        raise CheckpointError(f"{run}: exists; an imported draft becomes a new run directory")
    config = convert.read_config(directory)
    files = setup.find_target(_served(directory, config, target))
    shape = _healthy(directory, config, files.directory)
    found = tensors.read(directory)
    dtype = config.get("torch_dtype") or config.get("dtype") or "float32"
    if dtype not in convert.DTYPES:
        dtype = "float32"  # holds every float16 exactly
    beside = {name: found.pop(name, None) for name in weight_map.BESIDE}
    d2t = np.zeros(shape.draft_vocab_size, np.int64) if beside[D2T] is None else beside[D2T].astype(np.int64)
    convert.token_ids(d2t, shape)
    params = weight_map.load({name: x.astype(np.float32) for name, x in found.items()}, shape)
    state = {"draft": params, "embedding": {"embedding": files.rows(setup.EMBEDDING)}}
    labels = optim.labels(state, ("embedding/.*",))
    origins = {
        f"draft/{row.ours}": f"{manifest.IMPORTED}{directory} {row.theirs}" for row in weight_map.rows(shape)
    }
    origins |= {"embedding/embedding": f"{manifest.COPIED}{setup.EMBEDDING}"}
    came = {"weights_digest": weights.digest(directory), "provenance": config.get("provenance")}
    facts = dict(
        imported={"directory": str(directory)} | came,
        vocabulary_map=manifest.digest(d2t), versions=manifest.versions(),
    )  # fmt: skip
    told = fields.aux_layers(config)
    served = configuration.ServeConfig(
        target=configuration.Target(
            path=str(files.directory), dtype=dtype,
            aux_layers=files.shape.default_aux_layers if told is None else tuple(told),
        )
    )  # fmt: skip
    meta = dict(
        config=configuration.to_dict(served), shape=dataclasses.asdict(shape),
        aux_layers=list(served.target.aux_layers), manifest=manifest.build(state, labels, origins, facts),
        target=dict(
            path=str(files.directory), shape=files.shape.model_dump(), weights_digest=weights.digest(files.directory)
        ),
    )  # fmt: skip
    checkpoint.start(run, {"d2t": d2t, "embedding": state["embedding"]}, {"draft": params}, meta)
    return dict(
        run=str(run), directory=str(directory), tensors=len(found), dtype=dtype, target=str(files.directory)
    )


def _served(directory: Path, config: dict, target: str | Path | None) -> configuration.ServeConfig:
    told = target or (config.get("provenance") or {}).get("target")
    if not told:
        raise ConfigError(f"{directory}/{convert.CONFIG}: names no target; say which one: --target DIR")
    return configuration.ServeConfig(target=configuration.Target(path=str(told)))


def _healthy(directory: Path, config: dict, target: Path) -> DraftShape:
    """The draft's shape. Raises ConfigError where `bridge check` finds an error."""
    shape = fields.draft_shape(config, f"{directory}/{convert.CONFIG}")
    unneeded = {EMBEDDING, T2D} | ({D2T} if shape.draft_vocab_size == shape.vocab_size else set())
    errors = [
        f for f in check.check(directory, target)
        if f.severity == "error" and not (f.where in unneeded and f.found == "missing")
    ]  # fmt: skip
    if errors:
        f, more = errors[0], f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        raise ConfigError(
            f"{directory}: {f.where}: {f.found}; {f.wanted} wanted{more}: bridge check {directory} --target {target}"
        )
    return shape
