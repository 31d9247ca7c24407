"""What SGLang 0.5.23 reads of a draft directory, as data: names, config fields, the aux-layer convention.

vLLM and llama.cpp are mentioned where one directory has to serve them too.
"""

import re

from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import ConfigError

SGLANG = "SGLang 0.5.23"
ARCHITECTURE = "LlamaForCausalLMEagle3"
MODEL_TYPE = "llama"
ALGORITHM = "EAGLE3"  # `EAGLE` starts and serves with the same directory, but accepts nothing

# config.json fields without which a size would silently be transformers' default for Llama 2 7B.
SIZES = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers",
    "vocab_size", "draft_vocab_size", "max_position_embeddings",
)  # fmt: skip

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Other spellings of our names (pattern, replacement), and what the engines do with such a tensor.
SPELLINGS = (
    (r"^model\.lm_head\.", "lm_head.", "SGLang drops it without a word"),
    (r"^(model\.)?midlayer\.0\.", "midlayer.", "SGLang drops it without a word"),
    (r"^(model\.)?decoder\.", "midlayer.", "SGLang drops it without a word"),
    (r"^(model\.)?fcs\.", "fc.", "SGLang drops it without a word"),
    (r"^layers\.0\.", "midlayer.", "SGLang before 0.5.12 drops it without a word"),
    (r"^model\.layers\.0\.", "midlayer.", "SGLang before 0.5.12 drops it without a word, vLLM refuses it"),
    (r"^model\.", "", "vLLM refuses it"),
    (r"^aux_norm_low\.", "fc_norm.0.", "only SGLang knows it"),
    (r"^aux_norm_mid\.", "fc_norm.1.", "only SGLang knows it"),
    (r"^aux_norm_high\.", "fc_norm.2.", "only SGLang knows it"),
)
EXTRA = "SGLang drops it without a word, vLLM refuses the file"


def spelled(name: str) -> list[tuple[str, str]]:
    """What a tensor of this unknown name may be meant as: (our name, what the engines do with it)."""
    return [(re.sub(p, r, name), effect) for p, r, effect in SPELLINGS if re.search(p, name)]


def aux_fields(layers: tuple[int, ...]) -> dict:
    """Config fields for these layer outputs: SGLang reads the nested list and means outputs, vLLM and
    llama.cpp prefer the top-level one and mean inputs."""
    return {
        "num_aux_hidden_states": len(layers),
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True},
        "eagle_aux_hidden_state_layer_ids": [k + 1 for k in layers],
    }


def rope_fields(theta: float, scaling: dict | None) -> dict:
    """RoPE under transformers 4's names and under transformers 5's."""
    return {
        "rope_theta": theta,
        "rope_scaling": scaling,
        "rope_parameters": (scaling or {"rope_type": "default"}) | {"rope_theta": theta},
    }


def rope_of(config: dict, schema: str) -> tuple[float, dict | None] | None:
    """(theta, scaling with its `rope_type`, or None) as a config states it under `rope_parameters` or
    `rope_theta`; None where that schema is absent."""
    if schema == "rope_parameters":
        fields = config.get("rope_parameters")
        theta = (fields or {}).get("rope_theta")
    else:
        fields, theta = config.get("rope_scaling") or {}, config.get("rope_theta")
    if fields is None or theta is None:
        return None
    kind = fields.get("rope_type", fields.get("type", "default"))
    scaling = {k: v for k, v in fields.items() if k not in ("type", "rope_type", "rope_theta")}
    return float(theta), None if kind == "default" else scaling | {"rope_type": kind}


def aux_layers(config: dict) -> list[int] | None:
    """Layer outputs that SGLang is told to capture; None: its default."""
    return (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")


def draft_shape(config: dict, where: str) -> DraftShape:
    """The draft that SGLang builds from a config.json. Raises ConfigError naming the first unusable field."""
    for key in SIZES:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{where}: {key}={value!r}; a positive integer is wanted")
    heads, layers = config["num_attention_heads"], aux_layers(config)
    rope = rope_of(config, "rope_parameters") or rope_of(config, "rope_theta") or (10_000.0, None)
    return DraftShape(
        hidden_size=config["hidden_size"],
        num_aux_hidden_states=config.get("num_aux_hidden_states") or (len(layers) if layers else 3),
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=rope[0],
        rope_scaling=tuple(sorted(rope[1].items())) if rope[1] else None,
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output")),
    )
