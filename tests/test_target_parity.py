"""The target against transformers in float32: every hidden state, the logits, and decoding with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from eagle3_jax import axes, defaults
from eagle3_jax.errors import ConfigError, WeightError
from eagle3_jax.target import shape, weights
from eagle3_jax.target.model import Target

# Largest difference allowed, relative to the root mean square of that token's state: some channels of real
# models are a thousand times larger than the others.
TOLERANCE = 1e-4
ROWS, LENGTH = 2, 64

COMMON = dict(
    hidden_size=64, intermediate_size=96, num_hidden_layers=8, vocab_size=160, initializer_range=0.2
)
MODELS = {
    "llama3-rope-gqa-untied": transformers.LlamaConfig(
        **COMMON, num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        },
    ),
    "smollm-odd-heads-tied": transformers.LlamaConfig(
        **COMMON | {"hidden_size": 72}, num_attention_heads=9, num_key_value_heads=3, tie_word_embeddings=True,
        max_position_embeddings=256, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e5},
    ),
    "llama2-linear-rope": transformers.LlamaConfig(
        **COMMON, num_attention_heads=4, max_position_embeddings=256, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "qwen3-qk-norm-wide-heads": transformers.Qwen3Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=256,
        rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=False,
    ),
    "qwen2-biases-tied": transformers.Qwen2Config(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, tie_word_embeddings=True, sliding_window=8,
    ),
    "mistral-whole-window": transformers.MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=24, max_position_embeddings=256,
        rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 1e4}, sliding_window=LENGTH,
    ),
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def directory(request, tmp_path_factory):
    """A random model, saved by transformers; norms that are not all one, biases that are not zero."""
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[request.param])
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(weight)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return path


def _ours(directory):
    target = Target(shape.read(directory))
    return target, weights.load(directory, target, axes.make_mesh())


def _theirs(model, ids):
    """Every layer's output [L, B, T, D] before the final norm, the normed last state, the logits."""
    states = []
    hooks = [
        layer.register_forward_hook(
            lambda _, __, out: states.append(out[0] if isinstance(out, tuple) else out)
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        out = model(torch.tensor(ids), output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    # transformers' last hidden state is post-norm, all others are what the layers put out.
    assert all(torch.equal(a, b) for a, b in zip(states[:-1], out.hidden_states[1:-1], strict=True))
    return torch.stack(states).numpy(), out.hidden_states[-1].numpy(), out.logits.numpy()


@pytest.fixture(scope="module")
def pair(directory):
    """(transformers' model, our target, our weights) of one random model that went through a directory."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    return model, *_ours(directory)


def _features(target, params, ids, position=None, segment=None):
    """Final and aux states as transformers has them, every layer's output; one compilation for all tests."""
    plain = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    position, segment = (
        plain if position is None else position,
        np.ones_like(ids) if segment is None else segment,
    )
    run = jax.jit(target.features, static_argnames="every_state")
    return run(params, jnp.asarray(ids), jnp.asarray(position), jnp.asarray(segment), every_state=True)


def _error(got, want) -> np.ndarray:
    """Largest difference of each token's state, relative to that state's root mean square."""
    want = np.asarray(want, np.float64)
    return np.abs(np.asarray(got) - want).max(-1) / np.sqrt(np.mean(np.square(want), axis=-1))


def _assert_near(got, want, what):
    assert (worst := _error(got, want).max()) <= TOLERANCE, f"{what}: {worst:.2e} of the token's rms"


def _ids(target, batch, length):
    return np.random.default_rng(0).integers(0, target.shape.vocab_size, (batch, length))


def test_every_state_and_the_logits_equal_transformers(pair):
    model, target, params = pair
    ids = _ids(target, ROWS, LENGTH)
    aux, final, states = _features(target, params, ids)
    their_states, their_final, their_logits = _theirs(model, ids)
    for layer, (got, want) in enumerate(zip(states, their_states, strict=True)):
        _assert_near(got, want, f"layer {layer}")
    _assert_near(aux, np.concatenate([their_states[i] for i in target.aux_layers], -1), "aux")
    _assert_near(final, their_final, "final")
    _assert_near(target.logits(params, final), their_logits, "logits")
    top, lse = target.top_and_lse(params, final)
    np.testing.assert_array_equal(top, their_logits.argmax(-1))
    np.testing.assert_allclose(lse, torch.logsumexp(torch.tensor(their_logits), -1), rtol=1e-5, atol=1e-4)


def test_decoding_with_a_cache_equals_the_forward_pass(pair):
    """Prompts of unequal length, padded on the right with other tokens; a rejected draft; two right ones."""
    _, target, params = pair
    ids, lengths = _ids(target, ROWS, LENGTH), np.array([9, 4])
    aux, final, _ = _features(target, params, ids)
    decode, cache = jax.jit(target.decode), target.new_cache(ROWS, LENGTH)
    prompt = np.where(np.arange(9)[None] < lengths[:, None], ids[:, :9], 3)
    got_aux, got_final, cache = decode(params, cache, jnp.asarray(prompt), jnp.zeros(ROWS, jnp.int32))
    for row, n in enumerate(lengths):
        _assert_near(got_final[row, :n], final[row, :n], "prompt")
        _assert_near(got_aux[row, :n], aux[row, :n], "prompt aux")

    def following(at):
        return np.stack([ids[row, n : n + 3] for row, n in enumerate(at)])

    wrong = (following(lengths) + 1) % target.shape.vocab_size
    _, _, cache = decode(params, cache, jnp.asarray(wrong), jnp.asarray(lengths))
    for at in (lengths, lengths + 3):
        got_aux, got_final, cache = decode(params, cache, jnp.asarray(following(at)), jnp.asarray(at))
        for row, n in enumerate(at):
            _assert_near(got_final[row], final[row, n : n + 3], f"row {row} at {n}")
            _assert_near(got_aux[row], aux[row, n : n + 3], f"aux of row {row} at {n}")


def test_packed_segments_are_computed_as_if_alone(pair):
    _, target, params = pair
    ids, cut = _ids(target, ROWS, LENGTH), 40
    _, alone, _ = _features(target, params, ids)
    # Row 0: the start of row 0, then the start of row 1; row 1 the other way round.
    mixed = np.concatenate([ids[:, :cut], ids[::-1, : LENGTH - cut]], axis=1)
    position = np.broadcast_to(np.r_[:cut, : LENGTH - cut], mixed.shape)
    segment = np.broadcast_to(np.r_[np.full(cut, 1), np.full(LENGTH - cut, 2)], mixed.shape)
    _, packed, _ = _features(target, params, mixed, position, segment)
    _assert_near(packed[:, :cut], alone[:, :cut], "first segment")
    _assert_near(packed[:, cut:], alone[::-1, : LENGTH - cut], "second segment")


def test_sharded_weights_give_the_same_states(pair, directory):
    _, target, params = pair
    sharded = weights.load(directory, target, axes.make_mesh(2, 4))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), sharded, params)
    if target.shape.model_type in ("qwen2", "qwen3"):  # the others' programs are parts of theirs
        ids = _ids(target, ROWS, LENGTH)
        _assert_near(_features(target, sharded, ids)[1], _features(target, params, ids)[1], "final")


def test_a_text_may_be_as_long_as_the_window_and_no_longer():
    config = transformers.MistralConfig(
        **COMMON, num_attention_heads=4, num_key_value_heads=2, sliding_window=LENGTH
    )
    longest, kind = shape.from_hf(config.to_dict(), "here").longest
    assert (longest, kind) == (LENGTH, "tokens of sliding window")
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = np.random.default_rng(0).integers(0, 160, (1, longest + 1))
    _, masked, _ = _theirs(model, ids)
    model.config.sliding_window = None
    _, whole, _ = _theirs(model, ids)
    _assert_near(masked[:, :longest], whole[:, :longest], "within")
    assert _error(masked[:, longest:], whole[:, longest:]).min() > TOLERANCE


def test_a_target_without_its_head_is_refused_unless_tied(tmp_path):
    for tied in (False, True):
        config = transformers.LlamaConfig(**COMMON, num_attention_heads=4, tie_word_embeddings=tied)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(tied))
        file = tmp_path / str(tied) / "model.safetensors"
        save_file({k: v for k, v in load_file(file).items() if k != "lm_head.weight"}, file)
    _ours(tmp_path / "True")
    with pytest.raises(WeightError, match=r"lm_head.weight: missing, wanted \(160, 64\)"):
        _ours(tmp_path / "False")


def test_weights_of_another_shape_or_name_are_all_named(tmp_path):
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_attention_heads=4)).save_pretrained(
        tmp_path
    )
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] = np.zeros((3, 64), np.float32)
    tensors["model.layers.2.self_attn.q_proj.bias"] = tensors.pop("model.layers.2.mlp.up_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightError) as caught:
        _ours(tmp_path)
    for name in ("1.self_attn.q_proj.weight: shape (3, 64), wanted (64, 64)", "2.self_attn.q_proj.bias: not a tensor",
                 "2.mlp.up_proj.weight: missing"):  # fmt: skip
        assert name in str(caught.value)


def test_a_target_of_another_family_is_refused():
    other = shape.TargetShape(
        model_type="kimi_k2", hidden_size=8, intermediate_size=8, num_hidden_layers=8, num_attention_heads=1,
        num_key_value_heads=1, head_dim=8, vocab_size=8, max_position_embeddings=8,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"'kimi_k2' cannot be run here .*train.mode=offline"):
        Target(other)


def test_the_built_in_target_equals_transformers():
    """Against float64: where channels a thousand times the others arise, float32 alone costs more than 1e-4.

    transformers' own float32 is up to 3e-4 off there, on one token in two hundred.
    """
    directory = defaults.cache() / "smollm2-135m-instruct"
    if not (directory / "config.json").is_file():
        pytest.skip(f"the built-in target is not in the cache ({directory}); `make demo` fetches it")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="eager", dtype=torch.float64
    ).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    chat = [
        {"role": "user", "content": "Name 3 rivers of Europe, and the towns on them."},
        {"role": "assistant", "content": "1. The Rhine: Basel, Cologne.\n\n2. The Danube: Vienna, Budapest."},
    ]
    ids = np.array([tokenizer.apply_chat_template(chat, return_dict=True)["input_ids"]])
    target, params = _ours(directory)
    _, final, states = _features(target, params, ids)
    their_states, their_final, their_logits = _theirs(model, ids)
    per_token = _error(states, their_states)[:, 0].max(0)
    assert np.mean(per_token <= TOLERANCE) > 0.95 and per_token.max() < 1e-3
    _assert_near(final, their_final, "final")
    _assert_near(target.logits(params, final), their_logits, "logits")
    np.testing.assert_array_equal(target.top_and_lse(params, final)[0], their_logits.argmax(-1))
