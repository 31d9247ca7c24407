"""What a target looks like, read from its Hugging Face `config.json`."""

import itertools
import json
from pathlib import Path
from typing import NamedTuple

import pydantic

from eagle3_jax.errors import ConfigError


class Family(NamedTuple):
    """What a family of dense decoders has that Llama has not."""

    qkv_bias: bool = False
    qk_norm: bool = False  # each head's q and k are normed before the rotation
    window: int | None = None  # of sliding attention where the config does not say, in tokens


# What target/model.py computes, by `model_type`; other targets train from stored features.
FAMILIES = {
    "llama": Family(),
    "mistral": Family(window=4096),
    "qwen2": Family(qkv_bias=True),
    "qwen3": Family(qk_norm=True),
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # what layers.rope_frequencies computes
# What the families' configs may also ask for, with the only value that target/model.py computes.
PLAIN = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1.0,
}


class TargetShape(pydantic.BaseModel):
    """Sizes under Hugging Face's names. `rope_scaling` is None or a dict with `rope_type`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)

    model_type: str
    hidden_size: pydantic.PositiveInt
    intermediate_size: pydantic.PositiveInt
    num_hidden_layers: pydantic.PositiveInt
    num_attention_heads: pydantic.PositiveInt
    num_key_value_heads: pydantic.PositiveInt
    head_dim: pydantic.PositiveInt
    vocab_size: pydantic.PositiveInt
    max_position_embeddings: pydantic.PositiveInt
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    tie_word_embeddings: bool = False
    sliding_window: pydantic.PositiveInt | None = (
        None  # tokens that attention reaches back over, itself included
    )

    @pydantic.field_validator("rope_scaling")
    @classmethod
    def _known_rope(cls, scaling: dict | None) -> dict | None:
        if scaling is not None and scaling.get("rope_type") not in ROPE_TYPES:
            raise ConfigError(
                f"rope_scaling.rope_type={scaling.get('rope_type')!r} is not one of {', '.join(ROPE_TYPES)}"
            )
        return scaling

    @property
    def longest(self) -> tuple[int, str]:
        """Most tokens that a text may have, and what they are.

        Beyond a sliding window engines and transformers part ways (SGLang serves Mistral as a plain Llama); within
        it all of them compute the same.
        """
        if self.sliding_window is not None and self.sliding_window < self.max_position_embeddings:
            return self.sliding_window, "tokens of sliding window"
        return self.max_position_embeddings, "positions"

    @property
    def default_aux_layers(self) -> tuple[int, int, int]:
        """The three layer outputs that every engine captures unless told otherwise."""
        layers = self.num_hidden_layers
        if layers < 7:
            raise ConfigError(
                f"target has {layers} layers: the default aux layers [1, L//2-1, L-4] need at least 7; "
                "set target.aux_layers"
            )
        return 1, layers // 2 - 1, layers - 4


def check_aux_layers(ids: tuple[int, ...], layers: int) -> None:
    """Refuse ids that are not strictly ascending or outside 0 .. L-2 (engines never capture the last output)."""
    if not ids or any(a >= b for a, b in itertools.pairwise(ids)) or ids[0] < 0 or ids[-1] > layers - 2:
        raise ConfigError(
            f"target.aux_layers={list(ids)} must be strictly ascending layer outputs within 0 .. {layers - 2} "
            f"(the target has {layers} layers)"
        )


def from_hf(config: dict, where: str) -> TargetShape:
    """TargetShape of a Hugging Face config, in the spelling of transformers 4 or 5."""
    text = config.get("text_config", config)
    needed = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [k for k in needed if k not in text]
    if missing:
        raise ConfigError(f"{where}: no {missing[0]!r}; a decoder's config.json is wanted")
    rope = text.get("rope_parameters") or {}
    scaling = text.get("rope_scaling") or rope or None
    theta = rope.get("rope_theta", text.get("rope_theta", 10_000.0))
    if scaling:
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        scaling = {k: v for k, v in scaling.items() if k not in ("type", "rope_theta")} | {"rope_type": kind}
        if kind == "default":
            scaling = None
    kind = text.get("model_type", "unknown")
    odd = [k for k, plain in PLAIN.items() if text.get(k, plain) not in (plain, None)]
    if kind in FAMILIES and odd:
        raise ConfigError(f"{where}: {odd[0]}={text[odd[0]]!r} is not supported, only {PLAIN[odd[0]]!r}")
    heads = text["num_attention_heads"]
    # Other families have use_sliding_window, which PLAIN looks at.
    window = FAMILIES[kind].window if kind in FAMILIES else None
    try:
        return TargetShape(
            model_type=kind,
            hidden_size=text["hidden_size"],
            intermediate_size=text["intermediate_size"],
            num_hidden_layers=text["num_hidden_layers"],
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or text["hidden_size"] // heads,
            vocab_size=text["vocab_size"],
            max_position_embeddings=text.get("max_position_embeddings", 2048),
            rms_norm_eps=text.get("rms_norm_eps", 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            tie_word_embeddings=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
            sliding_window=text.get("sliding_window", window) if window else None,
        )
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{where}: {key}={first['input']!r}: {first['msg']}") from None
    except (TypeError, ZeroDivisionError):
        raise ConfigError(
            f"{where}: hidden_size={text['hidden_size']!r}, heads={heads!r}: no sizes"
        ) from None


def read(directory: str | Path) -> TargetShape:
    """TargetShape of a model directory."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path}: not found; a Hugging Face model directory is wanted")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    return from_hf(config, str(path))
