"""The static contract: will an engine load every tensor of a draft directory, and read the config as meant?

A square matrix cannot be seen transposed here, nor two norms swapped: `bridge parity` and `bridge doctor` compute
with them.
"""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from bridge import check_tensors, convert, engines, fields, launch
from bridge.engines import Engine
from bridge.fields import AUX
from bridge.finding import Finding, field
from eagle3_jax import tensors
from eagle3_jax.errors import ConfigError
from eagle3_jax.target import shape as target_shape
from eagle3_jax.target.shape import TargetShape


def check(
    directory: str | Path,
    target: str | Path | None = None,
    engine: str | None = None,
    line: str | None = None,
) -> list[Finding]:
    """Everything wrong with a draft directory; an empty list is a healthy one.

    `target`, the Hugging Face directory of the model to be served, adds what can only be judged beside it, `line` the
    command that serves it. `engine` is "NAME:VERSION" (engines.py), unless given the one of `line`, else SGLang.
    Raises ConfigError or WeightError where config.json, the tensors, the target's config or the line cannot be read.
    """
    config, files = convert.read_config(directory), tensors.open_tensors(directory)
    served = None if target is None else target_shape.read(target)
    told = None if line is None else launch.parse(line)
    rules = engines.find(engine or (told.engine if told else engines.DEFAULT))
    findings = [] if told is None else list(launch.findings(told, config, directory))
    if (nested := "transformer_layer_config" in config) != rules.nested:
        fix = f"bridge import {directory}, then bridge convert --layout {'speculators' if rules.nested else 'sglang'}"
        where, wanted = "transformer_layer_config", "absent" if nested else "the draft's sizes"
        findings.append(field("error", where, "present" if nested else "absent", wanted, fix))
    config = fields.flat(config)
    findings += [*_config(config, rules, files), *_aux(config, served, rules), *_rope(config)]
    try:
        shape = fields.draft_shape(config, convert.CONFIG, rules)
    except ConfigError:
        return findings
    findings += check_tensors.check(files, shape, config, rules)
    if served is not None:
        findings += [*_beside(config, served, target), *check_tensors.embedding(files, rules, target)]
    return findings


def _config(config: dict, engine: Engine, files: dict) -> Iterator[Finding]:
    for key in fields.unusable_sizes(config):
        fix = "without it SGLang stops with an AttributeError" if key == "draft_vocab_size" else "set it"
        yield field("error", key, repr(config.get(key, "absent")), "a positive number", fix)
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or found[0] not in engine.architectures:
        wanted, fix = list(engine.architectures[:1]), f"{engine.title} picks the draft's class by it"
        yield field("error", "architectures", repr(config.get("architectures", "absent")), repr(wanted), fix)
    if not engine.nested and config.get("model_type") != fields.MODEL_TYPE:
        fix = "transformers has to know it; it also decides the MLP's width"
        yield field(
            "error", "model_type", repr(config.get("model_type", "absent")), repr(fields.MODEL_TYPE), fix
        )
    yield from _layers(config, engine, files)
    for key, value, fix in (
        ("hidden_act", "silu", "SGLang knows no other"),
        ("tie_word_embeddings", False,
         "SGLang would take the target's embedding for the draft's head, leave lm_head.weight out, and look its target "
         "ids up in d2t, beyond its end"),
        ("attention_bias", False, "SGLang drops q, k and v biases and leaves o's uninitialised"),
        ("bias", False, "the draft has no biases"),
        ("num_nextn_predict_layers", 0, "SGLang would count layers as for multi-token prediction"),
        ("target_hidden_size", config.get("hidden_size"), "a draft of another width is not supported here"),
    ):  # fmt: skip
        if (found := config.get(key)) is not None and found != value:
            yield field("error", key, repr(found), repr(value), fix)
    for name in engines.OPTIONS:
        if fields.option(config, name) and name not in engine.options:
            known = [e.title for e in engines.ENGINES if name in e.options]
            yield field(
                "error", name, True, "absent", f"{engine.title} ignores it; {', '.join(known)} do not"
            )
    yield from _sizes(config)
    yield from _config_dtype(config)


def _layers(config: dict, engine: Engine, files: dict) -> Iterator[Finding]:
    """One decoder layer, in the config and in the file."""
    numbers = [re.match(r"layers\.(\d+)\.", engines.spelled(name)) for name in files]
    held = 1 + max((int(n[1]) for n in numbers if n), default=0)
    told = config.get("num_hidden_layers")
    if type(told) is not int or told < 1 or told == held == 1:
        return  # what is no number is said with the sizes
    if told != held:
        yield field(
            "error", "num_hidden_layers", told, held, f"the file has tensors of {held} decoder layer(s)"
        )
        return
    able = sorted({engines.TITLES[e.name] for e in engines.ENGINES if e.layers})
    fix = (
        f"the layers after the first read the state alone ([N, H], not [N, 2H]); {', '.join(able)} run them, "
        f"{engine.title} {'too' if engine.layers else 'does not'}, and this layout has one"
    )
    yield field("error", "num_hidden_layers", told, 1, fix)


def _sizes(config: dict) -> Iterator[Finding]:
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if type(heads) is type(groups) is int and groups > 0 and heads % groups:
        yield field("error", "num_key_value_heads", groups, f"a divisor of {heads} heads", "set it")
    width = config.get("hidden_size")
    if type(heads) is type(width) is int and heads > 0 and width % heads:
        fix = "transformers refuses the config, whatever head_dim is, and SGLang does not start"
        yield field("error", "num_attention_heads", heads, f"a divisor of hidden_size={width}", fix)
    draft, full = config.get("draft_vocab_size"), config.get("vocab_size")
    if type(draft) is type(full) is int and draft > full:
        fix = "vocab_size is the target's"
        yield field("error", "draft_vocab_size", draft, f"at most vocab_size={full}", fix)


def _config_dtype(config: dict) -> Iterator[Finding]:
    old, new = config.get("torch_dtype"), config.get("dtype")
    known = ("bfloat16", "float16", "float32")
    if old is None and new is None:
        fix = "SGLang --dtype auto would take float16"
        yield field("warning", "torch_dtype", "absent", " or ".join(known), fix)
    elif None not in (old, new) and old != new:
        yield field("error", "dtype", repr(new), f"torch_dtype's {old!r}", "set both alike")
    elif (old or new) not in known:
        yield field("error", "torch_dtype", repr(old or new), " or ".join(known), "set torch_dtype and dtype")
    elif (old or new) == "float32":
        yield field("note", "torch_dtype", "float32", "a launch line with --dtype float32",
                    "SGLang --dtype auto would cast to float16")  # fmt: skip


def _aux(config: dict, served: TargetShape | None, engine: Engine) -> Iterator[Finding]:
    inside, key = config.get("eagle_config"), f"eagle_config.{AUX}" if engine.aux == "nested" else AUX
    layers, top = fields.aux_layers(config, engine), config.get(AUX)
    count, title = config.get("num_aux_hidden_states"), engine.title
    if isinstance(inside, dict) and inside.get("use_aux_hidden_state") is False:
        fix = "the engine would capture nothing, while fc.weight wants aux states"
        yield field("error", "eagle_config.use_aux_hidden_state", False, True, fix)
    if engine.states not in (None, count or 3):
        yield field("error", "num_aux_hidden_states", count, engine.states, f"{title} takes no other number")
    if engine.aux == "fixed":
        yield from _fixed(config, served, engine)
        return
    if layers is None:
        severity = (
            "warning" if count in (None, 3) and (served is None or served.num_hidden_layers >= 7) else "error"
        )
        guess = f": {list(served.default_aux_layers)}" if served and served.num_hidden_layers >= 7 else ""
        fix = f"{title} would capture its three default states{guess}"
        if served and not guess:
            fix += f", which do not exist or collide in {served.num_hidden_layers} layers"
        yield field(severity, key, "absent", "the layers, explicitly", fix)
        return
    ascending = isinstance(layers, list) and layers and all(type(i) is int and i >= 0 for i in layers)
    if not ascending or any(a >= b for a, b in itertools.pairwise(layers)):
        fix = f"{title} captures in the order of the layers, whatever the list says"
        yield field("error", key, layers, "ascending layer outputs", fix)
        return
    if count is not None and count != len(layers):
        yield field("error", "num_aux_hidden_states", count, len(layers), f"{key} lists {len(layers)}")
    if len(layers) == 1:
        yield field("error", key, layers, "two or more layers", "of a single state SGLang skips fc")
    yield from _other_list(inside, top, layers, engine)
    if served is None:
        return
    if layers[-1] > served.num_hidden_layers - 2:
        yield field("error", key, layers, f"at most {served.num_hidden_layers - 2}",
                    f"of {served.num_hidden_layers} layers the last output is never captured")  # fmt: skip
    if layers[-1] < served.num_hidden_layers / 10:
        yield field("warning", key, layers, "low, middle and high layers",
                    f"all among the first of {served.num_hidden_layers}: indices into a captured tuple?")  # fmt: skip
    if engine.name == "sglang" and served.model_type in fields.AS_INPUTS and layers[0] != 1:
        yield field("error", key, layers, "a list that begins with 1",
                    f"SGLang takes any other as layer inputs on a {served.model_type} target")  # fmt: skip
    if engine.name == "sglang" and served.model_type in fields.OTHER_STATES:
        yield field("error", key, served.model_type, "another family of targets",
                    "SGLang captures states without the residual on it")  # fmt: skip


def _other_list(inside: object, top: object, layers: list[int], engine: Engine) -> Iterator[Finding]:
    """Outputs in eagle_config, inputs at the top: the same layers in both, so that every engine reads them right."""
    outputs, inputs = inside.get(AUX) if isinstance(inside, dict) else None, [k + 1 for k in layers]
    if engine.aux == "nested" and top != inputs:
        yield field("warning" if top is None else "error", AUX, repr(top), inputs,
                    "vLLM and llama.cpp read this list, as layer inputs: one more than the nested one")  # fmt: skip
    elif engine.aux == "either" and top is None:
        yield field("error", AUX, "absent", "the list at the top, one more than SGLang's",
                    f"{engine.title} reads eagle_config's {outputs} as layer inputs")  # fmt: skip
    elif engine.aux == "either" and outputs not in (None, layers):
        yield field(
            "error", f"eagle_config.{AUX}", outputs, layers, "SGLang reads this list, as layer outputs"
        )


def _fixed(config: dict, served: TargetShape | None, engine: Engine) -> Iterator[Finding]:
    trained = fields.aux_layers(config)
    if served is not None and isinstance(trained, list) and trained != list(served.default_aux_layers):
        honour = sorted({engines.TITLES[e.name] for e in engines.ENGINES if e.aux != "fixed"})
        yield field("error", f"eagle_config.{AUX}", trained, list(served.default_aux_layers),
                    f"{engine.title} captures these whatever it says; {', '.join(honour)} read it")  # fmt: skip


def _rope(config: dict) -> Iterator[Finding]:
    found = {}
    for schema in ("rope_theta", "rope_parameters"):
        try:
            found[schema] = fields.rope_of(config, schema)
        except ConfigError as error:
            yield field("error", schema, str(error).partition(": ")[2], "a RoPE that SGLang knows", "set it")
            return
    old, new = found.values()
    if old is None and new is None:
        yield field("error", "rope_theta", "absent", "the draft's theta", "readers would take 10000")
    elif old is None or new is None:
        missing = "rope_theta" if old is None else "rope_parameters"
        fix = "write RoPE under both names: each is read somewhere"
        yield field("warning", missing, "absent", old or new, fix)
    elif old != new:
        fix = "rope_theta and rope_scaling say otherwise: set both alike"
        yield field("error", "rope_parameters", new, old, fix)


def _beside(config: dict, served: TargetShape, target: str | Path) -> Iterator[Finding]:
    for key in ("vocab_size", "hidden_size"):
        if config[key] != (wanted := getattr(served, key)):
            yield field(
                "error", key, config[key], wanted, "it is the target's: another target was trained on"
            )
    if config["max_position_embeddings"] < (wanted := served.max_position_embeddings):
        fix = "SGLang loads the draft with the target's context length and refuses a shorter one"
        found = config["max_position_embeddings"]
        yield field("error", "max_position_embeddings", found, f"the target's {wanted}", fix)
    theta = (fields.rope_of(config, "rope_parameters") or fields.rope_of(config, "rope_theta") or (None,))[0]
    if theta not in (None, served.rope_theta):
        fix = "right if the draft was trained so; engines that share one RoPE table would serve it with the target's"
        yield field("warning", "rope_theta", theta, f"the target's {served.rope_theta}", fix)
    declared = config.get("torch_dtype") or config.get("dtype")
    raw = json.loads((Path(target) / convert.CONFIG).read_text())
    theirs = raw.get("torch_dtype") or raw.get("dtype")
    if None not in (declared, theirs) and theirs != declared:
        fix = "one --dtype casts both: give the one that the draft's features were computed in"
        yield field("note", "torch_dtype", declared, f"the target's {theirs}", fix)
