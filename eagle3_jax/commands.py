"""What each `eagle3` command does, as functions of a RunConfig; cli.py only parses and prints."""

import json
import os
from pathlib import Path

import jax.numpy as jnp

from eagle3_jax import axes, defaults
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat, features, prepare
from eagle3_jax.decode import evaluate as evaluation
from eagle3_jax.decode.speculate import DraftWeights
from eagle3_jax.draft import model
from eagle3_jax.errors import DataError
from eagle3_jax.target import weights
from eagle3_jax.target.capture import capture as capture_features
from eagle3_jax.target.model import Target
from eagle3_jax.train import checkpoint, setup


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
    ends = setup.end_tokens(setup.tokenizer(files))
    tokens = prepare.load(config.data.prepared)
    return capture_features(config, target, params, tokens, ends, weights.digest(files.directory))


def evaluate(
    run: str | Path, overrides: tuple[str, ...] = (), step: int | None = None, write: bool = True
) -> dict:
    """`eagle3 evaluate RUN`: evaluate.json's content; written into the run for its newest step.

    `overrides` may change the evaluate and target.path settings of the run's own configuration.
    """
    draft = checkpoint.load_draft(run, step)
    config = configuration.override(configuration.from_dict(draft.meta["config"], str(run)), overrides)
    files = setup.find_target(config)
    if (now := weights.digest(files.directory)) != draft.meta["target"]["weights_digest"]:
        raise DataError(
            f"{files.directory}: weights {now[:12]}, the draft was trained for {draft.meta['target']['weights_digest'][:12]}"
        )
    mesh = axes.make_mesh()
    target = Target(files.shape, tuple(draft.meta["aux_layers"]), config.target.dtype)
    params = weights.load(files.directory, target, mesh)
    tok = setup.tokenizer(files)
    prompts = [
        p | {"ids": chat.prompt(tok, (("user", p["prompt"]),)).tolist()}
        for p in defaults.evaluation_prompts(config.evaluate.prompts)[: config.evaluate.max_prompts]
    ]
    graph, _, _ = model.abstract(draft.shape)
    serving = DraftWeights(
        graph, draft.params, jnp.asarray(draft.embedding), jnp.asarray(draft.d2t, jnp.int32)
    )
    e = config.evaluate
    result = evaluation.evaluate(
        target, params, serving, prompts, setup.end_tokens(tok), steps=e.steps, max_new_tokens=e.max_new_tokens,
        batch=e.batch, label=f"evaluate step {draft.step}",
    )  # fmt: skip
    result = {"accept_length": result.pop("accept_length"), "step": draft.step, "run": str(run)} | result
    if write:
        save_json(Path(run) / "evaluate.json", result)
    return result


def save_json(path: Path, value: dict) -> None:
    """Whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(value, indent=2) + "\n")
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
    where = " ".join(f"{p:.2f}" for p in result["acceptance_by_position"])
    categories = ", ".join(f"{name} {value:.2f}" for name, value in result["by_category"].items())
    return "\n".join(
        [
            f"accept length {result['accept_length']:.3f}  (95 % interval {low:.3f} .. {high:.3f}), step {result['step']}",
            f"  = {result['definition']}",
            f"  chain {s['chain']}, {s['prompts']} prompts, greedy, at most {s['max_new_tokens']} new tokens, {s['dtype']}",
            f"accepted by position: {where}; {result['accepted_drafts']:,} drafts in {result['verify_forwards']:,} verifies",
            f"as SGLang counts: request {result['sglang_request']:.3f}, server {result['sglang_server']:.3f}",
            f"by category: {categories}",
            f"answers that end in a loop: {result['looping']:.0%}; "
            f"same text as greedy decoding, {len(result['greedy']['near_ties'])} near ties in {result['greedy']['tokens']:,} tokens",
        ]
    )
