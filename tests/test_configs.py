"""Every shipped configuration builds a draft, and each way to get one wrong is refused in one line."""

import json
from pathlib import Path

import jax
import pytest

from eagle3_jax import config
from eagle3_jax.draft import model
from eagle3_jax.draft import shape as draft_shape
from eagle3_jax.errors import ConfigError
from eagle3_jax.target import shape as target_shape
from eagle3_jax.target.model import Target
from eagle3_jax.train import optim

CONFIGS = Path(__file__).parent.parent / "configs"
LLAMA = CONFIGS / "llama31_8b.yaml"
SMOLLM2 = target_shape.TargetShape(
    model_type="llama", hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
    num_key_value_heads=3, head_dim=64, vocab_size=49152, max_position_embeddings=8192, rms_norm_eps=1e-5,
    rope_theta=100_000.0, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "fused", "width", "vocabulary"),
    [
        ("demo", 1728, 576, 2048),
        ("smollm2_135m", 1728, 576, 4096),
        ("llama31_8b", 12288, 4096, 32000),
        ("qwen3_8b", 12288, 4096, 32000),
        ("kimi_k2", 21504, 7168, 32000),
    ],
)
def test_every_shipped_configuration_builds_its_draft(name, fused, width, vocabulary):
    c = config.load(CONFIGS / f"{name}.yaml")
    resolved = draft_shape.resolve(c, c.target.shape or SMOLLM2)
    _, weights, _ = model.abstract(resolved)
    assert weights["fc"]["kernel"].shape == (fused, width)
    assert weights["lm_head"]["kernel"].shape == (width, vocabulary)
    assert weights["midlayer"]["q"]["kernel"].shape[0] == 2 * width

    # The whole training state, nothing of it allocated.
    rows = jax.ShapeDtypeStruct((vocabulary, width), c.target.dtype)
    online = c.train.mode == "online"
    tree = {
        "draft": weights,
        "embedding": {"embedding": jax.ShapeDtypeStruct((resolved.vocab_size, width), c.target.dtype)},
        "target": Target(c.target.shape or SMOLLM2).abstract if online else {"head": {"kernel": rows}},
    }
    labels = optim.labels(tree, c.train.freeze)
    trained, frozen = optim.split(tree, labels)
    assert trained == {"draft": weights} and frozen.keys() == {"embedding", "target"}
    opt = jax.eval_shape(lambda: optim.init(optim.make(c.train, labels), trained, frozen))
    sizes = sorted(x.size for x in jax.tree.leaves(opt) if x.ndim)
    assert sizes == sorted(2 * [x.size for x in jax.tree.leaves(weights)])


def test_no_configuration_is_left_untested():
    assert {p.stem for p in CONFIGS.iterdir()} == {
        "demo", "smollm2_135m", "llama31_8b", "qwen3_8b", "kimi_k2"
    }  # fmt: skip


def test_kimi_fuses_the_states_that_public_drafts_read():
    c = config.load(CONFIGS / "kimi_k2.yaml")
    # Public Kimi-K2 drafts name hidden_states 2, 30 and 58: the outputs of layers 1, 29 and 57.
    assert draft_shape.aux_layers(c, c.target.shape) == (1, 29, 57)


def test_llama31_scales_its_rope_as_the_model_does():
    c = config.load(LLAMA)
    assert dict(draft_shape.resolve(c, c.target.shape).rope_scaling) == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_configuration_survives_the_checkpoint(path):
    c = config.load(path)
    assert config.from_dict(json.loads(json.dumps(config.to_dict(c)))) == c


def test_overrides_win_over_the_file():
    c = config.load(LLAMA, ["train.learning_rate=3e-5", "target.aux_layers=[2,15,28]", "data.max_tokens=10"])
    assert c.train.learning_rate == 3e-5
    assert c.target.aux_layers == (2, 15, 28)
    assert c.data.max_tokens == 10


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.vocab_sise=5", "unknown key 'draft.vocab_sise'; did you mean 'vocab_size'?"),
        ("darft.vocab_size=5", "unknown key 'darft'; did you mean 'draft'?"),
        ("target.shape.hiden_size=5", "unknown key 'target.shape.hiden_size'; did you mean 'hidden_size'?"),
        ("draft.zzz=5", "unknown key 'draft.zzz'; known: .*head_init.*vocab_size"),
        ("draft.vocab_size=0", "draft.vocab_size=0: input should be greater than 0"),
        ("draft.vocab_size=-1", "draft.vocab_size=-1: input should be greater than 0"),
        ("draft.vocab_size=4.0", "draft.vocab_size=4.0: input should be a valid integer"),
        ("draft.vocab_size=128257", r"draft.vocab_size=128257 must be within 1 \.\. 128256"),
        ("draft.num_attention_heads=12", "draft.num_attention_heads=12 is not a multiple of .*=8"),
        ("target.aux_layers=[1,1,2]", r"target.aux_layers=\[1, 1, 2\] must be strictly ascending .* 0 \.\. 30"),
        ("target.aux_layers=[9,5,2]", r"target.aux_layers=\[9, 5, 2\] must be strictly ascending"),
        ("target.aux_layers=[-1,5,9]", r"target.aux_layers=\[-1, 5, 9\] must be .* within 0 \.\. 30"),
        ("target.aux_layers=[1,5,31]", r"target.aux_layers=\[1, 5, 31\] must be .* within 0 \.\. 30"),
        ("target.shape.num_hidden_layers=6", r"target has 6 layers: .* at least 7; set target.aux_layers"),
        ("target.shape.hidden_size=0", "target.shape.hidden_size=0: input should be greater than 0"),
        ("target.shape.rope_scaling={rope_type: longrope}", "rope_type='longrope' is not one of default"),
        ("target.shape.max_position_embeddings=4095", "data.max_length=4096 exceeds the target's 4095 positions"),
        ("data.max_length=4097", "data.max_length=4097 exceeds train.row_length=4096"),
        ("train.mode=offline", "train.mode=offline needs store.path"),
        ("train.micro_batches=3", "train.batch=16 does not divide into train.micro_batches=3"),
        ("train.learning_rate=-1", "train.learning_rate=-1: input should be greater than 0"),
        ("train.steps=", "train.steps=None: input should be a valid integer"),
        ("evaluate.topk=0", "evaluate.topk=0: input should be greater than 0"),
        ("evaluate.topk=2", r"evaluate.steps=3, evaluate.topk=2 is a tree and wants evaluate.tokens: within 2 .. 11"),
        ("evaluate.tokens=3", r"SGLang verifies steps\+1 = 4 tokens .* give evaluate.tokens=4 or leave it out"),
        ("evaluate={topk: 2, tokens: 12}", r"evaluate.tokens=12 must be within 2 \.\. 11"),
        ("evaluate={topk: 40000, tokens: 60}", "evaluate.topk=40000 exceeds draft.vocab_size=32000"),
        ("train=3", "train=3: input should be a valid dictionary"),
        ("train.steps.x=3", "override 'train.steps.x=3': steps is a value, not a section"),
        ("train.steps", "override 'train.steps' is not of the form section.key=value"),
        ("=3", "override '=3' is not of the form section.key=value"),
        ("train.steps=[", r"override 'train.steps=\[': not YAML"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_by_name(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(LLAMA, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("draft.vocab_size=49153", r"must be within 1 \.\. 49152"),
        ("target.aux_layers=[1,2,29]", r"within 0 \.\. 28"),
        ("data.max_length=9000", "exceeds the target's 8192 positions"),
    ],
)
def test_what_only_the_target_knows_is_refused_once_it_is_read(override, message):
    c = config.load(CONFIGS / "demo.yaml", [override, "train.row_length=10000"])
    with pytest.raises(ConfigError, match=message):
        draft_shape.resolve(c, SMOLLM2)


def test_default_aux_layers_need_seven_layers():
    assert SMOLLM2.default_aux_layers == (1, 14, 26)
    seven, six = (SMOLLM2.model_copy(update={"num_hidden_layers": n}) for n in (7, 6))
    assert seven.default_aux_layers == (1, 2, 3)
    with pytest.raises(ConfigError, match="target has 6 layers"):
        draft_shape.resolve(config.load(CONFIGS / "demo.yaml"), six)
    explicit = config.load(CONFIGS / "demo.yaml", ["target.aux_layers=[0,2,4]"])
    assert draft_shape.resolve(explicit, six).num_aux_hidden_states == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such configuration file"),
        ("train: [1", "not YAML"),
        ("- 1\n- 2\n", "sections were wanted, found list"),
        ("target: {path: x}\n", "data is missing"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, message):
    path = tmp_path / "run.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        config.load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def _hf(**changes) -> dict:
    return {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 8,
        "num_attention_heads": 4, "vocab_size": 100,
    } | changes  # fmt: skip


def test_both_spellings_of_rope_give_one_shape():
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = target_shape.from_hf(_hf(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}), "old")
    new = target_shape.from_hf(_hf(rope_parameters={"rope_theta": 5e5, **scaling}), "new")
    assert old == new
    assert (old.rope_theta, old.rope_scaling) == (5e5, scaling)
    plain = target_shape.from_hf(_hf(rope_parameters={"rope_theta": 5e5, "rope_type": "default"}), "plain")
    assert (plain.rope_theta, plain.rope_scaling) == (5e5, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True is not supported"),
        ({"model_type": "qwen3", "use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type='dynamic' is not one of"),
        ({"hidden_size": "64"}, "hidden_size='64'"),
        ({"num_attention_heads": 0}, "heads=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
    ],
)
def test_a_target_that_would_be_computed_wrongly_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        target_shape.from_hf(_hf(**changes), "there/config.json")
    assert str(caught.value).startswith("there/config.json: ")


def test_only_mistrals_window_counts_and_texts_beyond_it_are_refused():
    for changes, longest in (
        ({"model_type": "mistral"}, (4096, "tokens of sliding window")),  # as transformers reads such a file
        ({"model_type": "mistral", "sliding_window": 100}, (100, "tokens of sliding window")),
        ({"model_type": "mistral", "sliding_window": None}, (8192, "positions")),
        ({"model_type": "mistral", "sliding_window": 9000}, (8192, "positions")),
        ({"model_type": "qwen2", "sliding_window": 100, "use_sliding_window": False}, (8192, "positions")),
        ({"model_type": "llama", "sliding_window": 100}, (8192, "positions")),
    ):
        assert target_shape.from_hf(_hf(max_position_embeddings=8192, **changes), "here").longest == longest
    with pytest.raises(
        ConfigError, match=r"data.max_length=4096 exceeds the target's 100 tokens of sliding window"
    ):
        config.load(LLAMA, ["target.shape.sliding_window=100"])


def test_a_directory_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: not found"):
        target_shape.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        target_shape.read(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="no 'hidden_size'"):
        target_shape.read(tmp_path)
