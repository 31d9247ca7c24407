"""One device against eight virtual ones, on every mesh shape; what does not divide is said or refused."""

import functools

import jax
import numpy as np
import optax
import pytest
import step_fixture as fixture

from eagle3_jax import axes
from eagle3_jax.errors import ConfigError
from eagle3_jax.train import optim, setup
from eagle3_jax.train.step import opt_shardings

MESHES = [(8, 1), (4, 2), (2, 4)]
SETTINGS = fixture.train(
    loss="lk_lambda", micro_batches=2
)  # the only loss whose weights need every rank's sums


@functools.cache
def one_sgd_step(data: int, model: int):
    """Loss, gradients and the trained leaves after one step of plain SGD."""
    mesh = axes.make_mesh(data, model)
    trained, frozen, batch = fixture.placed(mesh)
    kinds = {"train": optax.sgd(0.1), "frozen": optax.set_to_zero()}
    step = fixture.make(SETTINGS, optax.partition(kinds, optim.labels(fixture.tree(), fixture.FREEZE)))
    where = jax.tree.map(lambda x: x.sharding, trained)

    def run(trained, frozen, batch):
        value, _, _, grads = step.gradients(trained, frozen, batch)
        moved, _ = optim.update(step.tx, grads, optim.init(step.tx, trained, frozen), trained, frozen)
        return value, grads, moved

    jitted = jax.jit(run, out_shardings=(axes.named(mesh, ""), where, where))
    return jitted(trained, frozen, batch)


@functools.cache
def five_steps(data: int, model: int):
    """Losses of five AdamW steps as training runs them, and the last state."""
    mesh = axes.make_mesh(data, model)
    trained, frozen, batch = fixture.placed(mesh)
    step = fixture.make(SETTINGS)
    where, frozen_where = (jax.tree.map(lambda x: x.sharding, x) for x in (trained, frozen))
    opt_where = opt_shardings(mesh, jax.eval_shape(lambda: optim.init(step.tx, trained, frozen)), where)
    opt = jax.jit(lambda a, b: optim.init(step.tx, a, b), out_shardings=opt_where)(trained, frozen)
    jitted = step.compiled(mesh, where, opt_where, frozen_where)
    run = jitted.lower(trained, opt, frozen, batch).compile()
    losses = []
    for _ in range(5):
        trained, opt, metrics = run(trained, opt, frozen, batch)
        losses.append(float(metrics["loss"]))
    return losses, trained, opt


def moments(opt) -> dict:
    """`draft/fc/kernel` -> AdamW's first moment."""
    return {
        "/".join(k.key for k in path if isinstance(k, jax.tree_util.DictKey)).removeprefix("train/"): x
        for path, x in jax.tree.leaves_with_path(opt)
        if any(getattr(k, "name", None) == "mu" for k in path)
    }


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_loss_gradients_and_a_step_of_sgd_are_those_of_one_device(mesh):
    value, grads, moved = one_sgd_step(1, 1)
    got_value, got_grads, got_moved = one_sgd_step(*mesh)
    np.testing.assert_allclose(got_value, value, rtol=1e-6)
    fixture.assert_close_gradients(got_grads, grads)
    fixture.assert_close_gradients(got_moved, moved)
    start = optim.flat(fixture.tree())
    for name, x in optim.flat(got_moved).items():
        assert np.abs(np.asarray(x) - start[name]).max() > 0, name


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_five_steps_of_adamw_end_at_the_loss_of_one_device(mesh):
    losses, _, _ = five_steps(1, 1)
    assert losses[4] < losses[0]
    np.testing.assert_allclose(five_steps(*mesh)[0], losses, rtol=1e-5)


def test_heads_feed_forward_and_vocabulary_are_spread_and_so_are_their_moments():
    _, trained, opt = five_steps(2, 4)
    parts = {
        "draft/midlayer/q/kernel": (32, 1, 4), "draft/midlayer/k/kernel": (32, 2, 4),  # 2 kv heads on 4 devices
        "draft/midlayer/gate/kernel": (16, 8), "draft/lm_head/kernel": (16, 6), "draft/fc/kernel": (48, 16),
    }  # fmt: skip
    moment = moments(opt)
    assert moment.keys() == optim.flat(trained).keys()
    for name, part in parts.items():
        for x in (optim.flat(trained)[name], moment[name]):
            assert {shard.data.shape for shard in x.addressable_shards} == {part}, name


def test_axes_that_do_not_divide_are_replicated_and_the_start_up_table_says_so(capsys):
    mesh = axes.make_mesh(4, 2)
    letters = {"q": "c n h", "k": "c g h", "o": "n h d", "gate": "d f"}
    shapes = {
        "q": (16, 9, 4),
        "k": (16, 3, 4),
        "o": (9, 4, 8),
        "gate": (8, 32),
    }  # 9 and 3 heads, as in SmolLM2
    spread = {n: axes.named(mesh, a, shapes[n]) for n, a in letters.items()}
    tree = {n: jax.device_put(np.zeros(shapes[n], np.float32), spread[n]) for n in letters}
    for name, letter in (("q", "n"), ("k", "g"), ("o", "n")):
        assert axes.replicated_by_need(mesh, letters[name], shapes[name]) == [letter]
        assert tree[name].addressable_shards[0].data.shape == shapes[name]
    assert axes.replicated_by_need(mesh, "d f", (8, 32)) == []
    assert tree["gate"].addressable_shards[0].data.shape == (8, 16)
    setup.print_layout(mesh, letters, tree, dict.fromkeys(tree, "train"))
    title, head, *lines = capsys.readouterr().err.splitlines()
    assert "data 4 x model 2" in title and head.rstrip().endswith("does not divide")
    told = {line.split()[0]: line.split("train")[1].split() for line in lines}
    assert told == {"q": ["-", "n"], "k": ["-", "g"], "o": ["-", "n"], "gate": ["f:", "model"]}


def test_a_batch_that_does_not_divide_is_refused_with_the_nearest_that_does():
    mesh = axes.make_mesh(4, 2)
    axes.check_batch(mesh, 8)
    with pytest.raises(ConfigError, match=r"train.batch=6 rows do not divide over mesh.data=4; nearest: 8"):
        axes.check_batch(mesh, 6)
    with pytest.raises(ConfigError, match="nearest: 4"):
        axes.check_batch(mesh, 1)


def test_a_mesh_larger_than_the_machine_is_refused():
    with pytest.raises(ConfigError, match=r"mesh.data=8 x mesh.model=2 wants 16 devices, 8 found"):
        axes.make_mesh(8, 2)
