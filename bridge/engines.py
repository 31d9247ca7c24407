"""What each engine, and which version of it, reads of a draft directory, as data.

Read in the engines' source; SGLang 0.5.23 and vLLM 0.32.0 were also run (docs/engines.md). `check` judges a directory
by these rules, `doctor` loads it by them.
"""

import dataclasses
import re

from eagle3_jax.errors import ConfigError

ALGORITHM = "EAGLE3"  # `EAGLE` starts and serves with the same directory, but accepts nothing
OPTIONS = ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")
FIELDS = {"fc_norm": ("fc_norm", "use_aux_norm"), "norm_before_fc": ("norm_before_fc",)}  # other spellings


@dataclasses.dataclass(frozen=True)
class Engine:
    """The rules of one engine from `since` on, up to its next entry in ENGINES."""

    name: str
    since: str
    layer: tuple[str, ...] = ("midlayer.", "layers.0.")  # how the decoder layer's tensors may begin
    model_prefix: bool = False  # also finds `model.NAME`
    extra: str = "drops"  # what it does with a tensor that it does not know: "drops", "warns" or "refuses"
    missing: str = (
        "leaves"  # what it does with a parameter that nothing fills: "leaves" (random), "warns", "refuses"
    )
    embedding: str = (
        "target"  # whose embedding it serves with where the file has one, too: "target" or "file"
    )
    aux: str = "nested"  # "nested": outputs, in eagle_config; "either": inputs, at the top, else nested;
    #                      "top": inputs, at the top alone; "fixed": its default layers, whatever the config says
    options: tuple[str, ...] = OPTIONS  # what it honours
    states: int | None = None  # aux states that it can take, None: any number
    layers: bool = True  # whether it runs more than one decoder layer
    architectures: tuple[str, ...] = ("LlamaForCausalLMEagle3",)
    nested: bool = False  # reads speculators' config, the draft's sizes under transformer_layer_config

    @property
    def title(self) -> str:
        return f"{TITLES[self.name]} {self.since}"

    def loads(self, name: str) -> str | None:
        """Our name of the tensor into which it loads the file's `name`; None where it does not know that name."""
        if self.model_prefix and name.startswith("model.") and not name.startswith("model.lm_head."):
            name = name.removeprefix("model.")
        if self.name == "sglang":  # it looks for these words anywhere in a name
            name = next((word for word in ("d2t", "t2d") if word in name), name)
            for old, new in LEGACY_NORMS:
                name = name.replace(old, new) if "fc_norm" in self.options else name
        if name.startswith(("midlayer.", "layers.")):
            found = next((p for p in self.layer if name.startswith(p)), None)
            return found and f"midlayer.{name.removeprefix(found)}"
        return name

    def effect(self, known: bool) -> str:
        """What it does with a tensor under a name that it does not know, or (`known`) may know it by."""
        if known:
            return f"{self.title} loads it, other engines do not"
        return {
            "drops": f"{self.title} drops it without a word",
            "warns": f"{self.title} leaves it out with a warning",
            "refuses": f"{self.title} refuses the file",
        }[self.extra]


TITLES = {
    "sglang": "SGLang", "vllm": "vLLM", "sglang-jax": "sglang-jax", "tpu-inference": "tpu-inference",
    "llama.cpp": "llama.cpp", "speculators": "speculators",
}  # fmt: skip
LEGACY_NORMS = (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2"))
NEW_SGLANG = dict(model_prefix=True)

# An engine's entries are in the order of its versions.
ENGINES = (
    Engine("sglang", "0.5.0", layer=("midlayer.",), options=(), states=3, layers=False, **NEW_SGLANG),
    Engine("sglang", "0.5.12", options=("fc_norm", "norm_output"), **NEW_SGLANG),
    Engine("sglang", "0.5.18", options=("fc_norm", "norm_output", "norm_before_fc"), **NEW_SGLANG),
    Engine(
        "vllm", "0.32.0", extra="refuses", embedding="file", aux="either",
        architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM", "Eagle3Speculator",
                       "Eagle3DraftModel"),
    ),
    Engine("sglang-jax", "0.0.2", layer=("midlayer.",), missing="warns", aux="fixed", options=(), states=3,
           layers=False),
    Engine("tpu-inference", "0.32.0", layer=("midlayer.",), extra="refuses", embedding="file", aux="fixed",
           options=("norm_before_residual",), states=3, layers=False,
           architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")),
    Engine("llama.cpp", "b11434", extra="refuses", missing="refuses", embedding="file", aux="top",
           options=("norm_before_residual", "norm_before_fc"), states=3, layers=False,
           architectures=("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")),
    Engine("speculators", "0.9.0", layer=("layers.0.",), extra="warns", missing="warns", embedding="file", aux="top",
           nested=True, architectures=("Eagle3Speculator", "Eagle3DraftModel")),
)  # fmt: skip
DEFAULT = "sglang:0.5.23"


def find(text: str = DEFAULT) -> Engine:
    """The rules for "NAME" or "NAME:VERSION"; `since` is then that version. Raises ConfigError."""
    name, _, version = text.partition(":")
    known = [e for e in ENGINES if e.name == name]
    if not known:
        raise ConfigError(f"engine {text!r}: known are {', '.join(TITLES)}, each with :VERSION if wanted")
    if not version:
        return known[-1] if name != "sglang" else find(DEFAULT)
    wanted = _numbers(version)
    if not wanted:
        raise ConfigError(f"engine {text!r}: {version!r} is no version; for example {DEFAULT}")
    fitting = [e for e in known if _numbers(e.since) <= wanted]
    if not fitting:
        raise ConfigError(f"engine {text!r}: nothing is known of versions before {known[0].since}")
    return dataclasses.replace(fitting[-1], since=version)


def loading(name: str) -> list[str]:
    """Titles of the engines that find a tensor under this name, SGLang in the version of DEFAULT."""
    newest = {e.name: e for e in ENGINES}
    return [
        e.title if e.name == "sglang" else TITLES[e.name]
        for e in newest.values()
        if e.loads(name) is not None
    ]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version)[:3])


# Other spellings of our names, as published drafts have them.
SPELLINGS = (
    (r"^(model\.)?midlayer\.0\.", "midlayer."),
    (r"^(model\.)?midlayer\.", "midlayer."),
    (r"^(model\.)?layers\.0\.", "midlayer."),
    (r"^(model\.)?decoder\.(layers\.0\.)?", "midlayer."),
    (r"^(model\.)?fcs\.", "fc."),
    (r"^(model\.)?aux_norm_low\.", "fc_norm.0."),
    (r"^(model\.)?aux_norm_mid\.", "fc_norm.1."),
    (r"^(model\.)?aux_norm_high\.", "fc_norm.2."),
    (r"^(draft_model|module|eagle|model)\.", ""),
)


def spelled(name: str) -> str:
    """Our name for what a tensor may be meant as; the name itself where it has no other spelling."""
    for pattern, ours in SPELLINGS:
        if re.search(pattern, name):
            return re.sub(pattern, ours, name)
    return name
