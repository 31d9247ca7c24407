"""Frozen leaves keep their bits, patterns are total, and clip, decay and schedule do what they say."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import step_fixture as fixture

from eagle3_jax.errors import ConfigError
from eagle3_jax.train import manifest, optim

FREEZE = (*fixture.FREEZE, "draft/lm_head/.*")


def small():
    """A tree with a frozen leaf that holds a -0.0, which `p + 0` would turn into 0.0."""
    return {
        "draft": {
            "fc": {"kernel": jnp.ones((2, 3))},
            "norm": {"scale": jnp.ones(3)},
            "lm_head": {"kernel": jnp.asarray([[-0.0, 1.0], [2.0, -3.0]])},
        },
        "embedding": {"embedding": jnp.asarray([[-0.0, 0.5], [-0.0, 0.25]], jnp.bfloat16)},
    }


def steps(tree, settings, freeze, grads, count):
    """The tree after `count` updates with the same gradients, and the optimiser's state."""
    labels = optim.labels(tree, freeze)
    trained, frozen = optim.split(tree, labels)
    tx = optim.make(settings, labels)
    opt = optim.init(tx, trained, frozen)
    for _ in range(count):
        trained, opt = optim.update(tx, grads, opt, trained, frozen)
    return optim.merge(trained, frozen), opt, trained


def gradients(value=1.0):
    return {"draft": {"fc": {"kernel": jnp.full((2, 3), value)}, "norm": {"scale": jnp.full(3, value)}}}


def test_frozen_leaves_keep_their_bits_through_twenty_steps_with_decay_and_have_no_moments():
    settings = fixture.train(weight_decay=0.5)
    labels = optim.labels(fixture.tree(), FREEZE)
    step = fixture.make(settings, optim.make(settings, labels))
    whole = fixture.tree()
    whole["draft"]["lm_head"]["kernel"][0, :5] = -0.0
    whole["embedding"]["embedding"][3] = -0.0
    before = manifest.digests(whole)
    trained, frozen = optim.split(jax.tree.map(jnp.asarray, whole), labels)
    names = set(optim.flat(trained))
    assert "draft/fc/kernel" in names and not names & {"draft/lm_head/kernel", "embedding/embedding"}
    opt = optim.init(step.tx, trained, frozen)
    sizes = sum(x.size for x in jax.tree.leaves(trained))
    assert sum(x.size for x in jax.tree.leaves(opt) if x.ndim) == 2 * sizes
    run = jax.jit(step).lower(trained, opt, frozen, fixture.batch()).compile()
    losses = []
    for _ in range(20):
        trained, opt, metrics = run(trained, opt, frozen, fixture.batch())
        losses.append(float(metrics["loss"]))
    after = manifest.digests(optim.merge(trained, frozen))
    assert losses[-1] < losses[0]
    assert after.keys() == before.keys()
    assert {name for name in before if after[name] != before[name]} == names


def test_a_negative_zero_in_a_frozen_leaf_stays_one():
    tree = small()
    after, opt, _ = steps(
        tree, fixture.train(weight_decay=0.9), ("embedding/.*", ".*lm_head.*"), gradients(), 3
    )
    assert manifest.digests(after["embedding"]) == manifest.digests(tree["embedding"])
    assert manifest.digests(after["draft"]["lm_head"]) == manifest.digests(tree["draft"]["lm_head"])
    assert np.signbit(after["draft"]["lm_head"]["kernel"][0, 0])
    assert {x.shape for x in jax.tree.leaves(opt)} == {(), (2, 3), (3,)}


def test_labels_follow_the_patterns_and_match_whole_names():
    labels = optim.flat(optim.labels(small(), ("embedding/.*", "draft/norm/.*|draft/fc")))
    assert labels == {
        "draft/fc/kernel": "train", "draft/norm/scale": "frozen", "draft/lm_head/kernel": "train",
        "embedding/embedding": "frozen",
    }  # fmt: skip
    trained, frozen = optim.split(small(), optim.nested(labels))
    assert set(optim.flat(trained)) == {"draft/fc/kernel", "draft/lm_head/kernel"}
    assert jax.tree.structure(optim.merge(trained, frozen)) == jax.tree.structure(small())


@pytest.mark.parametrize("pattern", ["embed/.*", "draft/fc", "norm/scale"])
def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are(pattern):
    with pytest.raises(ConfigError, match=f"{pattern!r} matches no parameter; there are .*draft/fc/kernel"):
        optim.labels(small(), ("embedding/.*", pattern))


def test_freezing_everything_is_refused():
    with pytest.raises(ConfigError, match="nothing is left to train"):
        optim.labels(small(), (".*",))


def test_the_norm_that_is_clipped_is_that_of_the_trained_gradients_alone():
    """The clipped gradient is read from AdamW's first moment, which after one step is a tenth of it."""
    settings = fixture.train(clip=0.5)
    _, opt, _ = steps(small(), settings, ("embedding/.*", ".*lm_head.*"), gradients(4.0), 1)
    moment = [x for path, x in jax.tree.leaves_with_path(opt) if "mu" in str(path)]
    np.testing.assert_allclose(optax.global_norm(moment), 0.05, rtol=1e-6)
    _, opt, _ = steps(small(), settings, ("embedding/.*", ".*lm_head.*"), gradients(0.01), 1)
    moment = [x for path, x in jax.tree.leaves_with_path(opt) if "mu" in str(path)]
    np.testing.assert_allclose(
        optax.global_norm(moment), 0.1 * 0.01 * 3, rtol=1e-6
    )  # nine numbers: not clipped


def test_decay_draws_matrices_towards_zero_and_leaves_norm_scales_alone():
    settings = fixture.train(weight_decay=0.5, learning_rate=0.1, final_learning_rate=0.1)
    after, _, _ = steps(small(), settings, ("embedding/.*", ".*lm_head.*"), gradients(0.0), 2)
    np.testing.assert_allclose(after["draft"]["fc"]["kernel"], 0.95**2, rtol=1e-6)
    np.testing.assert_array_equal(after["draft"]["norm"]["scale"], 1.0)


def test_the_schedule_warms_up_to_its_peak_and_ends_at_its_final_rate():
    rate = optim.schedule(fixture.train(steps=100, warmup=10, learning_rate=1e-3, final_learning_rate=1e-5))
    values = np.asarray([float(rate(i)) for i in range(121)])
    np.testing.assert_allclose(values[[0, 4, 9, 10]], [1e-4, 5e-4, 1e-3, 1e-3], rtol=1e-6)
    np.testing.assert_allclose(values[55], (1e-3 + 1e-5) / 2, rtol=1e-5)  # the middle of the cosine
    np.testing.assert_allclose(values[100:], 1e-5, rtol=1e-5)
    assert (np.diff(values[10:101]) < 0).all()


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert float(optim.schedule(fixture.train(learning_rate=0.02))(0)) == pytest.approx(0.02)
