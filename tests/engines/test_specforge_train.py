"""The options that stand for SpecForge's recipe train as SpecForge does."""

import json

import bridge_fixture as fixture
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import trainer_fixture

from bridge import convert, weight_map
from eagle3_jax.config import FREEZE, Train
from eagle3_jax.draft import model
from eagle3_jax.train import optim, setup
from eagle3_jax.train.step import Step

STEPS, B, T, K = 20, 2, 48, 4
TOTAL = 1000  # of the schedule: over a short one its cosine is a little above ours, 2 / (1 + cos(pi / steps))
RECIPE = dict(
    mask="eagle", normalise="tokens", oov_rows="drop", loss="ce", decay=0.8, clip=0.5, beta2=0.999,
    weight_decay=0.0, final_learning_rate=0.0,
)  # fmt: skip


def inputs(draft) -> dict[str, np.ndarray]:
    """Random features of a target that is fairly sure of its next token; a row has two answers, its end is in none.

    Two batches, over and over: the draft can learn them.
    """
    rng, s = np.random.default_rng(0), draft.shape
    head = rng.standard_normal((s.vocab_size, s.hidden_size)).astype(np.float32)
    ids = rng.integers(0, s.vocab_size, (2, B, T)).astype(np.int32)
    final = head[np.roll(ids, -1, axis=2)] * 0.6 + rng.standard_normal((2, B, T, s.hidden_size)) * 0.3
    aux = np.tile(final, 3) + rng.standard_normal((2, B, T, s.sizes["m"])) * 0.3
    loss_mask = np.zeros((2, B, T), np.int32)
    loss_mask[..., 7:19], loss_mask[..., 25 : T - 1] = 1, 1
    batches = dict(ids=ids, loss_mask=loss_mask, aux=aux.astype(np.float32), final=final.astype(np.float32))
    return {name: np.concatenate([x] * (STEPS // 2)) for name, x in batches.items()} | {"head": head}


def ours(draft, given, learning_rate: float, warmup: int):
    """(loss [steps], losses [steps, K], draft at the end) of our training step."""
    train = Train(
        run="unused", steps=TOTAL, batch=B, row_length=T, unroll=K, learning_rate=learning_rate, warmup=warmup,
        save_every=TOTAL, **RECIPE,
    )  # fmt: skip
    tree = {
        "draft": jax.tree.map(jnp.asarray, draft.params),
        "embedding": {"embedding": jnp.asarray(draft.embedding)},
        "target": {"head": {"kernel": given["head"][draft.d2t + np.arange(len(draft.d2t))]}},
    }
    labels = optim.labels(tree, FREEZE)
    trained, frozen = optim.split(tree, labels)
    tx = optim.make(train, labels)
    opt, graph = optim.init(tx, trained, frozen), model.abstract(draft.shape)[0]
    step = Step(train, graph, tx, setup.device_vocabulary(draft.d2t, draft.shape.vocab_size))
    run, found = jax.jit(step), []
    for i in range(STEPS):
        logits = given["final"][i] @ given["head"].T
        batch = dict(
            ids=given["ids"][i], segment=np.ones((B, T), np.int32), span=given["loss_mask"][i],
            position=np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)), aux=given["aux"][i],
            final=given["final"][i],
            top=logits.argmax(-1).astype(np.int32), lse=jax.nn.logsumexp(logits, axis=-1),
        )  # fmt: skip
        trained, opt, log = run(trained, opt, frozen, batch)
        found.append((float(log["loss"]), np.asarray(log["losses"])))
    return np.array([x for x, _ in found]), np.stack([x for _, x in found]), jax.device_get(trained["draft"])


@pytest.mark.parametrize("warmup", [0, 5])
def test_twenty_steps_give_the_loss_curve_of_specforge(vllm, tmp_path, record, warmup):
    trainer_fixture.save_target(tmp_path / "target")
    draft = fixture.draft("plain", "float32", str(tmp_path / "target"), num_aux_hidden_states=3)
    draft.meta["aux_layers"] = [1, 2, 3]
    convert.write(draft, "run", tmp_path / "draft")
    given = inputs(draft)
    request, arrays, answers = vllm.paths("json", "npz", "answers.npz")
    asked = dict(
        directory=str(tmp_path / "draft"), unroll=K, decay=0.8, learning_rate=3e-3, warmup=warmup, steps=STEPS,
        total=TOTAL,
    )  # fmt: skip
    request.write_text(json.dumps(asked))
    np.savez(arrays, **given)
    vllm.run("run_specforge_train.py", request, arrays, answers, timeout=300)
    theirs = np.load(answers)
    loss, losses, params = ours(draft, given, 3e-3, warmup)
    assert theirs["loss"][-2] < 0.8 * theirs["loss"][0]  # it learns, and the curve is not a line
    np.testing.assert_allclose(losses, theirs["losses"], rtol=1e-3)
    np.testing.assert_allclose(loss, theirs["loss"], rtol=1e-3)
    for name, x in weight_map.export(params, draft.shape).items():
        moved = np.abs(x - weight_map.export(draft.params, draft.shape)[name]).max()
        assert np.abs(x - theirs[f"weight/{name}"]).max() < 0.05 * moved, name
    record(
        f"20 training steps, warm-up {warmup}", loads=True, logits=float(np.abs(loss - theirs["loss"]).max())
    )
