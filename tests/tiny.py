"""A whole tiny project on disk: a random target, conversations, prompts, and a configuration for them."""

import functools
import json
from pathlib import Path

import numpy as np
from toy_tokenizer import CHATML, tokenizer

from eagle3_jax import config as configuration
from eagle3_jax import tensors
from eagle3_jax.config import RunConfig

D, F, LAYERS, HEADS, KV_HEADS, HEAD_DIM, V = 16, 24, 4, 4, 2, 4, 272
WORDS = [
    "the",
    "sea",
    "is",
    "wide",
    "and",
    "old",
    "but",
    "a",
    "boat",
    "can",
    "cross",
    "it",
    "when",
    "wind",
    "turns",
]


# What the config.json of other families says beside Llama's.
FAMILIES = {
    "llama": {},
    "qwen2": {"use_sliding_window": False, "sliding_window": 8},
    "mistral": {"sliding_window": 200},
}


def target(path: Path, seed: int = 0, family: str = "llama") -> Path:
    """An untied target with the toy tokenizer, in Hugging Face's layout."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    layer = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, D), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, D),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, D), "self_attn.o_proj": (D, HEADS * HEAD_DIM),
        "mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F),
        "input_layernorm": (D,), "post_attention_layernorm": (D,),
    }  # fmt: skip
    shapes = {"model.embed_tokens": (V, D), "lm_head": (V, D), "model.norm": (D,)}
    shapes |= {f"model.layers.{i}.{name}": s for i in range(LAYERS) for name, s in layer.items()}
    weights = {
        f"{name}.weight": (rng.normal(size=s) * 0.3 + (len(s) == 1)).astype(np.float32)
        for name, s in shapes.items()
    }
    if family == "qwen2":
        for name in [n for n in weights if n.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
            bias = rng.normal(size=len(weights[name])).astype(np.float32)
            weights[name.replace("weight", "bias")] = bias
    tensors.save(path / tensors.FILE, weights)
    config = dict(
        architectures=[f"{family.title()}ForCausalLM"], model_type=family, hidden_size=D, intermediate_size=F,
        num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        vocab_size=V, max_position_embeddings=256, rms_norm_eps=1e-5, rope_theta=1e4, tie_word_embeddings=False,
        **FAMILIES[family],
    )  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    tokenizer(CHATML).save_pretrained(path)
    return path


def conversations(path: Path, count: int = 24) -> Path:
    """Chats of one or two exchanges and different lengths, in ShareGPT's dialect."""
    rng = np.random.default_rng(7)
    chats = []
    for i in range(count):
        turns = []
        for _ in range(1 + i % 2):
            said = " ".join(rng.choice(WORDS, 2 + i % 3))
            turns.append({"from": "human", "value": f"{said} {i}?"})
            turns.append({"from": "gpt", "value": " ".join(rng.choice(WORDS, 3 + i % 4))})
        chats.append({"id": f"chat{i}x", "conversations": turns})
    path.write_text(json.dumps(chats))
    return path


def project(root: Path, family: str = "llama") -> Path:
    """`root` with target, conversations and evaluation prompts."""
    target(root / "target", family=family)
    conversations(root / "chats.json")
    (root / "prompts.jsonl").write_text(json.dumps({"prompt": "Name a colour that no one has seen."}) + "\n")
    return root


def config(root: Path, *overrides: str) -> RunConfig:
    """Ten steps with a checkpoint every five; the overrides are those of the command line."""
    tree = dict(
        target=dict(path=str(root / "target"), aux_layers=(0, 1, 2)),
        data=dict(path=str(root / "chats.json"), prepared=str(root / "data"), max_length=160, held_out=0.1),
        draft=dict(vocab_size=48),
        store=dict(path=str(root / "store"), dtype="float32"),
        train=dict(
            run=str(root / "run"), steps=10, batch=2, row_length=192, unroll=2, learning_rate=0.01, warmup=2,
            weight_decay=0.1, save_every=5, log_every=1,
        ),
        evaluate=dict(prompts=str(root / "prompts.jsonl")),
    )  # fmt: skip
    return configuration.override(configuration.from_dict(tree), overrides)


@functools.cache
def prepared(root: Path) -> Path:
    """A project with data prepared and features captured."""
    from eagle3_jax import commands

    commands.prepare_data(config(project(root)))
    commands.capture(config(root))
    return root
