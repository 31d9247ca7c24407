"""The tree's parts by hand, on small arrays, and what SGLang's three numbers may be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax import layers
from eagle3_jax.decode import tree
from eagle3_jax.decode.drafting import Drafting, drafting
from eagle3_jax.errors import ConfigError


def rows(*rows_):
    return jnp.asarray(rows_, jnp.int32)


def test_children_are_the_likeliest_tokens_of_each_node_with_the_paths_probability():
    logits = jnp.log(jnp.asarray([[[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]]]))
    index, score = tree.children(logits, jnp.asarray([[0.5, 0.25]]), 2)
    assert index.tolist() == [[1, 2, 0, 2]]
    np.testing.assert_allclose(score, [[0.3, 0.15, 0.125, 0.075]], rtol=1e-6)


@pytest.mark.parametrize("topk", [1, 2])
def test_of_equals_the_lowest_index_is_first(topk):
    index, _ = tree.children(jnp.asarray([[[0.0, 2.0, 2.0, 2.0]]]), jnp.ones((1, 1)), topk)
    assert index.tolist() == [[1, 2][:topk]]
    drafts, parents = tree.choose(rows([7, 8, 9]), jnp.full((1, 3), 0.25), rows([-1, -1, 0]), topk)
    assert (drafts.tolist(), parents.tolist()) == ([[7, 8][:topk]], [[0, 0][:topk]])


def test_the_best_candidates_stay_in_the_order_of_the_pool_and_know_their_parents():
    """Pool of two levels with topk 2; the second row is another tree. Node 14 is as likely as its parent."""
    token = rows([10, 11, 12, 13, 14, 15], [20, 21, 22, 23, 24, 25])
    parent = rows([-1, -1, 0, 0, 1, 1], [-1, -1, 0, 0, 1, 1])
    score = jnp.asarray([[0.5, 0.4, 0.1, 0.05, 0.4, 0.01], [0.9, 0.05, 0.8, 0.1, 0.03, 0.01]])
    drafts, parents = tree.choose(token, score, parent, 3)
    assert drafts.tolist() == [[10, 11, 14], [20, 22, 23]]
    assert parents.tolist() == [[0, 0, 2], [0, 1, 1]]
    drafts, parents = tree.choose(token, score, parent, 6)
    assert drafts.tolist() == token.tolist() and parents.tolist() == [[0, 0, 1, 1, 2, 2]] * 2


# The bonus has two children, the second of them two, and one of these one: 0 - (1, 2 - (3, 4 - 5)).
PARENTS = rows([0, 0, 2, 2, 4], [0, 1, 2, 3, 4])
DEPTH = 5


def test_a_node_sees_its_ancestors_and_itself():
    seen = np.array(tree.ancestors(PARENTS, DEPTH))
    for parents, see in zip(np.array(PARENTS), seen, strict=True):
        for node in range(6):
            way = {node}
            while node:
                node = parents[node - 1]
                way.add(node)
            assert set(np.flatnonzero(see[max(way)])) == way
    np.testing.assert_array_equal(seen[1], np.tri(6, dtype=bool))


@pytest.mark.parametrize(
    "truth, accepted, path",
    [
        ([11, 0, 0, 0, 0, 0], 0, [0, 0, 0, 0]),
        ([7, 9, 0, 0, 0, 0], 1, [0, 1, 1, 1]),
        ([8, 9, 7, 0, 5, 6], 2, [0, 2, 3, 3]),
        ([8, 0, 9, 0, 7, 3], 3, [0, 2, 4, 5]),
        ([8, 0, 9, 0, 9, 3], 2, [0, 2, 4, 4]),
    ],
    ids=["none", "a-leaf", "the-first-of-two", "to-the-end", "wrong-at-the-end"],
)
def test_the_walk_follows_the_child_that_the_target_chooses(truth, accepted, path):
    """Nodes 1 and 3 and 5 are drafts of the same token 7."""
    drafts = rows([7, 8, 7, 9, 7])
    got = tree.walk(drafts, PARENTS[:1], rows(truth), 3)
    assert (got[0].tolist(), got[1].tolist()) == ([accepted], [path])


def test_a_mask_shows_the_text_and_of_the_own_rows_what_it_is_told():
    see = jnp.asarray([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]] * 2, bool)
    mask = layers.slots_seen(jnp.asarray([2, 0]), see, 6)
    assert mask.astype(int).tolist() == [
        [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]],
        [[1, 0, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0]],
    ]


def test_kept_slots_move_together_and_the_rest_of_the_cache_stays():
    rng, start, path = np.random.default_rng(0), [1, 3], [[0, 2, 3], [0, 1, 4]]
    old = {"k": rng.normal(size=(2, 2, 4, 9)), "v": rng.normal(size=(2, 2, 9, 4))}
    new = jax.jit(layers.keep_slots, static_argnums=3)(
        {k: jnp.asarray(v) for k, v in old.items()}, jnp.asarray(start), rows(*path), 5
    )
    for b in range(2):
        at = np.arange(9)
        at[start[b] : start[b] + 3] = start[b] + np.array(path[b])
        np.testing.assert_allclose(new["k"][b], old["k"][b][:, :, at], rtol=1e-6)
        np.testing.assert_allclose(new["v"][b], old["v"][b][:, at], rtol=1e-6)


def test_three_numbers_make_a_chain_or_a_tree():
    assert drafting(3) == drafting(3, 1, 4) == Drafting(3, 1, 4)
    assert (drafting(3).kind, drafting(3).name, drafting(4, 3, 10).kind) == ("chain", "3-1-4", "tree")
    assert [drafting(4, 3, 10).candidates, drafting(3).candidates] == [30, 3]
    assert drafting(4, 3, 31).depth == 4 and drafting(4, 3, 3).depth == 2
    assert drafting(2, 2, 7).tokens == 7, "the whole pool"


@pytest.mark.parametrize(
    "numbers, said",
    [
        ((0, 1, None), "x.steps=0, x.topk=1: both must be at least 1"),
        ((3, 0, 4), "x.steps=3, x.topk=0: both must be at least 1"),
        ((3, 1, 6), r"chain, for which SGLang verifies steps\+1 = 4 .*\(x.tokens=6\): give x.tokens=4 or leave it out"),
        ((3, 2, None), r"tree and wants x.tokens: within 2 .. 11"),
        ((3, 2, 1), r"x.tokens=1 must be within 2 .. 11"),
        ((2, 2, 8), r"x.tokens=8 must be within 2 .. 7: .* = 6 candidates of x.steps=2, x.topk=2"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_go_together_are_refused(numbers, said):
    with pytest.raises(ConfigError, match=said) as caught:
        drafting(*numbers, prefix="x.")
    assert "\n" not in str(caught.value)
