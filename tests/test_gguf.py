"""GGUF conversion against transformers' own reader (which needs torch) and against the model behind the file."""

import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from eagle3_jax import defaults, tensors
from eagle3_jax.errors import ConfigError
from eagle3_jax.target import gguf as ours
from eagle3_jax.target import shape

LAYERS, WIDTH, FFN, HEADS, KV_HEADS = 2, 128, 192, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<file_sep>"]
WHOLE = "<think>"  # never cut, but text like any other
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
TEXTS = [
    "", " ", "  \n\n\t x", "Hello, world! It's we'll they'd", "naïve café ÄÖÜß", "日本語のテキスト と 漢字",
    "🤗👩\u200d👩\u200d👧 emoji", "def f(x):\n    return x ** 2  # comment\n", "a\r\nb\rc", "मानक हिन्दी ½ Ⅷ",
    "http://x.y/z?q=a%20b#c", "\x00\x07\ufeff\u200b", "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "no<|endoftext|>space", "<|im_start", "a<think>b<file_sep>", "e\u0301 combining",
]  # fmt: skip
DIGITS = [
    "1234567",
    "3.14 and 2,718",
    "a1b2",
    "\n\n1. one\n\n2. two",
    "x =   42",
    "\t\t7",
    "  2024-01-02  ",
    "x²٣٤",
]


def _source_tokenizer(digits: bool) -> tokenizers.Tokenizer:
    """A byte-level BPE trained on a few lines, as the model that is turned into a GGUF has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=[*SPECIAL, WHOLE],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS, *DIGITS, "the then they hello return  \n\n  " * 3], trainer)
    return tokenizer


def _model(tokenizer: tokenizers.Tokenizer, tied: bool) -> transformers.LlamaForCausalLM:
    config = transformers.LlamaConfig(
        hidden_size=WIDTH, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=tied,
        rms_norm_eps=1e-5, max_position_embeddings=512, rope_parameters={"rope_type": "default", "rope_theta": 5e4},
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(weight, 0.5, 1.5)
    return model


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's converter: the two halves of each head become neighbouring rows."""
    rows, width = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2).reshape(rows, width)


def _write(path, tokenizer, model, kind=Kind.F32, pre="smollm", bos=False, change=None):
    """One GGUF file. `change(keys, arrays)` may spoil it before it is written."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    arrays = {}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        x = weight.numpy()
        if ".q_proj" in name:
            x = _interleaved(x, HEADS)
        if ".k_proj" in name:
            x = _interleaved(x, KV_HEADS)
        arrays[names.get_name(name, try_suffixes=(".weight",))] = x
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    keys = {
        "general.architecture": "llama",
        "general.name": "tiny",
        "llama.block_count": LAYERS,
        "llama.context_length": 512,
        "llama.embedding_length": WIDTH,
        "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.rope.freq_base": 5e4,
        "llama.rope.dimension_count": WIDTH // HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 4 if t == WHOLE else 1 for t in tokens],
        "tokenizer.ggml.merges": [" ".join(m) for m in json.loads(tokenizer.to_str())["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_bos_token": bos,
        "tokenizer.chat_template": TEMPLATE,
    }
    if change:
        change(keys, arrays)
    writer = gguf.GGUFWriter(path, keys.pop("general.architecture"))
    put = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    put |= {str: writer.add_string, list: writer.add_array}
    for key, value in keys.items():
        put[type(value)](key, value)
    for name, x in arrays.items():
        small = x.ndim == 1 or kind == Kind.F32
        as_stored = x if small else gguf.quants.quantize(x, kind)
        writer.add_tensor(name, as_stored, raw_dtype=Kind.F32 if small else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def source():
    return _source_tokenizer(digits=True)


def _ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def _as_transformers_reads(path, directory) -> dict[str, np.ndarray]:
    with torch.device("meta"):
        empty = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(directory)
        )
    return {k: v.numpy() for k, v in load_gguf_checkpoint(path, True, empty)["tensors"].items()}


def _bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize(
    ("kind", "tied"), [(Kind.F32, False), (Kind.Q8_0, True), (Kind.Q4_1, True), (Kind.BF16, False)]
)
def test_tensors_are_bit_equal_to_what_transformers_reads(tmp_path, source, kind, tied):
    path = _write(tmp_path / "m.gguf", source, _model(source, tied), kind)
    got = tensors.read(ours.convert(path, tmp_path / "out"))
    theirs = _as_transformers_reads(path, tmp_path / "out")
    assert set(got) == set(theirs)
    assert ("lm_head.weight" in got) is not tied
    for name, x in theirs.items():
        assert got[name].dtype == np.float32
        np.testing.assert_array_equal(_bits(got[name]), _bits(x), err_msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_the_converted_model_is_the_one_that_was_put_in(tmp_path, source, tied):
    model = _model(source, tied)
    out = ours.convert(_write(tmp_path / "m.gguf", source, model), tmp_path / "out")
    again, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert again.dtype == torch.float32
    ids = torch.arange(40)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_the_config_says_what_the_model_is(tmp_path, source):
    model = _model(source, tied=True)
    out = ours.convert(_write(tmp_path / "m.gguf", source, model, Kind.Q8_0), tmp_path / "out")
    read, raw = shape.read(out), json.loads((out / "config.json").read_text())
    assert read == shape.from_hf(model.config.to_dict(), "source")
    assert "quantization_config" not in raw
    assert (raw["bos_token_id"], raw["eos_token_id"], raw["pad_token_id"]) == (1, 2, 2)
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == 2


def test_an_end_of_turn_token_of_its_own_ends_generation_too(tmp_path, source):
    def change(keys, arrays):
        keys["tokenizer.ggml.eot_token_id"] = 0

    out = ours.convert(
        _write(tmp_path / "m.gguf", source, _model(source, True), change=change), tmp_path / "out"
    )
    assert transformers.GenerationConfig.from_pretrained(out).eos_token_id == [2, 0]


def test_the_tokenizer_is_the_models_own_with_every_digit_alone(tmp_path, source):
    out = ours.convert(_write(tmp_path / "m.gguf", source, _model(source, True)), tmp_path / "out")
    got = transformers.AutoTokenizer.from_pretrained(out)
    for text in TEXTS + DIGITS:
        assert _ids(got, text) == source.encode(text).ids, text
        assert got.decode(_ids(got, text)) == text
    assert _ids(got, "\n\n1")[0] == source.token_to_id(
        "ĊĊ"
    )  # transformers' GGUF reader gives two tokens here


def test_the_tokenizer_equals_transformers_reading_of_the_file(tmp_path):
    source = _source_tokenizer(digits=False)
    path = _write(tmp_path / "m.gguf", source, _model(source, True), pre="gpt-2")
    got = transformers.AutoTokenizer.from_pretrained(ours.convert(path, tmp_path / "out"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS + DIGITS:
        assert _ids(got, text) == _ids(theirs, text) == source.encode(text).ids, text
    assert got.get_vocab() == theirs.get_vocab()
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "chat_template"):
        assert getattr(got, name) == getattr(theirs, name), name
    marked = _ids(got, "a<think>b<file_sep>c")
    assert got.decode(marked, skip_special_tokens=True) == "a<think>bc"


@pytest.mark.parametrize("bos", [True, False])
def test_the_file_decides_whether_text_starts_with_a_bos(tmp_path, source, bos):
    path = _write(tmp_path / "m.gguf", source, _model(source, True), bos=bos)
    got = transformers.AutoTokenizer.from_pretrained(ours.convert(path, tmp_path / "out"))
    assert (got("hello").input_ids[0] == 1) is bos
    chat = got.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False)
    assert chat == "<|im_start|>user\nthe<|im_end|>\n"


def test_offsets_cover_the_text_without_gaps(tmp_path, source):
    out = ours.convert(_write(tmp_path / "m.gguf", source, _model(source, True)), tmp_path / "out")
    got = transformers.AutoTokenizer.from_pretrained(out)
    text = "<|im_start|>user\n  Hello 12  worlds<|im_end|>\n"
    spans = got(text, return_offsets_mapping=True)["offset_mapping"]
    assert "".join(text[a:b] for a, b in spans) == text


def _set(key, value):
    return lambda keys, arrays: keys.__setitem__(key, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("general.architecture", "qwen3"), "architecture 'qwen3' found, 'llama' wanted"),
        (_set("llama.rope.scaling.type", "yarn"), "scaled rope cannot be taken from a GGUF file"),
        (_set("llama.rope.dimension_count", 16), "rope turns 16 of 32 head dimensions"),
        (_set("tokenizer.ggml.model", "llama"), "tokenizer 'llama' cut as 'smollm' found, 'gpt2' cut as one of"),
        (_set("tokenizer.ggml.pre", "tekken"), r"cut as 'tekken' found, .*\['gpt-2', 'smollm'\]"),
        (lambda k, a: k.pop("llama.context_length"), "key 'llama.context_length' is missing"),
        (lambda k, a: k.pop("tokenizer.ggml.merges"), "key 'tokenizer.ggml.merges' is missing"),
        (lambda k, a: a.pop("blk.1.attn_k.weight"), "tensor 'blk.1.attn_k.weight' is missing"),
        (lambda k, a: a.update({"blk.0.attn_q.bias": np.zeros(4, "f4")}), "'blk.0.attn_q.bias' is not a plain"),
        (lambda k, a: a.update({"rope_freqs.weight": np.ones(16, "f4")}), "scaled rope cannot be taken"),
        (lambda k, a: k["tokenizer.ggml.token_type"].pop(), "399 token types for 400 tokens"),
        (lambda k, a: a.update({"token_embd.weight": np.zeros((9, WIDTH), "f4")}), "9 rows for 400 tokens"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted_is_refused_and_leaves_nothing(tmp_path, source, change, message):
    path = _write(tmp_path / "m.gguf", source, _model(source, True), change=change)
    with pytest.raises(ConfigError, match=message) as caught:
        ours.convert(path, tmp_path / "out")
    assert str(path) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]


@pytest.mark.parametrize("size", [0, 3, 100, 5000, -1000])
def test_a_damaged_file_is_refused(tmp_path, source, size):
    path = _write(tmp_path / "m.gguf", source, _model(source, True))
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="not a whole GGUF file"):
        ours.convert(path, tmp_path / "out")
    with pytest.raises(ConfigError, match="no such GGUF file"):
        ours.convert(tmp_path / "other.gguf", tmp_path / "out")


def test_conversion_needs_no_torch(tmp_path, source):
    path = _write(tmp_path / "m.gguf", source, _model(source, True))
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from eagle3_jax.target import gguf\n"
        "gguf.convert(sys.argv[1], sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", code, path, tmp_path / "out"], check=True)
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_built_in_target_is_what_transformers_reads(tmp_path):
    path = defaults.cache() / defaults.FILES["smollm2-135m-instruct"].saved_as
    if not path.is_file():
        pytest.skip(f"the built-in target is not in the cache ({path}); `make demo` fetches it")
    out = ours.convert(path, tmp_path / "out")
    got, theirs = tensors.read(out), _as_transformers_reads(path, out)
    assert set(got) == set(theirs)
    assert all(np.array_equal(_bits(got[name]), _bits(x)) for name, x in theirs.items())
    mine = transformers.AutoTokenizer.from_pretrained(out)
    their = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    prompts = (
        [p["prompt"] for p in defaults.mt_bench()] if (defaults.cache() / "mt_bench.jsonl").is_file() else []
    )
    their.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # llama.cpp's two cuts for "smollm"
        [
            pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    for text in TEXTS + DIGITS + prompts:
        assert _ids(mine, text) == _ids(their, text), text
    assert mine.get_vocab() == their.get_vocab()
    assert mine.chat_template == their.chat_template
