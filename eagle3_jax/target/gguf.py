"""A Llama in one GGUF file -> a float32 Hugging Face directory, weights and tokenizer, without torch."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import gguf
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from eagle3_jax import progress, tensors
from eagle3_jax.errors import ConfigError

MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How text is cut before the merges apply. SmolLM's tokenizer takes every digit alone, so that "\n\n1" keeps
# its "\n\n" token; transformers' own GGUF reader does not know the name and cuts it as GPT-2 would.
PRE_TOKENIZERS = {
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
REMEDY = "use the model's Hugging Face directory instead"


def convert(gguf_file: str | Path, out_dir: str | Path) -> Path:
    """Write config.json, model.safetensors (float32), tokenizer and generation_config.json; returns `out_dir`.

    `out_dir` appears whole or not at all. An existing one is replaced.
    Raises ConfigError for anything but a plain Llama with a byte-level BPE vocabulary.
    """
    source, out = Path(gguf_file), Path(out_dir)
    if not source.is_file():
        raise ConfigError(f"{source}: no such GGUF file")
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ConfigError(f"{source}: not a whole GGUF file ({' '.join(str(error).split())})") from None
    meta = _Metadata(source, reader)
    out.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}-"))
    try:
        config = _config(meta, {t.name for t in reader.tensors})
        _save_tokenizer(meta, part)
        weights = _weights(meta, config)
        if (rows := len(weights["model.embed_tokens.weight"])) != config["vocab_size"]:
            raise ConfigError(
                f"{source}: token_embd.weight has {rows} rows for {config['vocab_size']} tokens"
            )
        tensors.save(part / tensors.FILE, weights)
        generation = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
        _write(part / "config.json", config)
        _write(part / "generation_config.json", generation)
        part.chmod(0o755)  # mkdtemp and safetensors leave both to their owner alone
        (part / tensors.FILE).chmod(0o644)
        if out.exists():
            shutil.rmtree(out)
        os.rename(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


class _Metadata:
    """A reader's key-value pairs, with errors that name file and key."""

    def __init__(self, source: Path, reader: gguf.GGUFReader):
        self.source, self.reader = source, reader

    def get(self, key: str, default=None):
        field = self.reader.get_field(key)
        return default if field is None else field.contents()

    def need(self, key: str):
        if (value := self.get(key)) is None:
            raise ConfigError(f"{self.source}: GGUF key {key!r} is missing; {REMEDY}")
        return value


def _config(meta: _Metadata, names: set[str]) -> dict:
    if (arch := meta.need("general.architecture")) != "llama":
        raise ConfigError(f"{meta.source}: GGUF architecture {arch!r} found, 'llama' wanted; {REMEDY}")
    scaling = meta.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in names:
        # The file holds the scaled frequencies, not the parameters that config.json asks for.
        raise ConfigError(f"{meta.source}: scaled rope cannot be taken from a GGUF file; {REMEDY}")
    heads, width = meta.need("llama.attention.head_count"), meta.need("llama.embedding_length")
    if not isinstance(heads, int):
        raise ConfigError(f"{meta.source}: head counts per layer found, one count wanted; {REMEDY}")
    head_dim = meta.get("llama.attention.key_length", width // heads)
    if (turned := meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
        raise ConfigError(f"{meta.source}: rope turns {turned} of {head_dim} head dimensions; {REMEDY}")
    theta = float(meta.get("llama.rope.freq_base", 10_000.0))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": meta.need("llama.feed_forward_length"),
        "num_hidden_layers": meta.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("llama.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": len(meta.need("tokenizer.ggml.tokens")),
        "max_position_embeddings": meta.need("llama.context_length"),
        # Stored as float32: its shortest text is the number that was meant, 1e-05.
        "rms_norm_eps": float(str(np.float32(meta.need("llama.attention.layer_norm_rms_epsilon")))),
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
        "torch_dtype": "float32",
    }
    eos = [meta.get(f"tokenizer.ggml.{k}_token_id") for k in ("eos", "eot")]
    eos = list(dict.fromkeys(i for i in eos if i is not None))
    ids = {
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": meta.get("tokenizer.ggml.padding_token_id"),
    }
    return config | {k: v for k, v in ids.items() if v is not None}


def _weights(meta: _Metadata, config: dict) -> dict[str, np.ndarray]:
    """Dequantised float32 tensors under Hugging Face's names; every tensor of the file is used."""
    layers = config["num_hidden_layers"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = {
        k: v for k, v in MODEL_TENSORS.items() if k != "output.weight" or not config["tie_word_embeddings"]
    }
    for i in range(layers):
        names |= {f"blk.{i}.{k}.weight": f"model.layers.{i}.{v}.weight" for k, v in LAYER_TENSORS.items()}
    found = {t.name: t for t in meta.reader.tensors}
    if missing := sorted(set(names) - set(found)):
        raise ConfigError(f"{meta.source}: tensor {missing[0]!r} is missing ({len(missing)} in all)")
    if extra := sorted(set(found) - set(names)):
        raise ConfigError(f"{meta.source}: tensor {extra[0]!r} is not a plain Llama's; {REMEDY}")
    weights = {}
    with progress.bar("dequantise", sum(t.n_elements for t in found.values()) / 1e6, "M weights") as bar:
        for name, tensor in found.items():
            x = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
            if kind := re.fullmatch(r"blk\.\d+\.(attn_[qk])\.weight", name):
                x = _half_split(x, heads[kind[1]])
            weights[names[name]] = x
            bar.advance(x.size / 1e6)
    return weights


def _half_split(weight: np.ndarray, heads: int) -> np.ndarray:
    """ggml keeps each rotated pair in neighbouring rows; Hugging Face keeps the two halves apart."""
    rows, width = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, width).swapaxes(1, 2).reshape(rows, width)


def _save_tokenizer(meta: _Metadata, directory: Path) -> None:
    """tokenizer.json and tokenizer_config.json (with the chat template) from the file's metadata."""
    model, pre = meta.need("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre", "gpt-2")
    if model != "gpt2" or pre not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{meta.source}: tokenizer {model!r} cut as {pre!r} found, 'gpt2' cut as one of "
            f"{sorted(PRE_TOKENIZERS)} wanted; {REMEDY}"
        )
    tokens = meta.need("tokenizer.ggml.tokens")
    kinds = meta.get("tokenizer.ggml.token_type", [gguf.TokenType.NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        raise ConfigError(f"{meta.source}: {len(kinds)} token types for {len(tokens)} tokens")
    merges = [tuple(m.split(" ")) for m in meta.need("tokenizer.ggml.merges")]
    tokenizer = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((gguf.TokenType.CONTROL, True), (gguf.TokenType.USER_DEFINED, False)):
        tokenizer.add_tokens(
            [
                tokenizers.AddedToken(t, normalized=False, special=special)
                for t, k in zip(tokens, kinds, strict=True)
                if k == kind
            ]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": meta.need("llama.context_length"),
        "clean_up_tokenization_spaces": False,
    }
    for name, key in dict(bos="bos", eos="eos", unk="unknown", pad="padding").items():
        if (token := meta.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{name}_token"] = tokens[token]
    if meta.get("tokenizer.ggml.add_bos_token", False):
        bos = config["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))]
        )
    if template := meta.get("tokenizer.chat_template"):
        config["chat_template"] = template
    tokenizer.save(str(directory / "tokenizer.json"))
    _write(directory / "tokenizer_config.json", config)


def _write(path: Path, tree: dict) -> None:
    path.write_text(json.dumps(tree, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
