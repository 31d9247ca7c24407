"""Everything that a run needs before its first step, gathered in one place and checked."""

import dataclasses
import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from rich.console import Console
from rich.table import Table

from eagle3_jax import axes, defaults, tensors
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig, ServeConfig
from eagle3_jax.data import features, prepare, split, vocab
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape, aux_layers, resolve
from eagle3_jax.draft.unroll import Vocabulary
from eagle3_jax.errors import ConfigError, DataError, WeightError
from eagle3_jax.target import shape as target_shape
from eagle3_jax.target import weights
from eagle3_jax.target.model import Target
from eagle3_jax.target.shape import TargetShape
from eagle3_jax.train import checkpoint, manifest, optim

EMBEDDING = "model.embed_tokens.weight"


@dataclasses.dataclass(frozen=True, eq=False)
class TargetFiles:
    """A target on disk."""

    directory: Path
    shape: TargetShape

    @property
    def head_tensor(self) -> str:
        return EMBEDDING if self.shape.tie_word_embeddings else "lm_head.weight"

    def rows(self, name: str, ids: np.ndarray | None = None) -> np.ndarray:
        """A tensor, or its rows `ids`, in the file's dtype. Raises WeightError."""
        files = tensors.open_tensors(self.directory)
        if name not in files:
            raise WeightError(f"{self.directory}: no tensor {name!r}; the target needs it")
        return files[name][...] if ids is None else files[name][...][ids]


def find_target(config: ServeConfig) -> TargetFiles:
    """The target's directory and sizes. Raises ConfigError where they are not those of `target.shape`."""
    directory = defaults.resolve_target(config.target.path)
    shape = target_shape.read(directory)
    if config.target.shape not in (None, shape):
        there, wanted = shape.model_dump(), config.target.shape.model_dump()
        key = next(k for k in there if there[k] != wanted[k])
        raise ConfigError(f"target.shape.{key}={wanted[key]!r}, but {directory} has {there[key]!r}")
    return TargetFiles(directory, shape)


def checked_target(config: RunConfig) -> TargetFiles:
    """`find_target`, and the rest of the configuration checked against it. Raises ConfigError."""
    files = find_target(config)
    configuration.check(config, files.shape)
    return files


def load_target(config: ServeConfig, files: TargetFiles, mesh: Mesh) -> tuple[Target, dict]:
    target = Target(files.shape, config.target.aux_layers, config.target.dtype)
    return target, weights.load(files.directory, target, mesh)


def tokenizer(files: TargetFiles):
    os.environ.setdefault(
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
    )  # "PyTorch was not found": it is not wanted
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(files.directory)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{files.directory}: no usable tokenizer: {' '.join(str(error).split())}") from None


def source_of(config: RunConfig, digest: str):
    """(token source, prepared card): the feature store when offline, else the prepared directory.

    Raises DataError where the store is of another target, other layers or other data.
    """
    tokens = prepare.load(config.data.prepared)
    if config.train.mode == "online":
        if config.data.answers == "target":
            raise ConfigError(
                "data.answers=target needs train.mode=offline: the answers are in the feature store"
            )
        return tokens, tokens.card
    store = features.open_store(config.store.path)
    for key, wanted in (("target", digest), ("data", tokens.card["fingerprint"])):
        if store.card[key] != wanted:
            raise DataError(
                f"{config.store.path}: captured from another {key} ({store.card[key]!r:.30}, now {wanted!r:.30}); "
                "run `eagle3 capture` with another store.path, or delete this store"
            )
    return store, tokens.card


def warm_start(config: RunConfig, files: TargetFiles) -> checkpoint.LoadedDraft | None:
    """The draft that `train.init` names, None for "scratch". What the configuration leaves open is that draft's own.

    Raises ConfigError where it reads other layers of the target, or this configuration asks for another draft.
    """
    if config.train.init == "scratch":
        return None
    there, wanted = checkpoint.load_draft(config.train.init), resolve(config, files.shape)
    aux = list(aux_layers(config, files.shape))
    if there.meta["aux_layers"] != aux:
        raise ConfigError(
            f"train.init={config.train.init}: its draft reads layers {there.meta['aux_layers']}, this config gives it "
            f"{aux}; set target.aux_layers"
        )
    free = {"rms_norm_eps", "rope_theta", "rope_scaling", "max_position_embeddings"}  # the draft's own
    free |= {"norm_before_fc", "norm_before_residual"}
    free |= {key for key, value in config.draft if value is None}
    for field in dataclasses.fields(wanted):
        found, want = getattr(there.shape, field.name), getattr(wanted, field.name)
        if found != want and field.name not in free:
            raise ConfigError(
                f"train.init={config.train.init}: its draft has {field.name}={found!r}, this config {want!r}"
            )
    shape = dataclasses.replace(there.shape, max_position_embeddings=wanted.max_position_embeddings)
    return dataclasses.replace(there, shape=shape)


def vocabulary_map(
    config: RunConfig, source, ends: tuple[int, ...], vocab_size: int, kept: np.ndarray | None = None
) -> tuple[np.ndarray, dict]:
    """`d2t` by the rule, from the training side's supervised tokens, and facts for the manifest.

    `kept` is the map of the draft that training starts from: its head's rows belong to those tokens.
    """
    train_side = np.repeat(~np.asarray(source.held_out), np.diff(source.offsets))
    ids, span = np.asarray(source.ids), np.asarray(source.span)
    counts = vocab.counts(ids[train_side], span[train_side], vocab_size)
    d2t = vocab.build(counts, config.draft.vocab_size, always=ends).d2t if kept is None else kept
    covered = vocab.coverage(counts, d2t + np.arange(len(d2t)))
    return d2t, {"supervised_tokens": int(counts.sum()), "coverage": covered}


def device_vocabulary(d2t: np.ndarray, vocab_size: int) -> Vocabulary:
    t2d = np.zeros(vocab_size, bool)
    t2d[d2t + np.arange(len(d2t))] = True
    return Vocabulary(jnp.asarray(d2t, jnp.int32), jnp.asarray(t2d))


def initial_draft(
    config: RunConfig, shape: DraftShape, files: TargetFiles, d2t: np.ndarray, warm: checkpoint.LoadedDraft | None
):  # fmt: skip
    """(graph, float32 params on the host, path -> origin) at step 0."""
    if warm is not None:
        origin = f"{manifest.WARM}{config.train.init} step {warm.step}"
        return model.abstract(shape)[0], warm.params, {f"draft/{n}": origin for n in optim.flat(warm.params)}
    seed = config.train.seed
    graph, params = model.init(shape, seed)
    params = jax.device_get(params)
    origins = {f"draft/{name}": f"{manifest.RANDOM}{seed}" for name in optim.flat(params)}
    if config.draft.head_init == "target":
        rows = files.rows(files.head_tensor, d2t + np.arange(len(d2t)))
        params["lm_head"]["kernel"] = np.ascontiguousarray(rows.astype(np.float32).T)
        origins["draft/lm_head/kernel"] = f"{manifest.COPIED}{files.head_tensor}"
    return graph, params, origins


def frozen_target(config: RunConfig, files: TargetFiles, d2t: np.ndarray, mesh: Mesh):
    """(Target or None, its tree, axes of that tree): whole when online, the head's draft rows when offline."""
    if config.train.mode == "online":
        target, params = load_target(config, files, mesh)
        return target, params, target.axes
    rows = files.rows(files.head_tensor, d2t + np.arange(len(d2t))).astype(jnp.dtype(config.target.dtype))
    letters = {"head": {"kernel": "u d"}}
    return None, {"head": {"kernel": jax.device_put(rows, axes.named(mesh, "u d", rows.shape))}}, letters


def target_tensor(name: str, files: TargetFiles) -> str:
    """The file's name of a leaf of the frozen target tree; a stacked one names all layers as {}."""
    return files.head_tensor if name == "head/kernel" else weights.ROWS[name][0]


def print_layout(mesh: Mesh, letters: dict, tree: dict, labels: dict) -> None:
    """The start-up table: where each leaf lies, and which axes are replicated because they do not divide."""
    table = Table(title=f"mesh {' x '.join(f'{name} {n}' for name, n in mesh.shape.items())}", box=None)
    for column in ("leaf", "axes", "shape", "dtype", "label", "sharded", "does not divide"):
        table.add_column(column, no_wrap=True)
    label, axes_of = optim.flat(labels), optim.flat(letters)
    for name, x in optim.flat(tree).items():
        spec = zip(axes_of[name].split(), axes.spec(mesh, axes_of[name], x.shape), strict=True)
        split = ", ".join(f"{a}: {over}" for a, over in spec if over and mesh.shape[over] > 1)
        need = " ".join(axes.replicated_by_need(mesh, axes_of[name], x.shape))
        shape = " x ".join(map(str, x.shape))
        table.add_row(name, axes_of[name], shape, str(x.dtype), label[name], split or "-", need)
    Console(stderr=True, width=max(Console(stderr=True).width, 120)).print(table)


def check_prompts(config: RunConfig, card: dict) -> None:
    """The data was checked against the prompts that this configuration evaluates on. Raises DataError."""
    split.assert_clean(card["contamination"], [p["prompt"] for p in evaluation_prompts(config)])


def evaluation_prompts(config: RunConfig) -> list[dict]:
    return defaults.evaluation_prompts(config.evaluate.prompts)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
