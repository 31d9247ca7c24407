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

# rope_type -> the fields that it cannot do without
ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}

# Targets (model_type) for which SGLang takes a list of aux ids that does not begin with 1 as layer inputs.
AS_INPUTS = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite")
# Targets whose captured states are not the residual stream that transformers calls hidden_states.
OTHER_STATES = ("gemma3", "gemma3_text")

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
UNFILLED = "export it: SGLang leaves that parameter uninitialised, without a word"
MISSING = {
    "embed_tokens.weight": "export it: SGLang uses the target's, but parity and other tools read this one",
    "d2t": "export it: without it SGLang takes draft ids for target ids",
    "t2d": "export it: SGLang does without, trainers and converters do not",
}


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
    `rope_theta`; None where that schema is absent. Raises ConfigError for a RoPE that nobody can compute."""
    if schema == "rope_parameters":
        fields = config.get("rope_parameters")
        theta = fields.get("rope_theta") if isinstance(fields, dict) else None
    else:
        fields, theta = config.get("rope_scaling") or {}, config.get("rope_theta")
    if fields is None or theta is None:
        return None
    if not isinstance(fields, dict) or not isinstance(theta, int | float):
        raise ConfigError(f"{schema}: theta={theta!r} with {fields!r} is no RoPE")
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"{schema}: rope_type={kind!r}; known: {', '.join(ROPE_TYPES)}")
    if absent := [k for k in ROPE_TYPES[kind] if not isinstance(fields.get(k), int | float)]:
        raise ConfigError(f"{schema}: rope_type={kind!r} without a number for {absent[0]!r}")
    scaling = {k: v for k, v in fields.items() if k not in ("type", "rope_type", "rope_theta")}
    return float(theta), None if kind == "default" else scaling | {"rope_type": kind}


def aux_layers(config: dict) -> object:
    """What SGLang is told to capture, as found: a list of layer outputs if all is well, None for its default."""
    nested = config.get("eagle_config")
    return nested.get("eagle_aux_hidden_state_layer_ids") if isinstance(nested, dict) else None


def unusable_sizes(config: dict) -> list[str]:
    """Keys without which, or with whose values, no draft can be built."""
    stated = SIZES + tuple(k for k in ("head_dim", "num_aux_hidden_states") if config.get(k) is not None)
    bad = [k for k in stated if type(config.get(k)) is not int or config[k] < 1]
    eps = config.get("rms_norm_eps")
    return bad if type(eps) is float and eps > 0 else [*bad, "rms_norm_eps"]


def more_shapes(config: dict, shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Tensors that SGLang reads for options which our drafts do not have."""
    nested = config.get("eagle_config")
    before_fc = config.get("norm_before_fc") or (isinstance(nested, dict) and nested.get("norm_before_fc"))
    return {"input_norm.weight": (shape.sizes["m"],)} if before_fc else {}


def draft_shape(config: dict, where: str) -> DraftShape:
    """The draft that SGLang builds from a config.json. Raises ConfigError naming the first unusable field."""
    for key in unusable_sizes(config):
        raise ConfigError(f"{where}: {key}={config.get(key)!r}; a positive number is wanted")
    heads, layers = config["num_attention_heads"], aux_layers(config)
    try:
        theta, scaling = (
            rope_of(config, "rope_parameters") or rope_of(config, "rope_theta") or (10_000.0, None)
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return DraftShape(
        hidden_size=config["hidden_size"],
        num_aux_hidden_states=config.get("num_aux_hidden_states")
        or (len(layers) if isinstance(layers, list) else 3),
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"],
        max_position_embeddings=config["max_position_embeddings"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=theta,
        rope_scaling=None if scaling is None else tuple(sorted(scaling.items())),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output")),
    )
