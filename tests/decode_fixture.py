"""A tiny target whose greedy text is not constant, and a draft that is right about it now and then."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from oracle import Oracle

from eagle3_jax import axes
from eagle3_jax.decode import speculate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.writer import Writer
from eagle3_jax.draft import loss, model, unroll
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.target.model import Target
from eagle3_jax.target.shape import TargetShape

V, D, EPS, THETA = 64, 32, 1e-5, 100.0
DRAFT_IDS = np.array([i for i in range(V) if i % 8 != 5], np.int32)  # not every token can be drafted
D2T = DRAFT_IDS - np.arange(len(DRAFT_IDS), dtype=np.int32)
LIMIT = 40  # new tokens


class Build(NamedTuple):
    """What is built: the target's family and sizes, and the layers whose states the draft reads."""

    family: str = "llama"
    layers: int = 5
    head_dim: int = 8
    aux: tuple[int, ...] = (0, 1, 3)


SMALL, QWEN3 = Build(), Build("qwen3")
SERVED = Build(
    layers=7, head_dim=32, aux=(1, 2, 3)
)  # vLLM's least head_dim; the layers of an engine's default
SERVED_OTHER = SERVED._replace(aux=(0, 2, 5))


class Tiny(NamedTuple):
    target: Target
    params: dict
    writer: Writer


@functools.cache
def tiny(build: Build = SMALL) -> Tiny:
    shape = TargetShape(
        model_type=build.family, hidden_size=D, intermediate_size=48, num_hidden_layers=build.layers,
        num_attention_heads=4, num_key_value_heads=2, head_dim=build.head_dim, vocab_size=V,
        max_position_embeddings=256, rms_norm_eps=EPS, rope_theta=THETA,
    )  # fmt: skip
    target, rng = Target(shape, build.aux), np.random.default_rng(3)

    def draw(path, leaf):
        if path[-1].key == "scale":
            return jnp.asarray(rng.uniform(0.5, 1.5, leaf.shape), leaf.dtype)
        # What a layer adds is smaller than the embedding: the next token follows mostly from the last one.
        added = 0.75 / build.layers
        gain = {"o": added * (8 / build.head_dim) ** 0.5, "down": added, "embed": D**0.5}
        gain = gain.get(path[-2].key, 1.5)
        return jnp.asarray(gain / D**0.5 * rng.normal(size=leaf.shape), leaf.dtype)

    return Tiny(target, jax.tree.map_with_path(draw, target.abstract), Writer(target, axes.make_mesh()))


def prompts(count: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, V, n).tolist() for n in rng.integers(3, 13, count)]


def draft_shape(build: Build = SMALL, **options) -> DraftShape:
    return DraftShape(
        hidden_size=D, num_aux_hidden_states=3, intermediate_size=40, num_attention_heads=8,
        num_key_value_heads=2, head_dim=build.head_dim, vocab_size=V, draft_vocab_size=len(DRAFT_IDS),
        max_position_embeddings=256, rms_norm_eps=EPS, rope_theta=THETA, **options,
    )  # fmt: skip


def weights(graph, params, build: Build = SMALL) -> speculate.DraftWeights:
    return speculate.DraftWeights(graph, params, tiny(build).params["embed"]["embedding"], jnp.asarray(D2T))


@functools.cache
def untrained(**options) -> speculate.DraftWeights:
    return weights(*model.init(draft_shape(**options), 5))


@functools.cache
def trained(blind: bool = False, build: Build = SMALL) -> speculate.DraftWeights:
    """Trained on the target's own answers, not to the end.

    A blind draft does not see its embeddings: all that it knows comes through the aux states.
    """
    target, params, writer = tiny(build)
    texts = writer.write(params, prompts(16, 1), LIMIT, ())
    batch = as_batch(texts)
    graph, draft = model.init(draft_shape(build), 5)
    head_UD = target.head(params)[DRAFT_IDS]
    vocabulary = unroll.Vocabulary(jnp.asarray(D2T), jnp.zeros(V, bool).at[DRAFT_IDS].set(True))
    tx = optax.adamw(5e-3)

    def seen(draft):
        scale = draft["midlayer"]["input_layernorm"]["scale"] * (not blind)
        return draft | {"midlayer": draft["midlayer"] | {"input_layernorm": {"scale": scale}}}

    def cost(draft):
        sums, _ = unroll.unroll(
            model.bind(graph, seen(draft)), params["embed"]["embedding"], head_UD, vocabulary, batch,
            depth=2, mask="serve", oov_rows="drop",
        )  # fmt: skip
        return loss.objective(sums, kind="ce", normalise="rows", decay=0.8)[0]

    def step(carry, _):
        draft, opt = carry
        updates, opt = tx.update(jax.grad(cost)(draft), opt, draft)
        return (optax.apply_updates(draft, updates), opt), None

    (draft, _), _ = jax.jit(lambda c: jax.lax.scan(step, c, length=150))((draft, tx.init(draft)))
    return weights(graph, seen(draft), build)


def as_batch(texts) -> unroll.Batch:
    """One text per row; the answer is the supervised span."""
    T = max(len(t.ids) for t in texts)

    def rows(arrays):
        return jnp.stack([np.pad(a, [(0, T - len(a))] + [(0, 0)] * (a.ndim - 1)) for a in arrays])

    return unroll.Batch(
        ids=rows([t.ids for t in texts]), segment=rows([np.ones_like(t.ids) for t in texts]),
        position=rows([np.arange(len(t.ids), dtype=np.int32) for t in texts]),
        span=rows([(np.arange(len(t.ids)) >= t.answer).astype(np.int32) for t in texts]),
        aux=rows([t.aux for t in texts]), final=rows([t.final for t in texts]),
        top=rows([t.top for t in texts]), lse=rows([t.lse for t in texts]),
    )  # fmt: skip


@functools.cache
def speculator(plan: Drafting, build: Build = SMALL) -> speculate.Speculator:
    return speculate.Speculator(tiny(build).target, plan, axes.make_mesh())


def chain(steps: int) -> Drafting:
    return Drafting(steps, 1, steps + 1)


def oracle(draft: speculate.DraftWeights, build: Build = SMALL, **options) -> Oracle:
    to_numpy = functools.partial(jax.tree.map, np.asarray)
    return Oracle(
        to_numpy(tiny(build).params), to_numpy(draft.params), build.aux, DRAFT_IDS, EPS, THETA, **options
    )
