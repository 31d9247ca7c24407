"""Hugging Face safetensors straight into sharded arrays: each device reads its part, nothing is held twice."""

import hashlib
from pathlib import Path

import einops
import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes, tensors
from eagle3_jax.errors import WeightError
from eagle3_jax.target.model import Target

# Ours -> Hugging Face's name and its layout. `{}` is the layer.
# fmt: off
ROWS = {
    "embed/embedding":                       ("model.embed_tokens.weight", "v d -> v d"),
    "layers/input_layernorm/scale":          ("model.layers.{}.input_layernorm.weight", "d -> d"),
    "layers/q/kernel":                       ("model.layers.{}.self_attn.q_proj.weight", "(n h) d -> d n h"),
    "layers/q/bias":                         ("model.layers.{}.self_attn.q_proj.bias", "(n h) -> n h"),
    "layers/k/kernel":                       ("model.layers.{}.self_attn.k_proj.weight", "(g h) d -> d g h"),
    "layers/k/bias":                         ("model.layers.{}.self_attn.k_proj.bias", "(g h) -> g h"),
    "layers/v/kernel":                       ("model.layers.{}.self_attn.v_proj.weight", "(g h) d -> d g h"),
    "layers/v/bias":                         ("model.layers.{}.self_attn.v_proj.bias", "(g h) -> g h"),
    "layers/o/kernel":                       ("model.layers.{}.self_attn.o_proj.weight", "d (n h) -> n h d"),
    "layers/q_norm/scale":                   ("model.layers.{}.self_attn.q_norm.weight", "h -> h"),
    "layers/k_norm/scale":                   ("model.layers.{}.self_attn.k_norm.weight", "h -> h"),
    "layers/post_attention_layernorm/scale": ("model.layers.{}.post_attention_layernorm.weight", "d -> d"),
    "layers/gate/kernel":                    ("model.layers.{}.mlp.gate_proj.weight", "f d -> d f"),
    "layers/up/kernel":                      ("model.layers.{}.mlp.up_proj.weight", "f d -> d f"),
    "layers/down/kernel":                    ("model.layers.{}.mlp.down_proj.weight", "d f -> f d"),
    "norm/scale":                            ("model.norm.weight", "d -> d"),
    "lm_head/kernel":                        ("lm_head.weight", "v d -> v d"),
}
# fmt: on
DROPPED = (".rotary_emb.inv_freq",)  # computed from the config


def load(directory: str | Path, target: Target, mesh: Mesh) -> dict:
    """The target's parameters from a model directory, in `target.dtype`, sharded by axes.RULES.

    Every tensor of the file has a row or a reason in DROPPED and every parameter a tensor; all that does not
    fit is named in one WeightError.
    """
    files = tensors.open_tensors(directory)
    letters = _sizes(target)
    problems, used = [], set()
    for path, _ in jax.tree.leaves_with_path(target.abstract):
        row = ROWS[jax.tree_util.keystr(path, simple=True, separator="/")]
        for name in _names(row, target.shape.num_hidden_layers):
            used.add(name)
            want = _file_shape(row[1], letters)
            if name not in files:
                problems.append(f"{name}: missing, wanted {want}")
            elif tuple(files[name].shape) != want:
                problems.append(f"{name}: shape {tuple(files[name].shape)}, wanted {want}")
    tied = {"lm_head.weight"} if target.shape.tie_word_embeddings else set()
    for name in set(files) - used - tied:
        if not name.endswith(DROPPED):
            problems.append(f"{name}: not a tensor of a {target.shape.model_type} target")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise WeightError(f"{directory}: {'; '.join(sorted(problems)[:3])}{more}")

    def read(path, leaf, letters_of_leaf):
        row = ROWS[jax.tree_util.keystr(path, simple=True, separator="/")]
        sharding = axes.named(mesh, letters_of_leaf, leaf.shape)
        return jax.make_array_from_callback(
            leaf.shape, sharding, lambda i: _part(files, row, letters, leaf, i)
        )

    return jax.tree.map_with_path(read, target.abstract, target.axes)


def _part(files, row, letters, leaf, index) -> np.ndarray:
    name, layout = row
    sizes = {a: n for a, n in letters.items() if a in layout}

    def one(name, index):
        return einops.rearrange(files[name][...], layout, **sizes)[index].astype(leaf.dtype)

    if "{}" not in name:
        return np.ascontiguousarray(one(name, index))
    layers = range(leaf.shape[0])[index[0]]
    out = None
    for slot, i in enumerate(layers):
        x = one(name.format(i), index[1:])
        out = np.empty((len(layers), *x.shape), leaf.dtype) if out is None else out
        out[slot] = x
    return out


def _names(row, layers: int) -> list[str]:
    return [row[0].format(i) for i in range(layers)] if "{}" in row[0] else [row[0]]


def _sizes(target: Target) -> dict[str, int]:
    s = target.shape
    return dict(
        d=s.hidden_size, n=s.num_attention_heads, g=s.num_key_value_heads, h=s.head_dim,
        f=s.intermediate_size, v=s.vocab_size,
    )  # fmt: skip


def _file_shape(layout: str, letters: dict[str, int]) -> tuple[int, ...]:
    side = layout.split(" -> ")[0].replace("(n h)", "N").replace("(g h)", "G")
    merged = letters | {"N": letters["n"] * letters["h"], "G": letters["g"] * letters["h"]}
    return tuple(merged[a] for a in side.split())


def digest(directory: str | Path) -> str:
    """sha256 over the bytes of the directory's weight files, in name order."""
    total = hashlib.sha256()
    for path in sorted(Path(directory).glob("*.safetensors")):
        with open(path, "rb") as file:
            total.update(path.name.encode())
            while block := file.read(1 << 24):
                total.update(block)
    return total.hexdigest()
