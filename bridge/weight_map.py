"""One row ties a draft parameter to the engines' tensor; export, import and check all read the table."""

import dataclasses
import math
from collections.abc import Mapping

import einops
import numpy as np

from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import WeightError


@dataclasses.dataclass(frozen=True)
class Row:
    """One tensor under its two names.

    `layout` leads from our axes to theirs in the letters of eagle3_jax/axes.py: "c n h -> (n h) c" merges the
    heads and transposes. Read from right to left it imports.
    """

    ours: str
    theirs: str
    layout: str

    @property
    def sides(self) -> tuple[str, str]:
        left, right = self.layout.split(" -> ")
        return left, right

    def export(self, x: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        return _move(x, sizes, *self.sides)

    def load(self, x: np.ndarray, sizes: dict[str, int]) -> np.ndarray:
        return _move(x, sizes, *reversed(self.sides))

    def our_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return shape_of(self.sides[0], sizes)

    def their_shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
        return shape_of(self.sides[1], sizes)


# fmt: off
ROWS = (
    Row("fc/kernel",                               "fc.weight",                                "m d -> d m"),
    Row("midlayer/input_layernorm/scale",          "midlayer.input_layernorm.weight",          "d -> d"),
    Row("midlayer/hidden_norm/scale",              "midlayer.hidden_norm.weight",              "d -> d"),
    Row("midlayer/q/kernel",                       "midlayer.self_attn.q_proj.weight",         "c n h -> (n h) c"),
    Row("midlayer/k/kernel",                       "midlayer.self_attn.k_proj.weight",         "c g h -> (g h) c"),
    Row("midlayer/v/kernel",                       "midlayer.self_attn.v_proj.weight",         "c g h -> (g h) c"),
    Row("midlayer/o/kernel",                       "midlayer.self_attn.o_proj.weight",         "n h d -> d (n h)"),
    Row("midlayer/post_attention_layernorm/scale", "midlayer.post_attention_layernorm.weight", "d -> d"),
    Row("midlayer/gate/kernel",                    "midlayer.mlp.gate_proj.weight",            "d f -> f d"),
    Row("midlayer/up/kernel",                      "midlayer.mlp.up_proj.weight",              "d f -> f d"),
    Row("midlayer/down/kernel",                    "midlayer.mlp.down_proj.weight",            "f d -> d f"),
    Row("norm/scale",                              "norm.weight",                              "d -> d"),
    Row("lm_head/kernel",                          "lm_head.weight",                           "d u -> u d"),
)
# fmt: on

INPUT_NORM = Row("input_norm/scale", "input_norm.weight", "m -> m")

# Tensors of a draft directory that are not parameters, by their axes.
EMBEDDING, D2T, T2D = "embed_tokens.weight", "d2t", "t2d"
BESIDE = {EMBEDDING: "v d", D2T: "u", T2D: "v"}


def rows(shape: DraftShape) -> tuple[Row, ...]:
    """The rows that a draft of this shape has."""
    count = shape.num_aux_hidden_states if shape.fc_norm else 0
    before = (INPUT_NORM,) if shape.norm_before_fc else ()
    norms = tuple(Row(f"fc_norm_{i}/scale", f"fc_norm.{i}.weight", "d -> d") for i in range(count))
    return ROWS + before + norms


def their_shapes(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a draft directory and its shape."""
    beside = {name: shape_of(axes, shape.sizes) for name, axes in BESIDE.items()}
    return {row.theirs: row.their_shape(shape.sizes) for row in rows(shape)} | beside


def export(params: dict, shape: DraftShape) -> dict[str, np.ndarray]:
    """Our nested tree -> the engines' tensors, same dtype, contiguous.

    Raises WeightError that lists every parameter without a row, row without a parameter and wrong shape.
    """
    flat, table = flatten(params), {row.ours: row for row in rows(shape)}
    _cover(flat, {name: row.our_shape(shape.sizes) for name, row in table.items()}, "parameter")
    return {row.theirs: row.export(flat[row.ours], shape.sizes) for row in table.values()}


def load(tensors: Mapping[str, np.ndarray], shape: DraftShape) -> dict:
    """The engines' tensors, those of BESIDE left out -> our nested tree. Raises WeightError as `export`."""
    table = {row.theirs: row for row in rows(shape)}
    _cover(tensors, {name: row.their_shape(shape.sizes) for name, row in table.items()}, "tensor")
    tree: dict = {}
    for name, row in table.items():
        *parents, leaf = row.ours.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = row.load(tensors[name], shape.sizes)
    return tree


def flatten(tree: dict, prefix: str = "") -> dict[str, np.ndarray]:
    """{"midlayer": {"q": {"kernel": x}}} -> {"midlayer/q/kernel": x}."""
    out = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}/") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


def shape_of(side: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """shape_of("(n h) c", sizes): letters in brackets share an axis."""
    groups: list[list[str]] = []
    inside = False
    for token in side.replace("(", " ( ").replace(")", " ) ").split():
        if token in "()":
            inside = token == "("
            groups += [[]] if inside else []
        elif inside:
            groups[-1].append(token)
        else:
            groups.append([token])
    return tuple(math.prod(sizes[a] for a in group) for group in groups)


def _move(x: np.ndarray, sizes: dict[str, int], source: str, goal: str) -> np.ndarray:
    letters = {a: sizes[a] for a in source if a.isalpha()}
    return np.ascontiguousarray(einops.rearrange(x, f"{source} -> {goal}", **letters))


def _cover(found: Mapping[str, np.ndarray], wanted: dict[str, tuple[int, ...]], noun: str) -> None:
    problems = [f"unknown {noun} {name!r}" for name in sorted(set(found) - set(wanted))]
    problems += [f"no {noun} {name!r}" for name in wanted if name not in found]
    problems += [
        f"{noun} {name!r} is {list(found[name].shape)}, {list(goal)} wanted"
        for name, goal in wanted.items()
        if name in found and tuple(found[name].shape) != goal
    ]
    if problems:
        raise WeightError("weights do not fit the draft: " + "; ".join(problems))
