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
from eagle3_jax.config import RunConfig, ServeConfig
from eagle3_jax.data import chat, features, prepare
from eagle3_jax.data.regenerate import Summary
from eagle3_jax.data.regenerate import regenerate as regenerate_data
from eagle3_jax.decode import evaluate as evaluation
from eagle3_jax.decode.sampling import Sampling
from eagle3_jax.decode.speculate import DraftWeights, Speculator
from eagle3_jax.decode.walk import Text, Texts, walk
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
    files = setup.checked_target(config)
    texts = [p["prompt"] for p in setup.evaluation_prompts(config)]
    source = defaults.resolve_conversations(config.data.path)
    return prepare.prepare(
        config, setup.tokenizer(files), texts, source=source, vocab_size=files.shape.vocab_size
    )


def capture(config: RunConfig) -> features.Store:
    """`eagle3 capture`: the finished feature store."""
    files = setup.checked_target(config)
    mesh = axes.make_mesh(config.mesh.data, config.mesh.model)
    target, params = setup.load_target(config, files, mesh)
    ends = chat.end_tokens(setup.tokenizer(files))
    tokens = prepare.load(config.data.prepared)
    return capture_features(config, target, params, tokens, ends, weights.digest(files.directory), mesh)


def regenerate(config: RunConfig) -> Summary:
    """`eagle3 regenerate`: what this call wrote."""
    files = setup.checked_target(config)
    mesh = axes.data_mesh(config.mesh.data * config.mesh.model)  # every device holds the whole target
    source = defaults.resolve_conversations(config.data.path)
    target = Target(files.shape, config.target.aux_layers, config.target.dtype)
    tok, digest = setup.tokenizer(files), weights.digest(files.directory)

    def load() -> dict:
        return target.unstacked(weights.load(files.directory, target, mesh))

    return regenerate_data(config, target, load, tok, source, digest, mesh)


def evaluate(
    run: str | Path, overrides: tuple[str, ...] = (), step: checkpoint.Step = None, save_as: str | None = None
) -> dict:
    """`eagle3 evaluate RUN`: what evaluate.json holds. `save_as` also writes it into the run.

    `overrides` may change target.path, target.dtype and the evaluate settings of the run's own configuration.
    """
    return evaluator(run, overrides)(step, save_as)


def evaluator(
    run: str | Path, overrides: tuple[str, ...] = ()
) -> Callable[[checkpoint.Step, str | None], dict]:
    """`evaluate` as a function of step and `save_as`, with the target loaded and compiled for once."""
    axes.virtual_cpus(os.cpu_count() or 1)  # reading the run already puts the devices to use
    newest = checkpoint.load_draft(run)
    meta = newest.meta
    config = configuration.override(configuration.to_serve(meta["config"], str(run)), overrides)
    mesh = axes.data_mesh(config.mesh.data)
    files, target, params = _serving_target(config, meta, mesh)
    tok = setup.tokenizer(files)
    prompts = [
        p | {"ids": chat.prompt(tok, (("user", p["prompt"]),)).tolist()}
        for p in defaults.evaluation_prompts(config.evaluate.prompts)[: config.evaluate.max_prompts]
    ]
    e, plan = config.evaluate, config.evaluate.drafting()
    if plan.topk > newest.shape.draft_vocab_size:
        raise ConfigError(
            f"evaluate.topk={plan.topk} exceeds the draft's vocabulary of {newest.shape.draft_vocab_size}"
        )
    longest = max(len(p["ids"]) for p in prompts) + e.max_new_tokens + plan.steps + 1
    most, kind = target.shape.longest
    if longest > most:
        raise DataError(
            f"a prompt and evaluate.max_new_tokens={e.max_new_tokens} take {longest} tokens, "
            f"the target has {most} {kind}"
        )
    sampling = Sampling(temperature=e.temperature, seed=e.seed)
    speculator = Speculator(target, plan, mesh, sampling)

    def at(step: checkpoint.Step, save_as: str | None) -> dict:
        draft = checkpoint.load_draft(run, step)
        result, answers = evaluation.evaluate(
            speculator, params, serving_draft(draft), prompts, chat.end_tokens(tok), mesh,
            max_new_tokens=e.max_new_tokens, batch=e.batch, label=f"evaluate step {draft.step}",
        )  # fmt: skip
        head = {"accept_length": result.pop("accept_length"), "step": draft.step, "run": str(run)}
        result = head | {"target": str(files.directory)} | result
        if save_as is not None:
            # What is exported and compared with engines is greedy.
            name = (
                save_as.replace(".json", f"-temperature-{e.temperature:g}.json") if e.temperature else save_as
            )
            save_json(Path(run) / name, result)
        if save_as == RESULT and not e.temperature:
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
    config = configuration.to_serve(drafts[0].meta["config"], str(run))
    mesh = axes.data_mesh(config.mesh.data)
    _, target, params = _serving_target(config, drafts[0].meta, mesh)
    texts = [Text(a["prompt"], a["tokens"]) for a in answers]
    texts = Texts(target, params, texts, config.evaluate.batch, mesh)
    points = []
    for draft in drafts:
        accepted = walk(texts, serving_draft(draft), config.evaluate.steps)
        length = evaluation.accept_length(evaluation.pairs(accepted))
        points.append(dict(step=draft.step, minutes=minutes[draft.step], accept_length=length))
    return points


def _serving_target(config: ServeConfig, meta: dict, mesh):
    """The target that a draft was trained for: its files, model and parameters. Raises DataError for another one."""
    files = setup.find_target(config)
    now, then = weights.digest(files.directory), meta["target"]["weights_digest"]
    if now != then:
        raise DataError(
            f"{files.directory}: weights {now[:12]}, but the draft was trained for weights {then[:12]}"
        )
    target = Target(files.shape, tuple(meta["aux_layers"]), config.target.dtype)
    return files, target, weights.load(files.directory, target, mesh)


def serving_draft(draft: checkpoint.LoadedDraft) -> DraftWeights:
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
    if (found := card.get("regenerated")) is not None:
        text = f"written by target {found['target'][:12]} at temperature {found['temperature']:g}"
        exact = f"the exact tokens of {found['exact']:,} conversations"
        lines.append(
            f"answers: {text}; {exact}{found['why'] and ', the others from their text: ' + found['why']}"
        )
    return "\n".join(lines)


def describe_regeneration(summary: Summary) -> str:
    """What was written, in a line or two."""
    s, refused = summary, ", ".join(f"{n:,} {reason}" for reason, n in summary.refused.items())
    ended = s.ended / max(s.answers, 1)
    return "\n".join(
        [
            f"regenerated {s.conversations:,} conversations, {s.lines:,} are in {s.path}"
            + (f" (refused: {refused})" if refused else ""),
            f"{s.answers:,} answers, {s.tokens:,} tokens, {s.tokens / max(s.seconds, 1e-9):,.1f} tokens/s; "
            f"{ended:.0%} of the answers ended by themselves",
            f"train on them: data.path={s.path}",
        ]
    )


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
    how = f"temperature {s['temperature']:g}, seed {s['seed']}" if s["temperature"] else "greedy"
    lines = [
        f"step {result['step']}: accept length {result['accept_length']:.3f} (95 % {low:.3f} .. {high:.3f})",
        f"  = {result['definition']}",
        f"  {kind} {s[kind]}, {s['prompts']} prompts, {how}, {s['max_new_tokens']} tokens, {s['dtype']}",
        f"accepted by position: {where} ({result['accepted_drafts']:,} in {result['verify_forwards']:,} verifies)",
        f"as SGLang counts: request {result['sglang_request']:.3f}, server {result['sglang_server']:.3f}",
        f"by category: {categories}",
        f"answers that end in a loop: {result['looping']:.0%}",
    ]
    if (decoded := result.get("greedy")) is not None:
        ties = f"{len(decoded['near_ties'])} near ties in {decoded['tokens']:,} tokens"
        lines.append(f"text equals greedy decoding: {ties}")
    return "\n".join(lines)
