"""What each `eagle3` command does, as functions of a RunConfig; cli.py only parses and prints."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from eagle3_jax import axes, defaults
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat, features, prepare
from eagle3_jax.decode import evaluate as evaluation
from eagle3_jax.decode.speculate import DraftWeights, Speculator
from eagle3_jax.decode.walk import Texts, walk
from eagle3_jax.draft import model
from eagle3_jax.errors import ConfigError, DataError
from eagle3_jax.report import page
from eagle3_jax.target import weights
from eagle3_jax.target.capture import capture as capture_features
from eagle3_jax.target.model import Target
from eagle3_jax.train import checkpoint, metrics, setup

RESULT, ANSWERS, REPORT = "evaluate.json", "answers.jsonl", "report.html"  # in the run directory


def prepare_data(config: RunConfig) -> dict:
    """`eagle3 prepare`: the data card."""
    files = setup.find_target(config)
    texts = [p["prompt"] for p in setup.evaluation_prompts(config)]
    source = defaults.resolve_conversations(config.data.path)
    return prepare.prepare(
        config, setup.tokenizer(files), texts, source=source, vocab_size=files.shape.vocab_size
    )


def capture(config: RunConfig) -> features.Store:
    """`eagle3 capture`: the finished feature store."""
    files = setup.find_target(config)
    mesh = axes.make_mesh(config.mesh.data, config.mesh.model)
    target, params = setup.load_target(config, files, mesh)
    ends = chat.end_tokens(setup.tokenizer(files))
    tokens = prepare.load(config.data.prepared)
    return capture_features(config, target, params, tokens, ends, weights.digest(files.directory), mesh)


def evaluate(
    run: str | Path, overrides: tuple[str, ...] = (), step: int | None = None, save_as: str | None = None
) -> dict:
    """`eagle3 evaluate RUN`: what evaluate.json holds. `save_as` also writes it into the run.

    `overrides` may change target.path, target.dtype and the evaluate settings of the run's own configuration.
    """
    return evaluator(run, overrides)(step, save_as)


def evaluator(run: str | Path, overrides: tuple[str, ...] = ()) -> Callable[[int | None, str | None], dict]:
    """`evaluate` as a function of step and `save_as`, with the target loaded and compiled for once."""
    axes.virtual_cpus(os.cpu_count() or 1)  # reading the run already puts the devices to use
    meta = checkpoint.load_draft(run).meta
    config = configuration.override(configuration.from_dict(meta["config"], str(run)), overrides)
    mesh = axes.data_mesh(config.mesh.data)
    files, target, params = _serving_target(config, meta, mesh)
    tok = setup.tokenizer(files)
    prompts = [
        p | {"ids": chat.prompt(tok, (("user", p["prompt"]),)).tolist()}
        for p in defaults.evaluation_prompts(config.evaluate.prompts)[: config.evaluate.max_prompts]
    ]
    e, plan = config.evaluate, config.evaluate.drafting()
    longest = max(len(p["ids"]) for p in prompts) + e.max_new_tokens + plan.steps + 1
    if longest > target.shape.max_position_embeddings:
        raise DataError(
            f"a prompt and evaluate.max_new_tokens={e.max_new_tokens} take {longest} positions, "
            f"the target has {target.shape.max_position_embeddings}"
        )
    speculator = Speculator(target, plan, mesh)

    def at(step: int | None, save_as: str | None) -> dict:
        draft = checkpoint.load_draft(run, step)
        result, answers = evaluation.evaluate(
            speculator, params, _serving_draft(draft), prompts, chat.end_tokens(tok), mesh,
            max_new_tokens=e.max_new_tokens, batch=e.batch, label=f"evaluate step {draft.step}",
        )  # fmt: skip
        head = {"accept_length": result.pop("accept_length"), "step": draft.step, "run": str(run)}
        result = head | {"target": str(files.directory)} | result
        if save_as is not None:
            save_json(Path(run) / save_as, result)
        if save_as == RESULT:
            pairs = zip(prompts, answers, strict=True)
            lines = [
                json.dumps({"id": p["id"], "prompt": p["ids"]} | dataclasses.asdict(a)) for p, a in pairs
            ]
            _save(Path(run) / ANSWERS, "\n".join(lines) + "\n")
        return result

    return at


def curve(run: str | Path) -> list[dict]:
    """Accept length of every checkpoint with a chain of `evaluate.steps`: step, minutes of training, value.

    On the texts of the last evaluation, which are the target's, whatever drafted them.
    """
    answers = [json.loads(line) for line in (Path(run) / ANSWERS).read_text().splitlines()]
    minutes = {0: 0.0} | {line["step"]: line["seconds"] / 60 for line in metrics.read(run)}
    drafts = [checkpoint.load_draft(run, step) for step in checkpoint.steps_of(run)]
    config = configuration.from_dict(drafts[0].meta["config"], str(run))
    mesh = axes.data_mesh(config.mesh.data)
    _, target, params = _serving_target(config, drafts[0].meta, mesh)
    texts = Texts(target, params, [(a["prompt"], a["tokens"]) for a in answers], config.evaluate.batch, mesh)
    lengths = walk(texts, map(_serving_draft, drafts), config.evaluate.steps)
    return [
        dict(step=d.step, minutes=minutes[d.step], accept_length=x)
        for d, x in zip(drafts, lengths, strict=True)
    ]


def _serving_target(config: RunConfig, meta: dict, mesh):
    """The target that a draft was trained for: its files, model and parameters. Raises DataError for another one."""
    files = setup.find_target(config)
    now, then = weights.digest(files.directory), meta["target"]["weights_digest"]
    if now != then:
        raise DataError(
            f"{files.directory}: weights {now[:12]}, but the draft was trained for weights {then[:12]}"
        )
    target = Target(files.shape, tuple(meta["aux_layers"]), config.target.dtype)
    return files, target, weights.load(files.directory, target, mesh)


def _serving_draft(draft: checkpoint.LoadedDraft) -> DraftWeights:
    """In the dtype that it is exported in, whatever it is then computed in."""
    graph, _, _ = model.abstract(draft.shape)
    exported = draft.meta["config"]["target"]["dtype"]
    params = jax.tree.map(lambda x: jnp.asarray(x, exported), draft.params)
    return DraftWeights(graph, params, jnp.asarray(draft.embedding), jnp.asarray(draft.d2t, jnp.int32))


def report(run: str | Path, out: str | Path | None = None) -> Path:
    """`eagle3 report`: the file that it wrote."""
    out = Path(run) / REPORT if out is None else Path(out)
    if out.is_dir():
        raise ConfigError(f"--out {out}: a directory, a file is wanted")
    _save(out, page.render(run))
    return out


def save_json(path: Path, value) -> None:
    _save(path, json.dumps(value, indent=2) + "\n")


def _save(path: Path, text: str) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def describe(card: dict) -> str:
    """The data card in a few lines."""
    refused = ", ".join(f"{n:,} {reason}" for reason, n in card["refused"].items()) or "none"
    file, held, clean = card["file"], card["held_out"], card["contamination"]
    lines = [
        f"conversations: {card['conversations']:,} prepared of {file['complete']:,} complete ones in the file",
        f"refused: {refused} (listed in refused.jsonl)",
        f"tokens: {card['tokens']:,}, supervised {card['supervised']:,}",
        f"held out: {held['conversations']:,} conversations ({held['share']:.1%})",
        f"evaluation prompts: {clean['prompts']} checked, {clean['dropped']} conversations dropped, "
        f"largest overlap left {clean['max_overlap']:.1%}",
    ]
    if file["damage"]:
        lines.insert(
            1,
            f"the file is damaged: {file['damage']}; its last complete conversation ends at byte {file['end']:,}",
        )
    if card["answers"] == "target":
        lines.append("answers: written by the target while it is captured; only prompts were prepared")
    return "\n".join(lines)


def previews(config: RunConfig, count: int):
    """The first `count` prepared conversations as coloured texts."""
    if not count:
        return
    tok = setup.tokenizer(setup.find_target(config))
    tokens = prepare.load(config.data.prepared)
    for a, b in zip(tokens.offsets[:count], tokens.offsets[1:], strict=False):
        yield chat.preview(tok, tokens.ids[a:b], tokens.span[a:b])


def describe_evaluation(result: dict) -> str:
    """The result in a few lines, the figure with its definition and settings."""
    s, (low, high) = result["settings"], result["interval"]
    kind = "chain" if s["topk"] == 1 else "tree"
    where = " ".join(f"{p:.2f}" for p in result["acceptance_by_position"])
    categories = ", ".join(f"{name} {value:.2f}" for name, value in result["by_category"].items())
    decoded = result["greedy"]
    return "\n".join(
        [
            f"step {result['step']}: accept length {result['accept_length']:.3f} (95 % {low:.3f} .. {high:.3f})",
            f"  = {result['definition']}",
            f"  {kind} {s[kind]}, {s['prompts']} prompts, greedy, {s['max_new_tokens']} tokens, {s['dtype']}",
            f"accepted by position: {where} ({result['accepted_drafts']:,} in {result['verify_forwards']:,} verifies)",
            f"as SGLang counts: request {result['sglang_request']:.3f}, server {result['sglang_server']:.3f}",
            f"by category: {categories}",
            f"answers that end in a loop: {result['looping']:.0%}",
            f"text equals greedy decoding: {len(decoded['near_ties'])} near ties in {decoded['tokens']:,} tokens",
        ]
    )
