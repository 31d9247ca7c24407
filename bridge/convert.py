"""A run's checkpoint -> a draft directory: config.json and model.safetensors, complete and self-describing."""

import json
import os
import shlex
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np

import eagle3_jax
from bridge import engines, fields, sglang, weight_map
from eagle3_jax import tensors
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import CheckpointError, ConfigError, WeightError

CONFIG = "config.json"
CHAIN = Drafting(steps=3, topk=1, tokens=4)  # what a launch line asks for where nothing was evaluated
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def convert(run: str | Path, out: str | Path, step: int | str | None = None, force: bool = False) -> dict:
    """Write the draft of a run (its newest checkpoint, or that of `step`) to the directory `out`.

    Returns what was written: directory, step, dtype, tensors, bytes, accept_length, launch. Raises
    CheckpointError for a run that cannot be read, ConfigError where `out` is something else than an earlier
    export.
    """
    from eagle3_jax.train import checkpoint  # Orbax is slow to import and only needed here

    out = Path(out)
    _refuse(out, Path(run), force)
    return write(checkpoint.load_draft(run, step), run, out, force)


def write(draft, run: str | Path, out: str | Path, force: bool = False) -> dict:
    """`convert` for a draft that is already loaded (train.checkpoint.LoadedDraft)."""
    run, out = Path(run), Path(out)
    _refuse(out, run, force)
    predicted = _predicted(run, draft.step)
    config, weights = config_of(draft, run, predicted), weights_of(draft)
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh, old = (out.with_name(f".{out.name}.{os.getpid()}.{kind}") for kind in ("part", "old"))
    fresh.mkdir()
    try:
        tensors.save(fresh / tensors.FILE, weights)
        (fresh / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        size = (fresh / tensors.FILE).stat().st_size
        if out.exists():
            os.rename(out, old)
        os.rename(fresh, out)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return {
        "directory": str(out),
        "run": str(run),
        "step": draft.step,
        "dtype": config["torch_dtype"],
        "tensors": len(weights),
        "bytes": size,
        "accept_length": predicted and predicted["accept_length"],
        "launch": launch_line(out, draft.meta["target"]["path"], _drafting(predicted)),
    }


def weights_of(draft) -> dict[str, np.ndarray]:
    """Every tensor of the directory. Raises WeightError."""
    shape, dtype = draft.shape, DTYPES[draft.meta["config"]["target"]["dtype"]]
    for path, leaf in draft.meta["manifest"]["leaves"].items():
        if path.startswith("embedding/") and leaf["label"] != "frozen":
            raise WeightError(
                f"{path} was trained, but {engines.find().title} serves a draft with the target's own embedding: "
                "the draft would compute something else; freeze it (train.freeze)"
            )
    if shape.norm_before_residual:
        raise WeightError(
            f"the draft's residual is the normed state (norm_before_residual), {engines.find().title} adds the "
            "un-normed one whatever the config says: it would compute something else"
        )
    if draft.embedding.shape != (wanted := (shape.vocab_size, shape.hidden_size)):
        raise WeightError(
            f"the draft's embedding is {list(draft.embedding.shape)}, the target's {list(wanted)} wanted: "
            "a draft of another width cannot be exported"
        )
    out = {name: x.astype(dtype) for name, x in weight_map.export(draft.params, shape).items()}
    ids = token_ids(draft.d2t, shape)
    t2d = np.zeros(shape.vocab_size, np.bool_)
    t2d[ids] = True
    return out | {weight_map.EMBEDDING: draft.embedding, weight_map.D2T: draft.d2t, weight_map.T2D: t2d}


def token_ids(d2t: np.ndarray, shape: DraftShape) -> np.ndarray:
    """Target ids [U] of a draft vocabulary given as offsets. Raises WeightError for an impossible one."""
    if d2t.dtype != np.int64 or d2t.shape != (shape.draft_vocab_size,):
        raise WeightError(f"d2t is {d2t.dtype} {list(d2t.shape)}; int64 [{shape.draft_vocab_size}] wanted")
    ids = np.arange(len(d2t)) + d2t
    if ids.min() < 0 or ids.max() >= shape.vocab_size or len(np.unique(ids)) != len(ids):
        raise WeightError(f"d2t does not give distinct ids within 0 .. {shape.vocab_size - 1}")
    return ids


def config_of(draft, run: Path, predicted: dict | None) -> dict:
    """config.json of the directory."""
    shape, meta = draft.shape, draft.meta
    dtype = meta["config"]["target"]["dtype"]
    facts = meta["manifest"]["facts"]
    return {
        "architectures": [fields.ARCHITECTURE],
        "model_type": fields.MODEL_TYPE,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": shape.rms_norm_eps,
        "vocab_size": shape.vocab_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.max_position_embeddings,
        **fields.rope_fields(shape.rope_theta, dict(shape.rope_scaling) if shape.rope_scaling else None),
        **fields.aux_fields(tuple(meta["aux_layers"])),
        # Only where true: a `norm_output` of false means to SpecForge that no norm stands before the head.
        **{name: True for name in engines.OPTIONS if getattr(shape, name)},
        **_special_tokens(meta["target"]["path"]),
        "torch_dtype": dtype,
        "dtype": dtype,
        "provenance": {
            "exporter": f"eagle3-jax {eagle3_jax.__version__}",
            "target": meta["target"]["path"],
            "target_weights_digest": meta["target"]["weights_digest"],
            "tokenizer_hash": facts.get("tokenizer_hash"),
            "data_fingerprint": facts.get("data", {}).get("fingerprint"),
            "run": str(run),
            "step": draft.step,
            "predicted_accept_length": predicted and predicted["accept_length"],
            "predicted": predicted,
        },
    }


def launch_line(directory: str | Path, target: str, drafting: Drafting = CHAIN) -> str:
    """The command that serves `target` with this draft."""
    dtype = read_config(directory).get("torch_dtype", "auto")
    options = sglang.launch_options(target, directory, dtype, drafting)
    return shlex.join(["python", "-m", "sglang.launch_server", *sglang.flags(options)])


def read_config(directory: str | Path) -> dict:
    """config.json of a draft directory. Raises ConfigError."""
    path = Path(directory) / CONFIG
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a draft directory is wanted")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: an object was wanted, found {type(config).__name__}")
    return config


def _refuse(out: Path, run: Path, force: bool) -> None:
    if run.resolve().is_relative_to(out.resolve()):
        raise ConfigError(f"{out}: holds the run {run}; choose another directory")
    if not out.exists() or (force and out.is_dir()):
        return
    if not out.is_dir():
        raise ConfigError(f"{out}: a file is in the way; choose another directory")
    found = {p.name for p in out.iterdir()}
    if strange := sorted(found - {CONFIG, tensors.FILE}):
        raise ConfigError(f"{out}: not an earlier export (it holds {strange[0]!r}); --force replaces it")
    if found and not (CONFIG in found and "exporter" in (read_config(out).get("provenance") or {})):
        raise ConfigError(f"{out}: not an earlier export of ours; --force replaces it")


def _predicted(run: Path, step: int) -> dict | None:
    """What `eagle3 evaluate` found for this checkpoint, with its settings."""
    root = run.parent.parent if run.parent.name == "steps" else run  # RUN/steps/N is a checkpoint's own path
    path = root / "evaluate.json"
    if not path.is_file():
        return None
    try:
        result = json.loads(path.read_text())
        if result["step"] != step:
            return None
        settings = ("steps", "topk", "tokens", "prompts", "max_new_tokens", "dtype")
        found = {k: result["settings"][k] for k in settings}
        return {k: result[k] for k in ("accept_length", "interval", "sglang_request")} | found
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: not a result of `eagle3 evaluate` ({error!r}); delete it") from None


def _drafting(predicted: dict | None) -> Drafting:
    """What was evaluated; else a chain."""
    return Drafting(*(predicted[k] for k in Drafting._fields)) if predicted else CHAIN


def _special_tokens(target: str) -> dict:
    path = Path(target) / CONFIG
    if not path.is_file():
        return {}
    config = json.loads(path.read_text())
    return {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
