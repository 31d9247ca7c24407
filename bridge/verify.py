"""Does the real SGLang do what `eagle3 evaluate` decoded? Every proposal, every accept count, every answer.

The run's draft is exported and served on the CPU, where the stand-in for SGLang's kernels (sglang_cpu) writes down
every tree that the engine verifies. It does not say for which prompt: all of them together have to be ours.
"""

import collections
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bridge import convert, serve
from eagle3_jax.commands import ANSWERS, RESULT
from eagle3_jax.data import chat
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.errors import ConfigError
from eagle3_jax.target import shape
from eagle3_jax.train import setup

# What has to be equal in evaluate.json and in the server's counters.
COUNTERS = ("accept_length", "sglang_request", "sglang_server", "verify_forwards", "accepted_drafts")
ROUND = ("bonus", "drafts", "parents", "accepted")
SPARE = 64  # positions beside the longest prompt and its answer


@dataclasses.dataclass(frozen=True)
class Report:
    ours: dict  # evaluate.json, of the prompts that were served
    served: dict  # see serve.served
    dtype: str  # that SGLang computed in
    differences: tuple["Difference", ...]  # at most one a prompt, the first
    prompts: int
    rounds: int  # of ours
    proposals: int  # tokens drafted in them

    @property
    def ok(self) -> bool:
        return not self.differences and all(_close(self.ours[k], self.served[k]) for k in COUNTERS)

    def __str__(self) -> str:
        s = self.ours["settings"]
        equal = self.prompts - len(self.differences)
        lines = [f"{'':28s} {'ours':>10s} {'SGLang':>10s}"]
        for key in COUNTERS:
            style = ",d" if isinstance(self.ours[key], int) else ".4f"
            lines.append(
                f"{key.replace('_', ' '):28s} {self.ours[key]:>10{style}} {self.served[key]:>10{style}}"
            )
        lines.append(
            f"{equal} of {self.prompts} prompts equal in every proposal, accept count and token: "
            f"{self.proposals:,} proposals in {self.rounds:,} rounds, {s['steps']}-{s['topk']}-{s['tokens']}, "
            f"ours in {s['dtype']}, SGLang in {self.dtype}"
        )
        lines += [f"first difference of prompt {d.prompt}: {d.what}" for d in self.differences[:5]]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where an answer first parts from ours."""

    prompt: str  # its id
    what: str


def verify(
    run: str | Path, *, dtype: str | None = None, max_prompts: int | None = None, timeout: float = 600
) -> Report:
    """Serve the draft of a run's last evaluation to the same prompts and compare all that was decoded.

    Raises ConfigError for a run that was not evaluated, UserError where the server fails.
    """
    from eagle3_jax.train import checkpoint  # Orbax is slow to import and only needed here

    result, answers = evaluated(run)
    answers = answers[:max_prompts]
    settings, draft = result["settings"], checkpoint.load_draft(run, result["step"])
    files = setup.TargetFiles(Path(result["target"]), shape.read(result["target"]))
    prompts, ends = [a["prompt"] for a in answers], chat.end_tokens(setup.tokenizer(files))
    longest = max(map(len, prompts)) + settings["max_new_tokens"] + SPARE
    with tempfile.TemporaryDirectory() as folder:
        directory, trace = Path(folder) / "draft", Path(folder) / "trace"
        convert.write(draft, run, directory)
        plan = Drafting(settings["steps"], settings["topk"], settings["tokens"])
        server = serve.plan(
            directory, files.directory, "cpu", plan, dtype=dtype or settings["dtype"],
            context_length=min(longest, files.shape.max_position_embeddings),
        )  # fmt: skip
        server = dataclasses.replace(server, trace=trace)
        with serve.running(server, timeout) as url:
            served = serve.measure(
                url, prompts, settings["max_new_tokens"], ends, serve.TOGETHER["cpu"], trace
            )
    return compare(result, answers, served, server.dtype)


def compare(result: dict, answers: Sequence[dict], served: dict, dtype: str) -> Report:
    """Lines of answers.jsonl with what `serve.measure` found for them, rounds included."""
    rounds = [r for a in answers for r in a["rounds"]]
    accepted, forwards = sum(r["accepted"] for r in rounds), len(rounds)
    length = 1 + accepted / max(forwards, 1)
    ours = result | {
        "accept_length": length, "sglang_server": length, "verify_forwards": forwards, "accepted_drafts": accepted,
        "sglang_request": sum(len(a["tokens"]) for a in answers) / max(forwards, 1),
    }  # fmt: skip
    theirs, found = collections.Counter(map(_key, served["rounds"])), []
    for a, tokens, pair in zip(answers, served["tokens"], served["pairs"], strict=True):
        if what := difference(a, tokens, pair, theirs):
            found.append(Difference(str(a["id"]), what))
    proposals = sum(len(r["drafts"]) for r in rounds)
    return Report(ours, served, dtype, tuple(found), len(answers), forwards, proposals)


def difference(
    ours: dict, tokens: Sequence[int], pair: Sequence[int], theirs: collections.Counter
) -> str | None:
    """The first difference between a line of answers.jsonl and the engine's answer, its accepted drafts and verifies.

    `theirs` are the engine's rounds of all prompts; those of this one are taken out of it.
    """
    missing = None
    for i, r in enumerate(ours["rounds"]):
        if theirs[_key(r)]:
            theirs[_key(r)] -= 1
        elif missing is None:
            missing = f"SGLang verified nothing like round {i}: {', '.join(f'{k} {r[k]}' for k in ROUND)}"
    for t, (mine, its) in enumerate(zip(ours["tokens"], tokens, strict=False)):
        if mine != its:
            logit, runner_up, other = ours["scores"][t]
            gap = f", of logits {(logit - other) / abs(logit):.0e} apart" if runner_up == its else ""
            return f"token {t}: ours {mine}, SGLang {its}{gap}"
    if len(ours["tokens"]) != len(tokens):
        return f"ours has {len(ours['tokens'])} tokens, SGLang {len(tokens)}"
    mine = [sum(r["accepted"] for r in ours["rounds"]), len(ours["rounds"])]
    if mine != list(pair):
        return f"accepted drafts and verifies: ours {mine}, SGLang {list(pair)}"
    return missing


def _key(r: dict) -> str:
    return json.dumps([r[k] for k in ROUND])


def evaluated(run: str | Path) -> tuple[dict, list[dict]]:
    """evaluate.json of a run and the lines of its answers.jsonl. Raises ConfigError."""
    run = Path(run)
    for name in (RESULT, ANSWERS):
        if not (run / name).is_file():
            raise ConfigError(f"{run / name}: not found; `eagle3 evaluate {run}` writes it")
    try:
        result = json.loads((run / RESULT).read_text())
        answers = [json.loads(line) for line in (run / ANSWERS).read_text().splitlines()]
        rounds = sum(len(a["rounds"]) for a in answers)
        if "target" not in result:
            raise ValueError("no target is named")
        if rounds != result["verify_forwards"]:
            raise ValueError(f"{rounds} rounds in one, {result['verify_forwards']} in the other")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{run / RESULT} and {ANSWERS} are not of one evaluation ({error}); run `eagle3 evaluate {run}` again"
        ) from None
    return result, answers


def _close(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-3  # the server rounds its average
