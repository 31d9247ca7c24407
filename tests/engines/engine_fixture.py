"""Tiny targets and drafts as directories that an engine can serve, and the prompts that they are served.

The blind drafts know the text through the aux states alone, so that a wrong aux layer or order cannot hide behind
what the embeddings tell.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import decode_fixture as tiny
import einops
import jax
import numpy as np

from bridge import convert
from eagle3_jax import tensors
from eagle3_jax.decode import speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.speculate import DraftWeights
from eagle3_jax.draft import model
from eagle3_jax.target.model import Target
from eagle3_jax.target.weights import ROWS, digest

DRAFTS = {  # blind?, target and aux layers
    "seeing": (False, tiny.SERVED),
    "blind": (True, tiny.SERVED),
    "blind-other-layers": (True, tiny.SERVED_OTHER),
}
# Token ids below tiny.V. The first four are among those whose answers the drafts were trained on.
PROMPTS = [
    *tiny.prompts(4, 1),
    [5],
    [63, 0, 17],
    [8, 8, 8, 8, 8, 8],
    [41, 12, 33, 2, 60, 19, 7],
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17],
    [50, 40, 30, 20, 10],
]
LIMIT = 40  # new tokens
CLASSES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def save_all(root: Path) -> tuple[Path, dict[str, Path]]:
    """(the target's directory, each draft's)."""
    target = save_target(root / "target", tiny.tiny(tiny.SERVED).target, tiny.tiny(tiny.SERVED).params)
    return target, {
        name: save_draft(root / name, target, build.aux, tiny.trained(blind, build))
        for name, (blind, build) in DRAFTS.items()
    }


def decode(name: str, plan: Drafting) -> list[speculate.Answer]:
    """What our decoder makes of PROMPTS with one of DRAFTS."""
    blind, build = DRAFTS[name]
    return speculate.decode(
        tiny.speculator(plan, build), tiny.tiny(build).params, tiny.trained(blind, build), PROMPTS,
        max_new_tokens=LIMIT, end_tokens=(), batch=5,
    )  # fmt: skip


def save_target(path: Path, target: Target, params: dict) -> Path:
    """A target in Hugging Face's layout: the reverse of target.weights.load."""
    shape, found = target.shape, {}
    sizes = dict(n=shape.num_attention_heads, g=shape.num_key_value_heads, h=shape.head_dim)
    for where, leaf in jax.tree.leaves_with_path(params):
        name, layout = ROWS[jax.tree_util.keystr(where, simple=True, separator="/")]
        layout = " -> ".join(reversed(layout.split(" -> ")))
        known = {letter: n for letter, n in sizes.items() if letter in layout}
        layers = leaf if "{}" in name else [leaf]
        for i, x in enumerate(layers):
            found[name.format(i)] = einops.rearrange(np.asarray(x), layout, **known)
    path.mkdir(parents=True)
    tensors.save(path / tensors.FILE, found)
    config = shape.model_dump() | {"architectures": [CLASSES[shape.model_type]], "torch_dtype": "float32"}
    config |= {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def save_draft(path: Path, target: Path, aux_layers: tuple[int, ...], weights: DraftWeights) -> Path:
    """A draft as `bridge convert` writes it."""
    shape = model.bind(weights.graph, weights.params).shape
    draft = SimpleNamespace(
        shape=shape,
        params=jax.tree.map(np.asarray, weights.params),
        embedding=np.asarray(weights.embedding),
        d2t=np.asarray(weights.d2t, np.int64),
        step=1,
        meta={
            "config": {"target": {"path": str(target), "dtype": "float32"}},
            "target": {"path": str(target), "shape": {}, "weights_digest": digest(target)},
            "aux_layers": list(aux_layers),
            "manifest": {"leaves": {"embedding/embedding": {"label": "frozen"}}, "facts": {}},
        },
    )
    convert.write(draft, path.parent / "run", path)
    return path
