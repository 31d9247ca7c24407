"""Reference values of EAGLE's and SpecForge's training step (tests/golden/README.md says how they were made)."""

import functools
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eagle3_jax.draft import loss, model, unroll
from eagle3_jax.draft.shape import DraftShape

FOLDERS = [Path(__file__).parent / "golden"] + ([Path(p)] if (p := os.environ.get("EAGLE3_GOLDEN")) else [])
CASES = [(folder, case) for folder in FOLDERS for case in json.loads((folder / "summary.json").read_text())]

# ours -> theirs ([out, in]); heads are merged outermost there
NAMES = {
    "fc/kernel": "fc.weight",
    "midlayer/q/kernel": "midlayer.self_attn.q_proj.weight",
    "midlayer/k/kernel": "midlayer.self_attn.k_proj.weight",
    "midlayer/v/kernel": "midlayer.self_attn.v_proj.weight",
    "midlayer/o/kernel": "midlayer.self_attn.o_proj.weight",
    "midlayer/gate/kernel": "midlayer.mlp.gate_proj.weight",
    "midlayer/up/kernel": "midlayer.mlp.up_proj.weight",
    "midlayer/down/kernel": "midlayer.mlp.down_proj.weight",
    "midlayer/input_layernorm/scale": "midlayer.input_layernorm.weight",
    "midlayer/hidden_norm/scale": "midlayer.hidden_norm.weight",
    "midlayer/post_attention_layernorm/scale": "midlayer.post_attention_layernorm.weight",
    "norm/scale": "norm.weight",
    "lm_head/kernel": "lm_head.weight",
} | {f"fc_norm_{i}/scale": f"fc_norm.{i}.weight" for i in range(3)}


def name(path) -> str:
    return NAMES[jax.tree_util.keystr(path, simple=True, separator="/")]


@functools.cache
def run(folder: Path, case_name: str):
    case = next(c for f, c in CASES if f == folder and c["name"] == case_name)
    cfg, data = case["config"], dict(np.load(folder / f"{case_name}.npz"))
    shape = DraftShape(
        hidden_size=cfg["hidden"], num_aux_hidden_states=3, intermediate_size=cfg["intermediate"],
        num_attention_heads=cfg["heads"], num_key_value_heads=cfg["kv"], head_dim=cfg["head_dim"],
        vocab_size=cfg["vocab"], draft_vocab_size=cfg["draft_vocab"], max_position_embeddings=64,
        rms_norm_eps=cfg["eps"], rope_theta=cfg["rope_theta"], fc_norm=cfg["fc_norm"],
        rope_scaling=tuple(sorted(cfg["rope"].items())) if cfg["rope"] else None,
    )  # fmt: skip
    graph, abstract, _ = model.abstract(shape)
    params = jax.tree.map_with_path(lambda p, x: data[f"w/{name(p)}"].T.reshape(x.shape), abstract)
    B, T = data["input_ids"].shape
    final, head = jnp.asarray(data["last"]), jnp.asarray(data["lm_head"])
    full_BTV = final @ head.T
    batch = unroll.Batch(
        ids=jnp.asarray(data["input_ids"], jnp.int32), segment=jnp.asarray(data["attention_mask"], jnp.int32),
        position=jnp.broadcast_to(jnp.arange(T), (B, T)), span=jnp.asarray(data["loss_mask"], jnp.int32).reshape(B, T),
        aux=jnp.asarray(data["aux"]), final=final, top=jnp.argmax(full_BTV, -1), lse=jax.nn.logsumexp(full_BTV, -1),
    )  # fmt: skip
    t2d = data["t2d"].astype(bool)
    vocabulary = unroll.Vocabulary(jnp.asarray(data["d2t"], jnp.int32), jnp.asarray(t2d))
    embedding = data.get("w/embed_tokens.weight", data.get("embed"))
    settings = dict(depth=cfg["ttt"], mask="eagle", oov_rows="drop")

    def total(params):
        draft = model.bind(graph, params)
        sums, outputs = unroll.unroll(draft, jnp.asarray(embedding), head[t2d], vocabulary, batch, **settings)
        kind = {None: "ce", "alpha": "lk_alpha", "lambda": "lk_lambda"}[cfg["lk"]]
        value, losses = loss.objective(sums, kind=kind, normalise="tokens", decay=0.8)
        return value, (losses, sums, outputs)

    (value, (losses, sums, outputs)), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    return case, data, batch, value, losses, sums, outputs, grads


golden = pytest.mark.parametrize(
    "folder, case", [(f, c["name"]) for f, c in CASES], ids=[c["name"] for _, c in CASES]
)


@golden
def test_golden_losses_and_counts(folder, case):
    case, _, _, value, losses, sums, _, _ = run(folder, case)
    np.testing.assert_allclose(losses, case["plosses"], rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, case["loss"], rtol=0, atol=1e-5)
    np.testing.assert_array_equal(sums.correct, case["corrects"])
    np.testing.assert_array_equal(sums.supervised, case["denoms"])
    np.testing.assert_allclose(loss.metrics(sums)["rate"], case["acceptance"], rtol=0, atol=1e-5)


@golden
def test_golden_states_and_logits_on_supervised_rows(folder, case):
    _, data, batch, _, _, _, outputs, _ = run(folder, case)
    for k, (state, logits) in enumerate(outputs):
        rows = np.asarray(unroll.supervised(batch, k, "eagle"))
        assert rows.any()
        np.testing.assert_allclose(state[rows], data[f"out/hidden_{k}"][rows], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(logits[rows], data[f"out/logits_{k}"][rows], rtol=1e-4, atol=1e-5)


@golden
def test_golden_gradients_of_every_tensor(folder, case):
    case, data, _, _, _, _, _, grads = run(folder, case)
    seen = set()
    for path, grad in jax.tree.leaves_with_path(grads):
        want = data[f"grad/{name(path)}"]
        got = np.asarray(grad).reshape(-1, want.shape[0]).T if want.ndim == 2 else np.asarray(grad)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
        np.testing.assert_allclose(np.linalg.norm(grad), case["grad_norms"][name(path)], rtol=1e-4)
        seen.add(name(path))
    assert seen == set(case["grad_norms"])
