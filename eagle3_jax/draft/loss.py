"""Losses and metrics of the unroll as sums and counts, so that shards and micro-batches add exactly."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
    """Everything a step adds up; each is [K], one entry per unroll step, except `tokens` [].

    ce           cross entropy against the target's distribution over the draft vocabulary, over loss rows
    alpha        -log of the acceptance rate, over loss rows
    rate         acceptance rate sum_u min(p, q), over loss rows
    rows         loss rows: supervised and, under `drop`, the target's argmax in the draft vocabulary
    supervised   supervised rows
    correct      supervised rows whose draft argmax is the target's argmax over the full vocabulary
    chain_rows   supervised rows where all earlier steps were right and the text took the same tokens
    chain_correct  those of them that are right at this step
    tokens       B * T
    """

    ce: jax.Array
    alpha: jax.Array
    rate: jax.Array
    rows: jax.Array
    supervised: jax.Array
    correct: jax.Array
    chain_rows: jax.Array
    chain_correct: jax.Array
    tokens: jax.Array


def mean(total: jax.Array, count: jax.Array) -> jax.Array:
    return total / jnp.maximum(count, 1.0)


def soft_cross_entropy(logits_BTU: jax.Array, target_BTU: jax.Array) -> jax.Array:
    """[B, T]: -sum_u softmax(target) * log_softmax(logits), both given as logits."""
    p_BTU = jax.nn.softmax(target_BTU, axis=-1)
    return jax.nn.logsumexp(logits_BTU, axis=-1) - jnp.sum(p_BTU * logits_BTU, axis=-1)


def acceptance_rate(logits_BTU: jax.Array, target_BTU: jax.Array, lse_BT: jax.Array) -> jax.Array:
    """[B, T]: sum_u min(p_u, q_u), p the target's full-vocabulary probabilities at the draft's tokens.

    It is the chance that speculative sampling accepts the draft (Leviathan et al. 2023).
    """
    p_BTU = jnp.exp(target_BTU - lse_BT[..., None])
    return jnp.sum(jnp.minimum(p_BTU, jax.nn.softmax(logits_BTU, axis=-1)), axis=-1)


def objective(sums: Sums, *, kind: str, normalise: str, decay: float) -> tuple[jax.Array, jax.Array]:
    """Loss [] = sum over k of decay**k times the loss of step k, and those losses [K].

    `kind`: "ce"; "lk_alpha": -log acceptance rate; "lk_lambda": w ce + (1 - w)(1 - mean rate) with
    w = exp(-mean rate), no gradient through w. `normalise`: "rows" divides the cross entropy by the loss
    rows, "tokens" by B * T as EAGLE's code does. Rates are means over loss rows. `sums` are those of the
    whole batch.
    """
    ce_K = mean(sums.ce, sums.rows) if normalise == "rows" else sums.ce / sums.tokens
    if kind == "ce":
        loss_K = ce_K
    elif kind == "lk_alpha":
        loss_K = mean(sums.alpha, sums.rows)
    else:
        rate_K = mean(sums.rate, sums.rows)
        w_K = jax.lax.stop_gradient(jnp.exp(-rate_K))
        loss_K = w_K * ce_K + (1 - w_K) * jnp.where(sums.rows > 0, 1 - rate_K, 0.0)
    return jnp.vdot(decay ** jnp.arange(len(loss_K), dtype=jnp.float32), loss_K), loss_K


def metrics(sums: Sums) -> dict[str, jax.Array]:
    """`accuracy`, `conditional` with `conditional_share` (DESIGN's definitions) and `rate`, each [K]."""
    return {
        "accuracy": mean(sums.correct, sums.supervised),
        "conditional": mean(sums.chain_correct, sums.chain_rows),
        "conditional_share": mean(sums.chain_rows, sums.supervised),
        "rate": mean(sums.rate, sums.rows),
        "supervised": sums.supervised,
    }
