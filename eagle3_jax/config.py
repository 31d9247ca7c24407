"""The run configuration: strict, frozen, one YAML file plus `section.key=value` overrides."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import pydantic
import yaml

from eagle3_jax.decode.drafting import Drafting, drafting
from eagle3_jax.errors import ConfigError
from eagle3_jax.target.shape import TargetShape, check_aux_layers

FREEZE = ("embedding/.*", "target/.*")


class Section(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Target(Section):
    path: str  # Hugging Face directory, .gguf file, hub id, or the name of a built-in target
    shape: TargetShape | None = None  # only needed where `path` cannot be read
    aux_layers: tuple[int, ...] | None = None  # layer outputs; None: [1, L//2-1, L-4]
    dtype: Literal["float32", "bfloat16"] = "float32"


class Data(Section):
    path: str  # JSON or JSONL of conversations, or the name of a built-in data set
    prepared: str  # directory that `eagle3 prepare` writes
    strict: bool = False  # refuse a damaged file instead of keeping its complete conversations
    max_length: pydantic.PositiveInt
    max_conversations: pydantic.PositiveInt | None = None
    max_tokens: pydantic.PositiveInt | None = None  # stop preparing after this many tokens
    held_out: float = pydantic.Field(default=0.02, ge=0, lt=1)
    answers: Literal["data", "target"] = "data"  # "target": its own greedy answers to the first user turns
    max_new_tokens: pydantic.PositiveInt = 128  # length of those answers
    answer_batch: pydantic.PositiveInt = 64  # prompts that are answered together


class Draft(Section):
    vocab_size: pydantic.PositiveInt
    intermediate_size: pydantic.PositiveInt | None = None  # None: as the target, here and below
    num_attention_heads: pydantic.PositiveInt | None = None
    num_key_value_heads: pydantic.PositiveInt | None = None
    head_dim: pydantic.PositiveInt | None = None
    head_init: Literal["random", "target"] = "random"
    fc_norm: bool = False
    norm_output: bool = False


class Regenerate(Section):
    path: str  # JSONL that `eagle3 regenerate` writes; to train on it, give it as data.path
    turns: Literal["all", "first"] = "all"  # which questions of a conversation are answered
    max_new_tokens: pydantic.PositiveInt = 512  # of one answer
    temperature: float = pydantic.Field(default=0.0, ge=0)  # 0: greedy
    top_p: float = pydantic.Field(default=1.0, gt=0, le=1)
    seed: int = pydantic.Field(default=0, ge=0, lt=2**31)
    batch: pydantic.PositiveInt = 64  # conversations that are answered together
    max_conversations: pydantic.PositiveInt | None = None  # None: data.max_conversations


class Store(Section):
    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"


class Train(Section):
    run: str  # directory of checkpoints, manifest and logs
    mode: Literal["online", "offline"] = "offline"
    init: str = "scratch"  # or a run directory to start the draft from
    seed: int = 0
    steps: pydantic.PositiveInt
    batch: pydantic.PositiveInt  # packed rows a step
    micro_batches: pydantic.PositiveInt = 1
    row_length: pydantic.PositiveInt
    unroll: pydantic.PositiveInt = 7
    decay: float = pydantic.Field(default=0.8, gt=0, le=1)
    mask: Literal["serve", "eagle"] = "serve"
    rows: Literal["supervised", "all"] = "supervised"  # which to compute: the same loss and gradients
    normalise: Literal["rows", "tokens"] = "rows"
    oov_rows: Literal["drop", "keep"] = "drop"
    loss: Literal["ce", "lk_alpha", "lk_lambda"] = "ce"
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute; masters are float32
    learning_rate: float = pydantic.Field(gt=0)
    warmup: pydantic.NonNegativeInt = 0
    final_learning_rate: float = pydantic.Field(default=0.0, ge=0)
    weight_decay: float = pydantic.Field(default=0.0, ge=0)
    clip: float = pydantic.Field(default=0.5, gt=0)
    beta2: float = pydantic.Field(default=0.95, gt=0, lt=1)  # AdamW's; beta1 is 0.9
    freeze: tuple[str, ...] = FREEZE
    save_every: pydantic.PositiveInt
    keep: pydantic.PositiveInt = 3  # newest checkpoints; the best one is kept beside them
    evaluate_every: pydantic.PositiveInt | None = None  # steps; on held-out conversations, see `evaluate`
    patience: pydantic.PositiveInt | None = (
        None  # stop after so many evaluations in a row without a clear gain
    )
    log_every: pydantic.PositiveInt = 10
    prefetch: pydantic.NonNegativeInt = 2


class MeshSize(Section):
    data: pydantic.PositiveInt = 1
    model: pydantic.PositiveInt = 1


class Evaluate(Section):
    prompts: str | None = None  # JSONL; None: MT-bench's first turns. Training data that hold one are refused
    max_prompts: pydantic.PositiveInt | None = None
    max_new_tokens: pydantic.PositiveInt = 96
    steps: pydantic.PositiveInt = 3  # this and the next two are SGLang's flags
    topk: pydantic.PositiveInt = 1  # 1: a chain
    tokens: pydantic.PositiveInt | None = (
        None  # verified together, the bonus among them; None: a chain's steps+1
    )
    temperature: float = pydantic.Field(default=0.0, ge=0)  # 0: greedy
    seed: int = pydantic.Field(default=0, ge=0, lt=2**31)  # of a temperature's draws
    batch: pydantic.PositiveInt = 16
    held_out_prompts: pydantic.PositiveInt = 32  # for the accept length during training
    held_out_rows: pydantic.PositiveInt = 64  # packed rows, for the loss and accuracy during training

    @pydantic.model_validator(mode="after")
    def _drafting(self):
        self.drafting()
        return self

    def drafting(self) -> Drafting:
        return drafting(self.steps, self.topk, self.tokens, "evaluate.")


class ServeConfig(Section):
    """What decoding with a draft takes; all that an imported run knows."""

    target: Target
    mesh: MeshSize = MeshSize()
    evaluate: Evaluate = Evaluate()


class RunConfig(ServeConfig):
    data: Data
    regenerate: Regenerate | None = None
    draft: Draft
    store: Store | None = None
    train: Train

    @pydantic.model_validator(mode="after")
    def _pairs(self):
        if self.train.mode == "offline" and self.store is None:
            raise ConfigError("train.mode=offline needs store.path: where the captured features are")
        if self.train.batch % self.train.micro_batches:
            raise ConfigError(
                f"train.batch={self.train.batch} does not divide into train.micro_batches={self.train.micro_batches}"
            )
        for key, path in (
            ("data.prepared", self.data.prepared),
            ("store.path", self.store and self.store.path),
            ("regenerate.path", self.regenerate and self.regenerate.path),
        ):
            if path and Path(self.train.run).resolve() in (
                Path(path).resolve(),
                *Path(path).resolve().parents,
            ):
                raise ConfigError(
                    f"{key}={path} lies in train.run={self.train.run}; put it beside that directory"
                )
        if self.train.warmup >= self.train.steps:
            raise ConfigError(
                f"train.warmup={self.train.warmup} must be less than train.steps={self.train.steps}"
            )
        if self.data.max_length > self.train.row_length:
            raise ConfigError(
                f"data.max_length={self.data.max_length} exceeds train.row_length={self.train.row_length}"
            )
        if self.train.evaluate_every and not self.data.held_out:
            raise ConfigError(
                f"train.evaluate_every={self.train.evaluate_every} needs conversations that are not trained on: "
                "set data.held_out above 0"
            )
        if self.train.patience and not self.train.evaluate_every:
            raise ConfigError(f"train.patience={self.train.patience} needs train.evaluate_every")
        if self.evaluate.topk > self.draft.vocab_size:
            raise ConfigError(
                f"evaluate.topk={self.evaluate.topk} exceeds draft.vocab_size={self.draft.vocab_size}"
            )
        if self.target.shape is not None:
            check(self, self.target.shape)
        return self


Kind = TypeVar("Kind", bound=ServeConfig)


def check(config: RunConfig, shape: TargetShape) -> None:
    """What can only be judged with the target's sizes at hand. Raises ConfigError."""
    ids = config.target.aux_layers
    check_aux_layers(shape.default_aux_layers if ids is None else ids, shape.num_hidden_layers)
    if not 1 <= config.draft.vocab_size <= shape.vocab_size:
        raise ConfigError(
            f"draft.vocab_size={config.draft.vocab_size} must be within 1 .. {shape.vocab_size} "
            "(the target's vocabulary)"
        )
    heads = config.draft.num_attention_heads or shape.num_attention_heads
    kv_heads = config.draft.num_key_value_heads or shape.num_key_value_heads
    if heads % kv_heads:
        raise ConfigError(
            f"draft.num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}"
        )
    longest, kind = shape.longest
    if config.data.max_length > longest:
        raise ConfigError(f"data.max_length={config.data.max_length} exceeds the target's {longest} {kind}")


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `section.key=value` overrides, return a checked RunConfig.

    Raises ConfigError with the key, what was found and the nearest known key.
    """
    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"{path}: no such configuration file")
    try:
        tree = yaml.safe_load(path.read_text()) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: sections were wanted, found {type(tree).__name__}")
    for item in overrides:
        _override(tree, item)
    return from_dict(tree, where=str(path))


def from_dict(tree: dict, where: str = "config", kind: type[Kind] = RunConfig) -> Kind:
    """RunConfig of a nested dict, as stored in a checkpoint's meta. Raises ConfigError."""
    try:
        return kind.model_validate(_tuples(tree))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except pydantic.ValidationError as error:
        raise ConfigError(f"{where}: {_first(error, kind)}") from None


def to_serve(tree: dict, where: str) -> ServeConfig:
    """ServeConfig of a checkpoint's configuration. Raises ConfigError."""
    return from_dict({k: tree[k] for k in ServeConfig.model_fields if k in tree}, where, ServeConfig)


def override(config: Kind, items: Sequence[str]) -> Kind:
    """The configuration with `section.key=value` overrides applied. Raises ConfigError."""
    tree = to_dict(config)
    for item in items:
        _override(tree, item)
    return from_dict(tree, "override", type(config))


def to_dict(config: ServeConfig) -> dict:
    """Plain JSON values; `from_dict` reads them back."""
    return config.model_dump(mode="json")


def _override(tree: dict, item: str) -> None:
    dotted, eq, value = item.partition("=")
    if not eq or not dotted:
        raise ConfigError(f"override {item!r} is not of the form section.key=value")
    *parents, leaf = dotted.split(".")
    node = tree
    for name in parents:
        if node.get(name) is None:  # not there, or `store: null`
            node[name] = {}
        node = node[name]
        if not isinstance(node, dict):
            raise ConfigError(f"override {item!r}: {name} is a value, not a section")
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {item!r}: not YAML: {' '.join(str(error).split())}") from None


def _tuples(node):
    """Lists become tuples and `1e-4`, which YAML 1.1 reads as text, a number: strict mode takes no other."""
    if isinstance(node, dict):
        return {k: _tuples(v) for k, v in node.items()}
    if isinstance(node, list):
        return tuple(_tuples(v) for v in node)
    if isinstance(node, str) and node[:1].isdigit() and "e" in node:
        try:
            return float(node)
        except ValueError:
            return node
    return node


def _first(error: pydantic.ValidationError, kind: type[ServeConfig]) -> str:
    details = error.errors()[0]
    where = [str(part) for part in details["loc"]]
    key = ".".join(where)
    if details["type"] == "extra_forbidden":
        known = _known(where[:-1], kind)
        near = difflib.get_close_matches(where[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
        return f"unknown key {key!r}; {hint}"
    if details["type"] == "missing":
        return f"{key} is missing"
    if isinstance(cause := details.get("ctx", {}).get("error"), ConfigError):
        return str(cause)
    return f"{key}={details['input']!r}: {details['msg'][0].lower()}{details['msg'][1:]}"


def _known(section: list[str], model: type[Section]) -> list[str]:
    for name in section:
        kinds = [
            model.model_fields[name].annotation,
            *getattr(model.model_fields[name].annotation, "__args__", ()),
        ]
        model = next(k for k in kinds if isinstance(k, type) and issubclass(k, pydantic.BaseModel))
    return list(model.model_fields)
