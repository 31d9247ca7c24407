"""The aux states that SGLang captures and hands to a draft are those that our target computes."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from eagle3_jax import axes
from eagle3_jax.target import shape, weights
from eagle3_jax.target.model import Target

TOLERANCE = 1e-4  # of the root mean square of a token's state, as in test_target_parity.py; 1e-5 was seen
COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=8, vocab_size=160, initializer_range=0.2,
    max_position_embeddings=256,
)  # fmt: skip
MODELS = {
    "llama": transformers.LlamaConfig(
        **COMMON, num_attention_heads=8, num_key_value_heads=2, rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    ),
    "qwen3": transformers.Qwen3Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    ),
    "qwen2": transformers.Qwen2Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "mistral": transformers.MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=24, rms_norm_eps=1e-5, sliding_window=None,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
}  # fmt: skip
LAYERS = {"default": None, "explicit": (0, 2, 6)}
EXPLICIT = ("llama", "qwen3")  # every case starts an engine
CASES = [(model, layers) for layers in LAYERS for model in (MODELS if LAYERS[layers] is None else EXPLICIT)]
PROMPTS = [[3], [150, 7, 7, 92], np.random.default_rng(4).integers(0, 160, 40).tolist()]


@pytest.fixture(scope="module")
def served(sglang, tmp_path_factory):
    """(model directories, aux states [T, M] per case and prompt)."""
    directories, jobs = {}, []
    for name, config in MODELS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter, weight in model.named_parameters():
            if "norm" in parameter:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
            elif parameter.endswith("bias"):
                torch.nn.init.normal_(weight)
        directories[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(directories[name])
    for name, layers in CASES:
        options = {
            "model_path": str(directories[name]), "speculative_algorithm": "EAGLE3",
            "enable_return_aux_hidden_states": True, "context_length": 128, "max_total_tokens": 1024,
            "max_running_requests": 2,
        } | ({} if LAYERS[layers] is None else {"return_aux_hidden_state_layer_ids": list(LAYERS[layers])})  # fmt: skip
        jobs.append({"options": options, "prompts": PROMPTS, "max_new_tokens": 1, "hidden_states": True})
    found = [[_states(a["meta"]["hidden_states"]) for a in job["answers"]] for job in sglang.engine(*jobs)]
    return directories, dict(zip(CASES, found, strict=True))


def _states(found) -> np.ndarray:
    """[T, M] of the prompt's tokens, whichever way they are nested."""
    rows = found[0] if np.ndim(found[0][0]) else found
    return np.asarray(rows, np.float32)


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_captured_states_equal_the_flax_targets(served, case, record):
    (directories, states), largest = served, 0.0
    name, layers = case
    target = Target(shape.read(directories[name]), LAYERS[layers])
    params = weights.load(directories[name], target, axes.make_mesh())
    for prompt, theirs in zip(PROMPTS, states[case], strict=True):
        ids = jnp.asarray([prompt])
        ours, _ = target.features(params, ids, jnp.arange(len(prompt))[None], jnp.ones_like(ids))
        ours = np.asarray(ours[0])
        assert theirs.shape == ours.shape
        for mine, other in zip(np.split(ours, 3, axis=-1), np.split(theirs, 3, axis=-1), strict=True):
            size = np.sqrt(np.mean(np.square(mine), axis=-1))
            largest = max(largest, float(np.max(np.abs(mine - other).max(-1) / size)))
    assert largest <= TOLERANCE
    record(f"aux states of a tiny {name} target, {layers} layers", states=largest)


@pytest.mark.parametrize("name", EXPLICIT)
def test_the_two_lists_of_layers_give_different_states(served, name):
    _, states = served
    a, b = (states[name, layers][-1] for layers in LAYERS)
    assert np.abs(a - b).max() > 0.1
