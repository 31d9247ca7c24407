"""What a report shows, read from the run's files and from the data it names; what is not there is said, not missed."""

import dataclasses
import json
from pathlib import Path

from rich.text import Text

from eagle3_jax.data import chat, features, prepare
from eagle3_jax.errors import UserError
from eagle3_jax.target.shape import TargetShape
from eagle3_jax.train import checkpoint, metrics, setup
from eagle3_jax.train.inspect import Report, inspect

CONVERSATIONS, TOKENS = 3, 700  # previewed, and of each at most


@dataclasses.dataclass
class Preview:
    number: int
    parts: list[tuple[str, int]]  # text and its colour: 0 not supervised, else 1 or 2
    tokens: int
    supervised: int
    shown: int


@dataclasses.dataclass
class Found:
    """All of a run. `missing` has a sentence for each thing that is not there: what, and what brings it."""

    run: Path
    meta: dict  # of the newest checkpoint
    lines: list[dict]
    evaluations: list[dict]
    result: dict | None = None
    untrained: dict | None = None
    curve: list[dict] | None = None
    inspection: Report | None = None
    card: dict | None = None
    previews: list[Preview] = dataclasses.field(default_factory=list)
    missing: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> dict:
        return self.meta["config"]

    @property
    def facts(self) -> dict:
        return self.meta["manifest"]["facts"]


def collect(run: str | Path) -> Found:
    """Raises CheckpointError where there is no run."""
    run = Path(run)
    found = Found(run, checkpoint.read_meta(run), metrics.read(run), metrics.read_evaluations(run))
    found.result = _json(found, "evaluate.json", f"to measure the accept length: eagle3 evaluate {run}")
    found.untrained = _json(found, "evaluate_untrained.json")
    found.curve = _json(found, "curve.json")
    if not found.lines:
        found.missing["metrics.jsonl"] = "no step is logged yet: one every train.log_every steps"
    if not found.evaluations:
        found.missing["evaluations.jsonl"] = (
            "nothing was measured while training: set train.evaluate_every, and data.held_out above 0"
        )
    elif not any(e.get("held_out") for e in found.evaluations):
        found.missing["held-out loss"] = "no conversations are held out: set data.held_out above 0"
    if found.evaluations and not any(e.get("accept_length") for e in found.evaluations):
        found.missing["accept length while training"] = (
            "needs held-out conversations with a prompt, evaluate.held_out_prompts, and a target that can be run here"
        )
    try:
        found.inspection = inspect(run)
    except UserError as error:
        found.missing["inspection"] = f"not verified: {error}"
    try:
        _data(found)
    except UserError as error:
        found.missing["prepared data"] = str(error)
    return found


def _json(found: Found, name: str, remedy: str = ""):
    path = found.run / name
    if not path.exists():
        if remedy:
            found.missing[name] = remedy
        return None
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        found.missing[name] = f"{path}: not JSON ({error})"
        return None


def _data(found: Found) -> None:
    """The data card and previews, if the data is still that of the run. Raises UserError."""
    data = found.config.get("data")
    if data is None:
        return
    tokens = prepare.load(data["prepared"])
    _same(found, data["prepared"], tokens.card["fingerprint"])
    found.card, source = tokens.card, tokens
    if data["answers"] == "target":  # prepared are the prompts alone
        source = features.open_store(found.config["store"]["path"])
        _same(found, found.config["store"]["path"], source.card["data"])
    target = found.meta["target"]
    if not Path(target["path"]).is_dir():
        raise UserError(f"{target['path']}: target not found, so that tokens cannot be shown as text")
    files = setup.TargetFiles(Path(target["path"]), TargetShape(**target["shape"]))
    tokenizer = setup.tokenizer(files)
    for i, (a, b) in enumerate(zip(source.offsets[:CONVERSATIONS], source.offsets[1:], strict=False)):
        span, shown = source.span[a:b], min(int(b - a), TOKENS)
        text = chat.preview(tokenizer, source.ids[a : a + shown], span[:shown])
        found.previews.append(Preview(i, _parts(text), int(b - a), int((span > 0).sum()), shown))


def _same(found: Found, path: str, fingerprint: str) -> None:
    if fingerprint != found.facts["data"]["fingerprint"]:
        raise UserError(f"{path} now holds other data than the run was trained on")


def _parts(text: Text) -> list[tuple[str, int]]:
    parts, at = [], 0
    for span in text.spans:
        parts += [(text.plain[at : span.start], 0)]
        parts += [(text.plain[span.start : span.end], 1 + chat.COLOURS.index(span.style))]
        at = span.end
    return [part for part in [*parts, (text.plain[at:], 0)] if part[0]]
