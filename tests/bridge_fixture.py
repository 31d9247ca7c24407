"""Tiny drafts with random weights, as train.checkpoint.load_draft returns them."""

import functools
import json
from types import SimpleNamespace

import ml_dtypes
import numpy as np

from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

# Two query heads a key head, head_dim != hidden / heads, nothing square.
PLAIN = dict(
    hidden_size=24, num_aux_hidden_states=3, intermediate_size=40, num_attention_heads=4,
    num_key_value_heads=2, head_dim=10, vocab_size=61, draft_vocab_size=17, max_position_embeddings=256,
    rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
SHAPES = {
    "plain": {},
    "square": dict(head_dim=6, intermediate_size=24),  # o, gate, up and down are square
    "fc_norm": dict(fc_norm=True, num_aux_hidden_states=4),
    "norm_output": dict(norm_output=True),
    "norm_before_fc": dict(norm_before_fc=True),
    "llama3": dict(rope_theta=5e5, rope_scaling=tuple(sorted(LLAMA3.items()))),
    "yarn": dict(rope_scaling=tuple(sorted(YARN.items()))),
    "linear": dict(rope_scaling=(("factor", 2.0), ("rope_type", "linear"))),
    "two_states": dict(num_aux_hidden_states=2),
    "everything": dict(
        fc_norm=True, norm_output=True, num_key_value_heads=1, rope_scaling=tuple(sorted(LLAMA3.items()))
    ),
}
ODD = {"one_state": dict(num_aux_hidden_states=1)}  # engines skip fc


def draft(
    name: str = "plain", dtype: str = "bfloat16", target: str = "some/target", seed: int = 0, **sizes
):  # fmt: skip
    """A draft whose norms are not all ones, so that mixed-up tensors show. `sizes` change its shape."""
    shape, rng = DraftShape(**PLAIN | (SHAPES | ODD)[name] | sizes), np.random.default_rng(seed)
    params = _map(lambda x: _weight(x.shape, rng), _abstract(shape))
    ids = np.sort(rng.choice(shape.vocab_size, shape.draft_vocab_size, replace=False))
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32
    return SimpleNamespace(
        shape=shape,
        params=params,
        embedding=rng.standard_normal((shape.vocab_size, shape.hidden_size), np.float32).astype(kind),
        d2t=ids - np.arange(shape.draft_vocab_size),
        step=30,
        meta={
            "config": {"target": {"path": target, "dtype": dtype}},
            "target": {"path": target, "shape": {}, "weights_digest": "abc"},
            "aux_layers": [1, 3, 4, 5][: shape.num_aux_hidden_states],
            "manifest": {
                "leaves": {"embedding/embedding": {"label": "frozen"}, "draft/fc/kernel": {"label": "train"}},
                "facts": {"data": {"fingerprint": "def"}, "tokenizer_hash": "123"},
            },
        },
    )


def evaluated(accept_length: float, step: int) -> dict:
    """What evaluate.json holds, as far as an export reads it."""
    settings = dict(steps=3, topk=1, tokens=4, prompts=80, max_new_tokens=96, dtype="float32", temperature=0)
    return dict(
        accept_length=accept_length, step=step, sglang_request=accept_length + 0.01, settings=settings,
        interval=[accept_length - 0.1, accept_length + 0.1],
    )  # fmt: skip


def edit_config(directory, **fields) -> None:
    """Change fields of a directory's config.json; None for `...` deletes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))


@functools.cache
def _abstract(shape: DraftShape) -> dict:
    return model.abstract(shape)[1]


def _weight(shape: tuple[int, ...], rng) -> np.ndarray:
    """Norms around one and not all alike; kernels that keep the size of what they multiply, roughly."""
    x = rng.standard_normal(shape, np.float32)
    return 1 + 0.3 * x if len(shape) == 1 else x * np.float32(shape[0] ** -0.5)


def _map(function, tree):
    return {k: _map(function, v) if isinstance(v, dict) else function(v) for k, v in tree.items()}
