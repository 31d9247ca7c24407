"""A tiny offline training step over eight packed rows whose supervised counts differ, without any file."""

import jax
import jax.numpy as jnp
import numpy as np

from eagle3_jax import axes
from eagle3_jax.config import Train
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.draft.unroll import Vocabulary
from eagle3_jax.train import optim
from eagle3_jax.train.step import Step

ROWS, T, V, U, D = 8, 16, 40, 24, 16
SHAPE = DraftShape(
    hidden_size=D, num_aux_hidden_states=3, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2,
    head_dim=4, vocab_size=V, draft_vocab_size=U, max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=1e4,
)  # fmt: skip
GRAPH, ABSTRACT, DRAFT_AXES = model.abstract(SHAPE)
AXES = {"draft": DRAFT_AXES, "embedding": {"embedding": "v d"}, "target": {"head": {"kernel": "u d"}}}
FREEZE = ("embedding/.*", "target/.*")
DRAFT_IDS = np.flatnonzero(np.arange(V) % 5 > 1)
VOCABULARY = Vocabulary(
    jnp.asarray(DRAFT_IDS - np.arange(U), jnp.int32), jnp.asarray(np.isin(np.arange(V), DRAFT_IDS))
)


def train(**changes) -> Train:
    told = dict(
        run="unused", steps=20, batch=ROWS, row_length=T, unroll=3, learning_rate=0.02, save_every=10,
        weight_decay=0.1,
    )  # fmt: skip
    return Train(**told | changes)


def tree(seed: int = 0) -> dict:
    """Draft, embedding and the target head's draft rows, on the host."""
    rng = np.random.default_rng(seed)

    def draw(x):
        return (rng.normal(size=x.shape) * 0.3 + (x.ndim == 1)).astype(np.float32)

    return {
        "draft": jax.tree.map(draw, ABSTRACT),
        "embedding": {"embedding": draw(np.zeros((V, D)))},
        "target": {"head": {"kernel": draw(np.zeros((U, D))) * 2}},
    }


def batch(seed: int = 0) -> dict[str, np.ndarray]:
    """Row b holds one or two conversations, 2 b supervised tokens at most and, if odd, padding."""
    rng = np.random.default_rng(seed)
    out = {n: np.zeros((ROWS, T), np.int32) for n in ("segment", "position", "span")}
    for b in range(ROWS):
        for number, (start, end) in enumerate(((0, 6), (6, T - 3 * (b % 2)))[: 1 + (b > 1)], 1):
            out["segment"][b, start:end] = number
            out["position"][b, start:end] = np.arange(end - start)
            out["span"][b, max(start + 1, end - b) : end] = number
    final = rng.normal(size=(ROWS, T, D)).astype(np.float32)
    logits = final @ rng.normal(size=(D, V))
    return out | dict(
        ids=rng.integers(0, V, (ROWS, T)).astype(np.int32), final=final,
        aux=rng.normal(size=(ROWS, T, 3 * D)).astype(np.float32),
        top=logits.argmax(-1).astype(np.int32), lse=np.log(np.exp(logits).sum(-1)).astype(np.float32),
    )  # fmt: skip


def make(settings: Train, tx=None) -> Step:
    labels = optim.labels(tree(), FREEZE)
    return Step(settings, GRAPH, tx or optim.make(settings, labels), VOCABULARY)


def placed(mesh, whole: dict | None = None, data: dict | None = None) -> tuple[dict, dict, dict]:
    """(trained, frozen, batch) on a mesh, sharded as in training."""
    whole, data = whole or tree(), data or batch()
    whole = jax.tree.map(lambda a, x: jax.device_put(x, axes.named(mesh, a, x.shape)), AXES, whole)
    return *optim.split(whole, optim.labels(whole, FREEZE)), jax.device_put(data, axes.rows(mesh))


def assert_close_gradients(got: dict, want: dict, of_maximum: float = 1e-5) -> None:
    got, want = optim.flat(got), optim.flat(want)
    assert got.keys() == want.keys()
    for name, x in want.items():
        x = np.asarray(x)
        assert np.abs(x).max() > 0, name
        np.testing.assert_allclose(got[name], x, rtol=0, atol=of_maximum * np.abs(x).max(), err_msg=name)
