"""Checkpoints: bits survive every mesh, damage is noticed, and nothing is lost or overwritten silently."""

import dataclasses
import functools
import json
import os
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eagle3_jax import axes
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import CheckpointError
from eagle3_jax.train import checkpoint

SHAPE = DraftShape(
    hidden_size=4, num_aux_hidden_states=3, intermediate_size=8, num_attention_heads=2, num_key_value_heads=1,
    head_dim=2, vocab_size=6, draft_vocab_size=3, max_position_embeddings=64, rms_norm_eps=1e-6,
    rope_theta=1e4, rope_scaling=(("factor", 8.0), ("rope_type", "llama3")),
)  # fmt: skip
CONFIG = {"train": {"run": "r", "steps": 10, "learning_rate": 1e-3}, "mesh": {"data": 1, "model": 1}}
META = {
    "config": CONFIG, "shape": dataclasses.asdict(SHAPE), "aux_layers": [1, 2, 3], "manifest": {},
    "target": {"path": "t", "shape": {}, "weights_digest": "0"},
}  # fmt: skip


def params():
    rng = np.random.default_rng(0)
    weights = {"fc": rng.normal(size=(64, 40)), "lm_head": rng.normal(size=(4, 8))}
    return {"draft": {k: {"kernel": jnp.asarray(v, jnp.float32)} for k, v in weights.items()}}


def frozen():
    return {
        "embedding": {"embedding": jnp.arange(24, dtype=jnp.bfloat16).reshape(6, 4)},
        "draft": {"norm": {"scale": jnp.full(4, -0.0)}},
        "d2t": np.array([0, 1, 1 << 40], np.int64),
    }


TX = optax.partition(
    {"train": optax.adamw(1e-3), "frozen": optax.set_to_zero()},
    {"draft": {"fc": {"kernel": "train"}, "lm_head": {"kernel": "train"}}, "embedding": {"e": "frozen"}},
)


def opt_of(tree):
    """The state after one update, so that no moment is 0."""
    tree = tree | {"embedding": {"e": optax.MaskedNode()}}
    return TX.update(tree, TX.init(tree), tree)[1]


def on_mesh(tree, data, model):
    mesh = axes.make_mesh(data, model)

    def put(x):
        spec = PartitionSpec("data", "model") if x.ndim == 2 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, spec))

    return jax.tree.map(put, tree)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and np.asarray(x).tobytes() == np.asarray(y).tobytes()


@functools.cache
def built(base):
    """A run with a start and steps 2 and 4, made once for the tests that only read it."""
    run = base / "run"
    checkpoint.start(run, frozen(), params(), META)
    with checkpoint.Steps(run, keep=3) as steps:
        for step in (2, 4):
            now = jax.tree.map(lambda x, s=step: x + s, params())
            steps.save(step, now, opt_of(now), {"row": step}, META)
    return run


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture
def run(base):
    return built(base)


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run")


def flip(item):
    """One bit of the largest array of an item."""
    file = max((f for f in item.rglob("d/*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_start_comes_back_with_int64_bfloat16_and_negative_zero(run):
    there, begun, meta = checkpoint.read_start(run)
    same(there, jax.tree.map(np.asarray, frozen()))
    same(begun, jax.tree.map(np.asarray, params()))
    assert meta["step"] == 0 and meta["config"] == CONFIG


def test_eight_devices_saved_two_and_one_restored_are_bit_equal(tmp_path):
    tree = on_mesh(params(), 4, 2)
    opt = opt_of(tree)
    with checkpoint.Steps(tmp_path, keep=1) as steps:
        steps.save(1, tree, opt, {"row": 5}, META)
        for data, model in ((2, 1), (1, 2), (1, 1)):
            wanted = on_mesh(params(), data, model)
            state = on_mesh(opt_of(params()), data, model)
            got, got_opt, data_state, meta = steps.restore(1, wanted, state)
            same(got, tree)
            same(got_opt, opt)
            assert jax.tree.leaves(got)[0].sharding == jax.tree.leaves(wanted)[0].sharding
            assert data_state == {"row": 5} and meta["step"] == 1


def test_what_the_loop_does_next_does_not_reach_the_step_being_written(tmp_path):
    tree, data_state = params(), {"row": 1}
    opt, wanted = opt_of(tree), jax.tree.map(np.array, tree)
    donate = jax.jit(lambda t: jax.tree.map(lambda x: x * 0 + 7, t), donate_argnums=0)
    with checkpoint.Steps(tmp_path, keep=1) as steps:
        steps.save(1, tree, opt, data_state, META)
        data_state["row"] = 2
        donate(tree)
        got, _, row, _ = steps.restore(1, params(), opt)
    same(jax.tree.map(np.asarray, got), wanted)
    assert row == {"row": 1}


def test_keep_rotates_steps_but_never_the_start(copy):
    with checkpoint.Steps(copy, keep=1) as steps:
        steps.save(6, params(), opt_of(params()), {}, META)
    assert [p.name for p in (copy / "steps").iterdir()] == ["6"]
    assert checkpoint.read_meta(copy)["step"] == 6
    assert checkpoint.load_draft(copy, 0).step == 0


def test_the_best_evaluated_step_is_kept_beside_the_newest_and_found_again(tmp_path):
    checkpoint.start(tmp_path / "r", frozen(), params(), META)
    found = {1: 1.5, 2: None, 3: 1.7, 4: 1.6, 5: None, 6: 1.7}
    kept = []
    for step, length in found.items():
        with checkpoint.Steps(tmp_path / "r", keep=1) as steps:  # each time as after a stop
            steps.save(step, params(), opt_of(params()), {}, META, length)
        kept.append(checkpoint.steps_of(tmp_path / "r")[1:])
        if step > 3:
            assert checkpoint.load_draft(tmp_path / "r", "best").step == (3 if step < 6 else 6)
    assert kept == [[1], [1, 2], [3], [3, 4], [3, 5], [6]]


def test_no_step_is_the_best_where_none_was_evaluated(run):
    with pytest.raises(CheckpointError, match=r"no step there was evaluated while training.*\(0, 2, 4\)"):
        checkpoint.load_draft(run, "best")


def test_saving_a_step_that_is_there_is_an_error(copy):
    with (
        checkpoint.Steps(copy, keep=3) as steps,
        pytest.raises(CheckpointError, match="step 4 was not written; steps there: 0, 2, 4"),
    ):
        steps.save(4, params(), opt_of(params()), {}, META)


@pytest.mark.parametrize("item", ["params", "opt"])
def test_a_flipped_bit_in_the_newest_step_falls_back_to_the_one_before(copy, item, capsys):
    flip(copy / "steps" / "4" / item)
    with checkpoint.Steps(copy, keep=3) as steps:
        with pytest.raises(CheckpointError, match="damaged"):
            steps.restore(4, params(), opt_of(params()))
        got, _, data_state, meta = steps.restore(None, params(), opt_of(params()))
        assert meta["step"] == 2 and data_state == {"row": 2}
        same(got, jax.tree.map(lambda x: x + 2, params()))
        assert "4" in capsys.readouterr().err
        steps.save(4, got, opt_of(got), {}, META)  # the damaged one is not in its way
    assert checkpoint.read_meta(copy)["step"] == 4


@pytest.mark.parametrize("part", ["params", "meta/metadata", "data/metadata"])
def test_a_step_with_a_part_missing_falls_back(copy, part):
    gone = copy / "steps" / "4" / part
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    with checkpoint.Steps(copy, keep=3) as steps:
        assert steps.restore(None, params(), opt_of(params()))[3]["step"] == 2


def test_a_step_killed_while_it_was_written_is_not_a_step(copy):
    whole = copy / "steps" / "4"
    shutil.copytree(whole, copy / "steps" / "6.orbax-checkpoint-tmp")
    assert checkpoint.read_meta(copy)["step"] == 4
    with checkpoint.Steps(copy, keep=3) as steps:
        assert steps.latest() == 4
        steps.save(6, params(), opt_of(params()), {}, META)
    assert checkpoint.read_meta(copy)["step"] == 6


def test_no_whole_step_is_an_error_and_never_a_silent_beginning(copy):
    for step in ("2", "4"):
        flip(copy / "steps" / step / "params")
    with checkpoint.Steps(copy, keep=3) as steps, pytest.raises(CheckpointError, match="no whole step"):
        steps.restore(None, params(), opt_of(params()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p["draft"]["fc"].update(kernel=p["draft"]["fc"]["kernel"].astype(jnp.bfloat16)),
         r"'draft/fc/kernel' holds float32 \[64, 40\], bfloat16 \[64, 40\] wanted"),
        (lambda p: p["draft"]["fc"].update(kernel=p["draft"]["fc"]["kernel"].T),
         r"'draft/fc/kernel' holds float32 \[64, 40\], float32 \[40, 64\] wanted"),
        (lambda p: p["draft"].pop("fc"), r"'draft/fc/kernel' holds float32 \[64, 40\], nothing wanted"),
        (lambda p: p["draft"].update(norm=jnp.ones(2)), r"'draft/norm' holds nothing, float32 \[2\] wanted"),
    ],
)  # fmt: skip
def test_another_dtype_shape_or_tree_is_an_error_and_no_reason_to_fall_back(run, change, message):
    wanted = params()
    change(wanted)
    with checkpoint.Steps(run, keep=3) as steps, pytest.raises(CheckpointError, match=message):
        steps.restore(None, wanted, opt_of(params()))
    assert not (run / "damaged").exists()


def test_a_loaded_draft_is_complete_and_says_what_it_is(run):
    draft = checkpoint.load_draft(run)
    assert draft.shape == SHAPE and hash(draft.shape) == hash(SHAPE)
    assert sorted(draft.params) == ["fc", "lm_head", "norm"]
    np.testing.assert_array_equal(
        draft.params["fc"]["kernel"], np.asarray(params()["draft"]["fc"]["kernel"]) + 4
    )
    assert draft.embedding.dtype == jnp.bfloat16 and draft.d2t.dtype == np.int64
    assert draft.step == 4 and checkpoint.load_draft(run / "steps" / "2").step == 2
    assert (
        checkpoint.load_draft(run, 0).params["fc"]["kernel"].tobytes()
        == np.asarray(params()["draft"]["fc"]["kernel"]).tobytes()
    )


def test_a_trained_embedding_is_the_one_loaded(tmp_path):
    there = {"d2t": frozen()["d2t"]}
    tree = params() | {"embedding": {"embedding": jnp.ones((6, 4))}}
    checkpoint.start(tmp_path, there, tree, META)
    with checkpoint.Steps(tmp_path, keep=1) as steps:
        now = jax.tree.map(lambda x: x + 1, tree)
        steps.save(1, now, {"count": jnp.zeros(1)}, {}, META)
    np.testing.assert_array_equal(checkpoint.load_draft(tmp_path).embedding, 2)


def test_starting_twice_keeps_the_first_and_another_config_is_refused(copy):
    other = json.loads(json.dumps(META))
    other["config"]["mesh"]["data"] = 8
    assert checkpoint.start(copy, frozen(), jax.tree.map(lambda x: x * 0, params()), other) is False
    same(checkpoint.read_start(copy)[1], jax.tree.map(np.asarray, params()))
    other["config"]["train"]["steps"] = 11
    with pytest.raises(CheckpointError, match=r"train\.steps=10, now 11"):
        checkpoint.start(copy, frozen(), params(), other)
    del other["config"]["train"]["steps"]
    with pytest.raises(CheckpointError, match=r"train\.steps=10, now None"):
        checkpoint.holds(copy, other["config"])


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"not empty \('thesis.txt'\) and not a run"):
        checkpoint.start(tmp_path, frozen(), params(), META)
    with pytest.raises(CheckpointError, match="a file"):
        checkpoint.holds(tmp_path / "thesis.txt", CONFIG)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_start_killed_half_way_is_written_again(copy, capsys):
    half = copy.parent / "half"
    half.mkdir()
    shutil.move(copy / "start", half / "start.orbax-checkpoint-tmp")
    assert checkpoint.start(half, frozen(), params(), META) is True
    assert os.listdir(half) == ["start"]
    shutil.rmtree(half / "start" / "params")
    assert checkpoint.start(half, frozen(), params(), META) is True
    assert "begins again" in capsys.readouterr().err


def test_a_relative_path_will_do(copy, monkeypatch):
    monkeypatch.chdir(copy.parent)
    assert checkpoint.holds(copy.name, CONFIG)
    assert checkpoint.load_draft(copy.name).step == 4


def test_a_damaged_start_of_a_run_with_steps_is_an_error(copy):
    shutil.rmtree(copy / "start" / "frozen")
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.holds(copy, CONFIG)
    assert (copy / "steps" / "4").is_dir()


def test_a_flipped_bit_in_the_start_is_noticed(copy):
    flip(copy / "start" / "frozen")
    with pytest.raises(CheckpointError, match="start/frozen: damaged"):
        checkpoint.load_draft(copy)


def test_what_is_not_there_is_said_in_one_line(run, copy, tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        checkpoint.load_draft(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no start/ in it"):
        checkpoint.load_draft(tmp_path)
    with pytest.raises(CheckpointError, match="no step 7; steps there: 0, 2, 4"):
        checkpoint.load_draft(run, 7)
    with pytest.raises(CheckpointError, match="no step 9; steps there: 0, 2, 4"):
        checkpoint.load_draft(run / "steps" / "9")
    file = copy / "steps" / "4" / "meta" / "metadata"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"schema": 2}))
    with pytest.raises(CheckpointError, match="schema 2; this version reads schema 1"):
        checkpoint.load_draft(copy)
