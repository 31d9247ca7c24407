"""The command that serves a draft: what it asks for, and what of that does not go with the draft."""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from bridge import engines
from bridge.finding import Finding, flag
from eagle3_jax.decode.drafting import Drafting, drafting
from eagle3_jax.errors import ConfigError

DRAFT_PATH = ("speculative_draft_model_path", "speculative_draft_model")
TENSOR_PARALLEL = ("tp", "tp_size", "tensor_parallel_size")
ALIASES = {"spec_algo": "speculative_algorithm", "sc": "speculative_config"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A parsed command. `options` has a flag's name with underscores, and its value, "" for a switch."""

    engine: str  # engines.py's name
    options: dict[str, str]
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    def get(self, *names: str) -> str | None:
        return next((self.options[n] for n in names if n in self.options), None)

    @property
    def speculation(self) -> dict:
        """vLLM's --speculative-config. Raises ConfigError."""
        text = self.options.get("speculative_config", "{}")
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ConfigError(f"--speculative-config {text!r}: a JSON object is wanted")
        return found

    @property
    def algorithm(self) -> str | None:
        """As the engine spells it; None where it does not speculate."""
        if self.engine == "vllm":
            return self.speculation.get("method")
        return self.get("speculative_algorithm")

    @property
    def steps(self) -> int | None:
        """Drafts a round, None where the line does not say."""
        told = (
            self.speculation.get("num_speculative_tokens")
            if self.engine == "vllm"
            else self.get("speculative_num_steps")
        )
        return None if told is None else _number("steps", told)


def parse(line: str) -> Launch:
    """Reads a command line of SGLang, sglang-jax or vLLM. Raises ConfigError."""
    try:
        words = shlex.split(line.replace("\\\n", " "))
    except ValueError as error:
        raise ConfigError(f"launch line: {error}: {line[:80]!r}") from None
    engine = _engine(words)
    if engine is None:
        raise ConfigError(
            f"launch line {line[:80]!r}: one of `python -m sglang.launch_server`, `sglang serve`, "
            "`python -m sgl_jax.launch_server`, `vllm serve` or `python -m vllm...` is wanted"
        )
    environment = dict(w.split("=", 1) for w in words if re.match(r"^[A-Z_][A-Z0-9_]*=", w))
    options, at = {}, 0
    while at < len(words):
        word, value = words[at], ""
        at += 1
        if not word.startswith("-") or word in ("-m", "-u"):
            continue
        name = word.lstrip("-")
        if "=" in name:
            name, value = name.split("=", 1)
        elif at < len(words) and not re.match(r"^-{1,2}[A-Za-z]", words[at]):
            value = words[at]
            at += 1
        name = name.replace("-", "_")
        options[ALIASES.get(name, name)] = value
    return Launch(engine, options, environment)


def _engine(words: list[str]) -> str | None:
    for word in words:
        if "=" not in word and not word.startswith("-"):
            for part, name in (("sgl_jax", "sglang-jax"), ("sglang", "sglang"), ("vllm", "vllm")):
                if re.search(rf"(^|/){part}($|\.)", word):
                    return name
    return None


def findings(launch: Launch, config: dict, directory: str | Path) -> Iterator[Finding]:
    """What a command does to this draft that its writer did not mean."""
    if launch.engine == "vllm":
        yield from _vllm(launch, config)
    else:
        yield from _algorithm(launch, config, directory)
        yield from _drafting(launch, config)
        yield from _others(launch)
    yield from _dtype(launch, config)
    yield from _length(launch, config)


def _algorithm(launch: Launch, config: dict, directory: str | Path) -> Iterator[Finding]:
    name, found = "--speculative-algorithm", launch.algorithm
    if found is None:
        yield flag("error", name, "absent", engines.ALGORITHM, "the server would not speculate")
    elif found.upper() in ("EAGLE", "NEXTN"):
        fix = (
            "it is an EAGLE-3 draft: as EAGLE it is fed the target's last state in place of its aux states, past fc, "
            "with the target's head in place of its own; the server starts, and accepts nothing"
        )
        yield flag("error", name, found, engines.ALGORITHM, fix)
    elif found.upper() != engines.ALGORITHM:
        yield flag("error", name, found, engines.ALGORITHM, "another way to speculate, without this draft")
    path = launch.get(*DRAFT_PATH)
    if path is None:
        fix = "SGLang would load the target as its own draft, and stop"
        yield flag("error", "--speculative-draft-model-path", "absent", str(directory), fix)
    elif Path(path).name != Path(directory).resolve().name:
        fix = "another directory than the one that is checked"
        yield flag("warning", "--speculative-draft-model-path", path, str(directory), fix)


def _drafting(launch: Launch, config: dict) -> Iterator[Finding]:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    told = [launch.get(n) for n in names]
    words = " ".join("--" + n.replace("_", "-") for n in names)
    if None in told:
        if told == [None] * 3:
            fix = (
                "SGLang chooses by the target's family: 5, 4 and 8 for Llama, which few drafts are best with"
            )
            yield flag("note", words, "absent", "all three", fix)
        else:
            missing = [n for n, x in zip(names, told, strict=True) if x is None]
            fix = "SGLang wants all three or none"
            yield flag("error", "--" + missing[0].replace("_", "-"), "absent", "all three", fix)
        return
    steps, topk, tokens = (_number(n, x) for n, x in zip(names, told, strict=True))
    try:
        plan: Drafting = drafting(steps, topk, tokens)
    except ConfigError as error:
        severity = "warning" if topk == 1 and steps > 0 else "error"
        yield flag(severity, words, f"{steps} {topk} {tokens}", "three that go together", str(error))
        return
    size = config.get("draft_vocab_size")
    if type(size) is int and plan.topk > size:
        yield flag(
            "error", "--speculative-eagle-topk", topk, f"at most {size}", "the draft's vocabulary is smaller"
        )


def _others(launch: Launch) -> Iterator[Finding]:
    if launch.get("speculative_token_map") is not None:
        parallel = _number("tp", launch.get(*TENSOR_PARALLEL) or 1)
        fix = "EAGLE-3 takes its map from the draft's d2t, and leaves this one out with a warning" + (
            "; where it was used, with several ranks, it indexed a head that each holds a part of"
            if parallel > 1
            else ""
        )
        yield flag(
            "warning", "--speculative-token-map", launch.options["speculative_token_map"], "absent", fix
        )
    if launch.get("quantization") and not launch.get("speculative_draft_model_quantization"):
        fix = "the draft is quantised like the target unless told otherwise"
        yield flag("warning", "--speculative-draft-model-quantization", "absent", "unquant", fix)
    for name in ("speculative_accept_threshold_single", "speculative_accept_threshold_acc"):
        if (value := launch.get(name)) and _float(name, value) < 1:
            fix = "below 1 drafts are accepted that the target would not have said: the accept length says nothing"
            yield flag("warning", "--" + name.replace("_", "-"), value, 1, fix)
    parallel = _number("tp", launch.get(*TENSOR_PARALLEL) or 1)
    if launch.engine == "sglang-jax" and parallel > 1:
        yield flag("warning", "--tp-size", parallel, 1, "of sglang-jax nothing beyond one device was read")


def _vllm(launch: Launch, config: dict) -> Iterator[Finding]:
    name, told = "--speculative-config", launch.speculation
    if not told:
        yield flag("error", name, "absent", '{"method": "eagle3", ...}', "the server would not speculate")
        return
    if told.get("method") != "eagle3":
        fix = "without it vLLM guesses from the directory's name, and takes one without eagle3 in it for a plain model"
        yield flag("error", name, f"method {told.get('method', 'absent')}", "method eagle3", fix)
    if "model" not in told:
        yield flag("error", name, "no model", "model: the draft's directory", "vLLM would not find the draft")
    if "num_speculative_tokens" not in told:
        yield flag("error", name, "no num_speculative_tokens", "the drafts a round", "vLLM stops without")


def _dtype(launch: Launch, config: dict) -> Iterator[Finding]:
    found, declared = launch.get("dtype"), config.get("torch_dtype") or config.get("dtype")
    if declared is None:
        return
    if found in (None, "auto"):
        if declared == "float32":
            fix = "auto casts a float32 draft to float16, and its states overflow where the target's do"
            yield flag("error", "--dtype", found or "absent", "float32", fix)
    elif {"half": "float16", "float": "float32"}.get(found, found) != declared:
        fix = "the draft's features were computed in that dtype; in another its states are not quite those it knows"
        yield flag("warning", "--dtype", found, declared, fix)


def _length(launch: Launch, config: dict) -> Iterator[Finding]:
    told, most = launch.get("context_length", "max_model_len"), config.get("max_position_embeddings")
    if told is None or type(most) is not int:
        return
    length = _number("context-length", told)
    trained = (config.get("provenance") or {}).get("trained_length")
    if length > most:
        fix = f"the draft's max_position_embeddings is {most}: SGLang refuses to start"
        yield flag("error", "--context-length", length, f"at most {most}", fix)
    elif type(trained) is int and length > trained:
        fix = f"trained on texts of at most {trained} tokens: expect a lower accept length beyond, measure it there"
        yield flag("note", "--context-length", length, trained, fix)


def _number(name: str, text: object) -> int:
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ConfigError(f"launch line: {name} {text!r}: a whole number is wanted") from None


def _float(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"launch line: --{name.replace('_', '-')} {text!r}: a number is wanted") from None
