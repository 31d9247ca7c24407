"""The fields of a draft's config.json: how we write them for every engine, and how an engine reads them."""

from bridge import engines
from bridge.engines import Engine
from eagle3_jax.draft.shape import DraftShape
from eagle3_jax.errors import ConfigError

AUX = "eagle_aux_hidden_state_layer_ids"
ARCHITECTURE = "LlamaForCausalLMEagle3"
MODEL_TYPE = "llama"

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


def aux_fields(layers: tuple[int, ...]) -> dict:
    """Config fields for these layer outputs: SGLang reads the nested list and means outputs, vLLM and
    llama.cpp prefer the top-level one and mean inputs."""
    return {
        "num_aux_hidden_states": len(layers),
        "eagle_config": {AUX: list(layers), "use_aux_hidden_state": True},
        AUX: [k + 1 for k in layers],
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


def aux_layers(config: dict, engine: Engine | None = None) -> object:
    """The layer outputs that an engine (SGLang unless given) is told to capture, as found: a list of layer outputs
    if all is well, None for its default."""
    engine = engine or engines.find()
    nested = config.get("eagle_config")
    inside = nested.get(AUX) if isinstance(nested, dict) else None
    if engine.aux == "nested":
        return inside
    if engine.aux == "fixed":
        return None
    told = config.get(AUX)
    if told is None and engine.aux == "either":
        told = inside
    inputs = isinstance(told, list) and all(type(i) is int for i in told)
    return [i - 1 for i in told] if inputs else told


def flat(config: dict) -> dict:
    """A config as this module reads it: what speculators keeps under transformer_layer_config moves to the top."""
    inner = config.get("transformer_layer_config")
    if not isinstance(inner, dict):
        return config
    outer = {k: v for k, v in config.items() if k not in ("transformer_layer_config", "model_type")}
    return inner | {"num_hidden_layers": 1, "norm_before_residual": True} | outer


def option(config: dict, name: str) -> bool:
    """Whether a config asks for one of engines.OPTIONS."""
    nested = config.get("eagle_config")
    inside = nested.get(name) if isinstance(nested, dict) else None
    return bool(inside) or any(config.get(key) for key in engines.FIELDS.get(name, (name,)))


def unusable_sizes(config: dict) -> list[str]:
    """Keys without which, or with whose values, no draft can be built."""
    stated = SIZES + tuple(k for k in ("head_dim", "num_aux_hidden_states") if config.get(k) is not None)
    bad = [k for k in stated if type(config.get(k)) is not int or config[k] < 1]
    eps = config.get("rms_norm_eps")
    return bad if type(eps) is float and eps > 0 else [*bad, "rms_norm_eps"]


def draft_shape(config: dict, where: str, engine: Engine | None = None) -> DraftShape:
    """The draft that an engine (SGLang unless given) builds from a config.json, with the options that it honours.

    Raises ConfigError naming the first unusable field.
    """
    engine = engine or engines.find()
    for key in unusable_sizes(config):
        raise ConfigError(f"{where}: {key}={config.get(key)!r}; a positive number is wanted")
    heads, layers = config["num_attention_heads"], aux_layers(config, engine)
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
        **{name: name in engine.options and option(config, name) for name in engines.OPTIONS},
    )
