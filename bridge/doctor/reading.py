"""A draft directory as one engine reads it: what it drops, guesses and leaves random, down to weights that run."""

import dataclasses
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bridge import convert, engines, fields, weight_map
from bridge.engines import Engine
from bridge.weight_map import D2T, EMBEDDING
from eagle3_jax import tensors
from eagle3_jax.decode.speculate import DraftWeights
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.target.shape import TargetShape

LEFTOVER = 0.02  # standard deviation that stands for the memory which an uninitialised matrix is left with


@dataclasses.dataclass(frozen=True, eq=False)
class Served:
    """The target beside which a draft is read. `rows(ids)` are rows of its head, of all tokens for None."""

    shape: TargetShape
    embedding: np.ndarray
    rows: Callable[[np.ndarray | None], np.ndarray]


@dataclasses.dataclass(frozen=True, eq=False)
class Reading:
    """Files, engine and requests; a hypothesis is a reading with something in it changed."""

    config: dict
    tensors: dict[str, np.ndarray]  # by the file's names
    engine: Engine
    served: Served | None = None  # None: files alone, to be repaired
    algorithm: str = engines.ALGORITHM
    embedding: str = "engine"  # "target" or "file" overrule what the engine would take
    late: int = 0  # positions that drafted rows sit behind
    rendering: str = "as served"  # of the prompts (probe.py)
    voted: bool = False  # take the vocabulary map that fits the texts best, whatever the file says

    def change(self, config: dict | None = None, tensors: dict | None = None, **changes) -> "Reading":
        """With fields of the config and tensors added or replaced."""
        return dataclasses.replace(
            self, config=self.config | (config or {}), tensors=self.tensors | (tensors or {}), **changes
        )

    def only(self, tensors: dict) -> "Reading":
        """With these tensors in place of its own."""
        return dataclasses.replace(self, tensors=tensors)

    def rules(self, **changes) -> Engine:
        """The engine with other rules."""
        return dataclasses.replace(self.engine, **changes)

    def find(self, name: str) -> str | None:
        """The file's name of one of our tensors, however it is spelled."""
        if name in self.tensors:
            return name
        return next((n for n in self.tensors if engines.spelled(n) == name), None)

    @property
    def nested(self) -> dict:
        """eagle_config."""
        inside = self.config.get("eagle_config")
        return inside if isinstance(inside, dict) else {}

    @property
    def eagle3(self) -> bool:
        return self.algorithm.upper() == engines.ALGORITHM

    @property
    def shape(self) -> DraftShape:
        """Raises ConfigError."""
        return fields.draft_shape(self.config, convert.CONFIG, self.engine)


@dataclasses.dataclass(frozen=True, eq=False)
class Loaded:
    """What runs: weights, and the layers whose outputs the engine feeds it (None: the last state, past fc)."""

    weights: DraftWeights
    layers: tuple[int, ...] | None


def read(
    directory: str | Path, engine: Engine, served: Served | None = None, algorithm: str | None = None
) -> Reading:
    """Raises ConfigError, WeightError."""
    config = fields.flat(convert.read_config(directory))
    return Reading(config, tensors.read(directory), engine, served, algorithm or engines.ALGORITHM)


def load(reading: Reading) -> Loaded:
    """As the engine does. Raises UserError where it would not start."""
    shape, target = reading.shape, reading.served.shape
    if (shape.hidden_size, shape.vocab_size) != (target.hidden_size, target.vocab_size):
        raise ConfigError(
            f"a draft for width {shape.hidden_size} and {shape.vocab_size} tokens, the target has "
            f"{target.hidden_size} and {target.vocab_size}: another target's draft"
        )
    found = _filled(reading, weight_map.their_shapes(shape))
    params = {row.theirs: found[row.theirs] for row in weight_map.rows(shape)}
    d2t = found.get(D2T, np.zeros(shape.draft_vocab_size)).astype(np.int64)
    whose = reading.engine.embedding if reading.embedding == "engine" else reading.embedding
    own = whose == "file" and EMBEDDING in found
    embedding = found[EMBEDDING] if own else reading.served.embedding
    layers = _layers(reading, shape)
    if not reading.eagle3:  # the target's head, without a map
        params["lm_head.weight"], d2t = reading.served.rows(None), np.zeros(shape.vocab_size, np.int64)
        shape = dataclasses.replace(shape, draft_vocab_size=shape.vocab_size)
    if layers is None:  # of a state as wide as the draft the engine skips all that comes before the layer
        shape = dataclasses.replace(shape, num_aux_hidden_states=1, fc_norm=False, norm_before_fc=False)
        params = {row.theirs: params[row.theirs] for row in weight_map.rows(shape)}
        params["fc.weight"] = np.eye(shape.hidden_size, dtype=np.float32)
    tree = weight_map.load({n: x.astype(np.float32) for n, x in params.items()}, shape)
    graph, _, _ = model.abstract(shape)
    tree = jax.tree.map(jnp.asarray, tree)
    weights = DraftWeights(graph, tree, jnp.asarray(embedding, jnp.float32), jnp.asarray(d2t, jnp.int32))
    return Loaded(weights, layers)


def captured(reading: Reading) -> tuple[int, ...]:
    """The layers whose outputs the engine would capture: as told, else its default. Raises UserError."""
    told, served = fields.aux_layers(reading.config, reading.engine), reading.served.shape
    if told is None:
        return served.default_aux_layers
    if not isinstance(told, list) or not all(type(i) is int for i in told):
        raise UserError(f"aux layers {told!r}: a list of layers is wanted; the engine would not start")
    return tuple(sorted({i for i in told if 0 <= i <= served.num_hidden_layers - 2}))


def _filled(reading: Reading, wanted: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """By our names; what nothing fills is random, and of BESIDE left out."""
    engine, found, dropped = reading.engine, {}, []
    for name, x in reading.tensors.items():
        ours = engine.loads(name)
        if ours not in wanted:
            dropped.append(name)
        elif x.shape != wanted[ours]:
            raise UserError(f"{name} is {list(x.shape)}, {list(wanted[ours])} wanted: it would not start")
        else:
            found[ours] = x
    if dropped and engine.extra == "refuses":
        raise UserError(f"{engine.title} refuses the file: it does not know {dropped[0]}")
    unfilled = [n for n in wanted if n not in found and n not in weight_map.BESIDE]
    if unfilled and engine.missing == "refuses":
        raise UserError(f"{engine.title} refuses the file: it has no {unfilled[0]}")
    return found | {n: _leftover(n, wanted[n]) for n in unfilled}


def _layers(reading: Reading, shape: DraftShape) -> tuple[int, ...] | None:
    off = reading.nested.get("use_aux_hidden_state") is False
    if not reading.eagle3 or (off and reading.engine.name == "sglang"):
        return None
    layers = captured(reading)
    if len(layers) == 1:
        return None
    if len(layers) != shape.num_aux_hidden_states:
        raise UserError(
            f"{len(layers)} states are captured ({list(layers)}), fc takes {shape.num_aux_hidden_states}: the engine "
            "would stop in its warm-up"
        )
    return layers


def _leftover(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Norms start at one; a matrix is whatever its memory held."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng(zlib.crc32(name.encode())).normal(0, LEFTOVER, shape).astype(np.float32)
