"""`inspect` on runs of a few optax steps: sound ones pass, faults in what training was given are each named."""

import dataclasses
import io
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from rich.console import Console

from eagle3_jax import tensors
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import CheckpointError
from eagle3_jax.train import checkpoint, manifest
from eagle3_jax.train.inspect import NO_TARGET, inspect

SHAPE = DraftShape(
    hidden_size=8, num_aux_hidden_states=3, intermediate_size=16, num_attention_heads=2, num_key_value_heads=1,
    head_dim=4, vocab_size=24, draft_vocab_size=10, max_position_embeddings=64, rms_norm_eps=1e-6, rope_theta=1e4,
)  # fmt: skip
D2T = np.arange(10, dtype=np.int64)  # draft token i is target token 2 i
SEED, FREEZE = 3, ("embedding/.*",)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("target"), np.random.default_rng(0)
    weights = {
        "model.embed_tokens.weight": (24, 8), "lm_head.weight": (24, 8), "model.norm.weight": (8,),
        "model.layers.0.mlp.gate_proj.weight": (16, 8),
    }  # fmt: skip
    tensors.save(
        path / tensors.FILE,
        {name: rng.normal(size=size).astype(ml_dtypes.bfloat16) for name, size in weights.items()},
    )
    return path


def rows(target, name):
    return jnp.asarray(tensors.read(target)[name])


def begin(target):
    """Draft from the seed, embedding from the target, and what a trainer would say of them."""
    tree = {
        "draft": model.init(SHAPE, SEED)[1],
        "embedding": {"embedding": rows(target, "model.embed_tokens.weight")},
    }
    origins = dict.fromkeys(manifest.flat(tree), f"{manifest.RANDOM}{SEED}")
    origins["embedding/embedding"] = manifest.COPIED + "model.embed_tokens.weight"
    return tree, origins


def unflat(flat, tree):
    return jax.tree.unflatten(jax.tree.structure(tree), flat.values())


def labels_of(tree, freeze):
    return unflat({name: manifest.expected_label(name, freeze) for name in manifest.flat(tree)}, tree)


def only(tree, labels, label):
    """The subtree of one label, without empty branches."""
    if not isinstance(tree, dict):
        return tree if labels == label else None
    out = {k: only(v, labels[k], label) for k, v in tree.items()}
    return {k: v for k, v in out.items() if v is not None} or None


def train(
    run, target, tree, origins, *, freeze=FREEZE, labels=None, decay=0.0, decay_all=0.0, dead=(), noise=0
):
    """Three steps on random gradients; `dead` leaves get none, `decay_all` sits outside the partition."""
    labels = labels or labels_of(tree, freeze)
    meta = {
        "config": {"train": {"freeze": list(freeze), "run": str(run)}}, "shape": dataclasses.asdict(SHAPE),
        "target": {"path": str(target), "shape": {}, "weights_digest": ""}, "aux_layers": [0, 1, 2],
    }  # fmt: skip
    facts = {"vocabulary_map": manifest.digest(D2T), "versions": manifest.versions()}
    begun = manifest.build(tree, labels, origins, facts)
    start = only(tree, labels, "train")
    checkpoint.start(
        run, (only(tree, labels, "frozen") or {}) | {"d2t": D2T}, start, meta | {"manifest": begun}
    )
    start = jax.tree.map(np.array, start)
    tx = optax.partition(
        {"train": optax.adamw(0.01, weight_decay=decay), "frozen": optax.set_to_zero()}, labels
    )
    if decay_all:
        tx = optax.chain(tx, optax.add_decayed_weights(-decay_all))
    state = tx.init(tree)
    rng = np.random.default_rng(noise)
    for _ in range(3):
        grads = {
            path: np.zeros(x.shape) if path in dead else rng.normal(size=x.shape)
            for path, x in manifest.flat(tree).items()
        }
        grads = jax.tree.map(lambda g, x: jnp.asarray(g, x.dtype), unflat(grads, tree), tree)
        updates, state = tx.update(grads, state, tree)
        moved = optax.apply_updates(tree, updates)
        tree = jax.tree.map(
            lambda m, x, label: m if label == "train" or decay_all else x, moved, tree, labels
        )
    with checkpoint.Steps(run, keep=1) as steps:
        now = manifest.build(tree, labels, origins, facts, start, begun)
        steps.save(3, only(tree, labels, "train"), state, {}, meta | {"manifest": now})
    return tree


def test_a_sound_run_has_no_findings_and_every_origin_is_verified(tmp_path, target):
    train(tmp_path / "r", target, *begin(target), decay=0.1)
    report = inspect(tmp_path / "r")
    assert report.findings == [] and report.code == 0 and report.step == 3
    assert report.began == "from scratch, random from seed 3"
    assert report.embedding == {"label": "frozen", "equals_step_0": True, "equals_target": True}
    assert {leaf.origin_check for leaf in report.leaves.values()} == {"verified"}
    told = checkpoint.read_meta(tmp_path / "r")["manifest"]["leaves"]
    for path, leaf in report.leaves.items():
        if leaf.label == "train":
            assert leaf.moved == pytest.approx(told[path]["moved"], rel=1e-5) and leaf.moved > 0
    assert inspect(tmp_path / "r", 0).findings == []


def test_the_report_is_json_and_a_table(tmp_path, target):
    train(tmp_path / "r", target, *begin(target))
    report = inspect(tmp_path / "r")
    assert json.loads(json.dumps(report.to_dict()))["leaves"]["draft/fc/kernel"]["label"] == "train"
    out = io.StringIO()
    report.render(Console(file=out, width=200))
    assert "draft/midlayer/q/kernel" in out.getvalue() and "began: from scratch" in out.getvalue()
    assert "same bits" in out.getvalue()


def test_without_the_target_it_says_so_and_finds_nothing(tmp_path, target):
    train(tmp_path / "r", tmp_path / "gone", *begin(target))
    report = inspect(tmp_path / "r")
    assert report.findings == []
    assert report.embedding["equals_target"] == NO_TARGET == "not verified: target not found"
    assert report.leaves["embedding/embedding"].origin_check == NO_TARGET


def test_decay_outside_the_trained_branch_moves_the_frozen_embedding(tmp_path, target):
    train(tmp_path / "r", target, *begin(target), decay_all=0.1)
    report = inspect(tmp_path / "r")
    assert "embedding/embedding is frozen but its bits changed since step 0" in report.findings
    assert report.embedding["equals_target"] is False and report.code == 1


def test_a_trained_embedding_is_a_finding_even_where_the_config_says_so(tmp_path, target):
    train(tmp_path / "r", target, *begin(target), freeze=())
    (finding,) = inspect(tmp_path / "r").findings
    assert finding.startswith("embedding/embedding is trained; it should be frozen")


def test_labels_that_are_not_the_configs_are_found(tmp_path, target):
    tree, origins = begin(target)
    labels = labels_of(tree, (*FREEZE, "draft/norm/scale"))
    train(tmp_path / "r", target, tree, origins, labels=labels)
    report = inspect(tmp_path / "r")
    assert len(report.findings) == 1 and "draft/norm/scale is labelled frozen" in report.findings[0]
    assert report.leaves["draft/norm/scale"].unchanged
    train(tmp_path / "s", target, tree, origins, labels=labels, freeze=(*FREEZE, "draft/norm/scale"))
    assert inspect(tmp_path / "s").findings == []


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_leaf_that_no_gradient_reaches_is_found_with_and_without_decay(tmp_path, target, decay):
    train(tmp_path / "r", target, *begin(target), dead=("draft/midlayer/v/kernel",), decay=decay)
    (finding,) = inspect(tmp_path / "r").findings
    assert finding.startswith("draft/midlayer/v/kernel ") and "no gradient reaches it" in finding


@pytest.mark.parametrize(
    ("leaf", "name"),
    [
        ("lm_head/kernel", "lm_head.weight"),
        ("midlayer/gate/kernel", "model.layers.0.mlp.gate_proj.weight"),
        ("norm/scale", "model.norm.weight"),
    ],
)
def test_a_copied_tensor_that_is_declared_random_is_named(tmp_path, target, leaf, name):
    tree, origins = begin(target)
    there = rows(target, name).astype(jnp.float32)
    *parents, last = leaf.split("/")
    node = tree["draft"]
    for part in parents:
        node = node[part]
    node[last] = there[::2][:10].T if leaf == "lm_head/kernel" else there.T
    train(tmp_path / "r", target, tree, origins)
    (finding,) = inspect(tmp_path / "r").findings
    assert finding == f"draft/{leaf} is declared random, but at step 0 it is a copy of target tensor {name}"


def test_a_leaf_that_another_seed_drew_is_found(tmp_path, target):
    tree, origins = begin(target)
    tree["draft"]["fc"] = model.init(SHAPE, SEED + 1)[1]["fc"]
    train(tmp_path / "r", target, tree, origins)
    (finding,) = inspect(tmp_path / "r").findings
    assert finding == "draft/fc/kernel is declared random from seed 3, which draws other numbers"


def test_a_declared_copy_is_compared_with_the_target(tmp_path, target):
    tree, origins = begin(target)
    origins["draft/lm_head/kernel"] = manifest.COPIED + "lm_head.weight"
    train(tmp_path / "wrong", target, tree, origins)
    (finding,) = inspect(tmp_path / "wrong").findings
    assert (
        finding
        == "draft/lm_head/kernel is declared a copy of target tensor lm_head.weight, but at step 0 it is not"
    )
    tree["draft"]["lm_head"]["kernel"] = rows(target, "lm_head.weight").astype(jnp.float32)[::2][:10].T
    train(tmp_path / "right", target, tree, origins)
    report = inspect(tmp_path / "right")
    assert report.findings == []
    assert report.began.endswith("but draft/lm_head/kernel copied from target tensor lm_head.weight")


def test_a_warm_start_is_compared_with_the_run_it_came_from(tmp_path, target):
    tree, origins = begin(target)
    trained = train(tmp_path / "first", target, tree, origins)
    warm = f"{manifest.WARM}{tmp_path / 'first'} step 3"
    origins = {p: warm if p.startswith("draft/") else o for p, o in origins.items()}
    train(tmp_path / "second", target, trained, origins, noise=10)
    report = inspect(tmp_path / "second")
    assert report.findings == [] and report.began == warm
    train(tmp_path / "third", target, tree, origins)
    assert "draft/fc/kernel is declared warm-started" in " ".join(inspect(tmp_path / "third").findings)
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    report = inspect(tmp_path / "second")
    assert report.findings == []
    assert report.leaves["draft/fc/kernel"].origin_check == "not verified: that run not found"


def test_an_embedding_that_is_not_the_targets_is_found(tmp_path, target):
    tree, origins = begin(target)
    tree["embedding"]["embedding"] = tree["embedding"]["embedding"].at[5, 2].multiply(1.01)
    train(tmp_path / "r", target, tree, origins)
    assert (
        "embedding/embedding differs from the target's model.embed_tokens.weight"
        in inspect(tmp_path / "r").findings
    )


def test_no_run_is_an_error_and_no_finding(tmp_path):
    with pytest.raises(CheckpointError, match="no start/ in it"):
        inspect(tmp_path)
