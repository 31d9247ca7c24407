"""Trees of drafts as arrays: candidates, the choice among them, who is whose ancestor, the accepted path.

Candidates lie in one pool, level by level: `topk` children of the bonus, then `topk` children of each of a level's
`topk` best. A chosen tree has the bonus as node 0 and `tokens - 1` candidates in the order of the pool, so that a
parent comes before its children.

    C candidates of a level     P all candidates     N chosen candidates     T = N + 1 nodes
"""

import jax
import jax.numpy as jnp


def children(logits_BKU: jax.Array, score_BK: jax.Array, topk: int) -> tuple[jax.Array, jax.Array]:
    """The `topk` likeliest continuations of K nodes; the lower index first among equals.

    logits  B K U   float32  the draft's
    score   B K     float32  probability of the path to the node, under the draft
    -> index  B C   int32    into the draft vocabulary, C = K * topk
       score  B C   float32
    """
    B, K, _ = logits_BKU.shape
    if topk == 1:  # a chain keeps all of its candidates, whatever their scores
        return jnp.argmax(logits_BKU, axis=-1).astype(jnp.int32), score_BK
    probability_BKJ, index_BKJ = jax.lax.top_k(jax.nn.softmax(logits_BKU, axis=-1), topk)
    score_BKJ = score_BK[..., None] * probability_BKJ
    return index_BKJ.reshape(B, K * topk), score_BKJ.reshape(B, K * topk)


def choose(token_BP, score_BP, parent_BP, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` best candidates. A parent scores no less than its child and is before it in the pool: it is in.

    token   B P   int32    target's vocabulary
    score   B P   float32
    parent  B P   int32    index in the pool, -1 for the bonus
    -> drafts   B N  int32  tokens of nodes 1 .. N
       parents  B N  int32  node, 0 .. N-1
    """
    at_BN = jnp.sort(jax.lax.top_k(score_BP, count)[1], axis=1)
    parent_BN = take(parent_BP, at_BN)
    node_BN = jnp.argmax(parent_BN[:, :, None] == at_BN[:, None, :], axis=2).astype(jnp.int32) + 1
    return take(token_BP, at_BN), jnp.where(parent_BN < 0, 0, node_BN)


def ancestors(parents_BN: jax.Array, depth: int) -> jax.Array:
    """Which nodes lie on the way from the root to each node, itself included: [B, T, T] bool.

    `depth` is that of the deepest node.
    """
    B, N = parents_BN.shape
    own_BTT = jnp.broadcast_to(jnp.eye(N + 1, dtype=bool), (B, N + 1, N + 1))
    above_BT = jnp.pad(parents_BN, ((0, 0), (1, 0)))  # the root above itself
    seen_BTT = own_BTT
    for _ in range(depth):
        seen_BTT = own_BTT | jnp.take_along_axis(seen_BTT, above_BT[..., None], axis=1)
    return seen_BTT


def walk(drafts_BN, parents_BN, truth_BT, depth: int) -> tuple[jax.Array, jax.Array]:
    """From the root on to the child that is the target's own choice, as long as there is one.

    drafts, parents  B N  int32  a tree
    truth            B T  int32  the target's choice after each node
    -> accepted  B            int32  drafts on the path
       path      B depth + 1  int32  its nodes; the last one again where it ends early
    """
    node_B, accepted_B = (jnp.zeros(len(truth_BT), jnp.int32) for _ in range(2))
    path = [node_B]
    for _ in range(depth):
        wanted_B1 = jnp.take_along_axis(truth_BT, node_B[:, None], axis=1)
        right_BN = (parents_BN == node_B[:, None]) & (drafts_BN == wanted_B1)
        found_B = jnp.any(right_BN, axis=1)  # once there is none, there is none again: the node stays
        node_B = jnp.where(found_B, jnp.argmax(right_BN, axis=1).astype(jnp.int32) + 1, node_B)
        accepted_B += found_B.astype(jnp.int32)
        path.append(node_B)
    return accepted_B, jnp.stack(path, axis=1)


def take(x_BT: jax.Array, at_BN: jax.Array) -> jax.Array:
    """x[b, at[b, n]] along the second axis, whatever axes follow it."""
    index = at_BN.reshape(at_BN.shape + (1,) * (x_BT.ndim - 2))
    return jnp.take_along_axis(x_BT, index, axis=1)
