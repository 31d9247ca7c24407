"""The training loop: config -> mesh -> data -> parameters -> step -> restore or start -> loop."""

import dataclasses
import json
import math
import time
from pathlib import Path

import jax
import numpy as np

from eagle3_jax import axes
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig
from eagle3_jax.data.loader import Batches
from eagle3_jax.draft import model
from eagle3_jax.draft import shape as draft_shape
from eagle3_jax.errors import DataError
from eagle3_jax.progress import bar
from eagle3_jax.target import weights
from eagle3_jax.train import checkpoint, manifest, optim, setup
from eagle3_jax.train.step import Step, batch_shardings, opt_shardings

EMBEDDING_AXES = {"embedding": "v d"}


def train(config: RunConfig) -> Path:
    """Train to `train.steps`, going on where the run directory stands; returns that directory.

    The draft's parameters come from (1) the newest step in the run directory, else (2) `train.init` if it
    names a run, else (3) the seed. Raises UserErrors before anything is written where something does not fit.
    """
    mesh = axes.make_mesh(config.mesh.data, config.mesh.model)
    axes.check_batch(
        mesh, config.train.batch // config.train.micro_batches, "train.batch / train.micro_batches"
    )

    # Target, data, vocabulary
    files = setup.find_target(config)
    shape = draft_shape.resolve(config, files.shape)
    plain = configuration.to_dict(config)
    begun = checkpoint.holds(config.train.run, plain)
    digest = weights.digest(files.directory)
    source, card = setup.source_of(config, digest)
    setup.check_prompts(config, card)
    if begun:
        # The map is the run's: never rebuilt, whatever the data say now.
        frozen_then, params_then, meta_then = checkpoint.read_start(config.train.run)
        d2t, facts = frozen_then["d2t"], meta_then["manifest"]["facts"]
        if facts["data"]["fingerprint"] != card["fingerprint"]:
            raise DataError(
                f"{config.data.prepared} now holds other data than {config.train.run} was begun with; "
                "prepare it as it was, or name another train.run"
            )
    else:
        d2t, facts = _facts(config, files, source, card)
    train_side = np.flatnonzero(~np.asarray(source.held_out))
    batches = Batches(
        source,
        train_side,
        config.train.row_length,
        config.train.batch,
        config.train.seed,
        config.train.prefetch,
    )

    # Parameters and optimiser
    graph, params, origins = setup.initial_draft(config, shape, files, d2t)
    target, target_tree, target_axes = setup.frozen_target(config, files, d2t, mesh)
    embedding = {"embedding": files.rows(setup.EMBEDDING)}
    letters = {"draft": model.abstract(shape)[2], "embedding": EMBEDDING_AXES, "target": target_axes}
    tree = {
        "draft": _put(mesh, letters["draft"], params),
        "embedding": _put(mesh, letters["embedding"], embedding),
        "target": target_tree,
    }
    labels = optim.labels(tree, config.train.freeze)
    origins |= {"embedding/embedding": f"{manifest.COPIED}{setup.EMBEDDING}"}
    origins |= {f"target/{n}": f"{manifest.COPIED}{n}" for n in optim.flat(target_tree)}
    setup.print_layout(mesh, letters, tree, labels)
    trained, frozen = optim.split(tree, labels)
    del tree, params
    tx = optim.make(config.train, labels)
    sharding_of = {name: x.sharding for name, x in optim.flat(trained).items()}
    abstract_opt = jax.eval_shape(lambda: optim.init(tx, trained, frozen))
    opt_sharding = opt_shardings(mesh, abstract_opt, optim.nested(sharding_of))
    opt = jax.jit(lambda t, f: optim.init(tx, t, f), out_shardings=opt_sharding)(trained, frozen)

    # Restore or start
    vocabulary = setup.device_vocabulary(d2t, shape.vocab_size)
    step_fn = Step(config.train, graph, tx, vocabulary, target)
    meta = dict(
        config=plain, shape=dataclasses.asdict(shape), aux_layers=list(draft_shape.aux_layers(config, files.shape)),
        target=dict(path=str(files.directory), shape=files.shape.model_dump(), weights_digest=digest),
    )  # fmt: skip

    def manifest_now(start=None, first=None) -> dict:
        return manifest.build(optim.merge(trained, frozen), labels, origins, facts, start, first)

    if not begun:
        first = manifest_now()
        kept = {"d2t": d2t} | {k: v for k, v in frozen.items() if k != "target"}
        params_then = jax.device_get(trained)
        checkpoint.start(config.train.run, kept, params_then, meta | {"manifest": first})
    else:
        first = meta_then["manifest"]
    at = 0
    with checkpoint.Steps(config.train.run, config.train.keep) as steps:
        if begun and steps.latest() is not None:
            trained, opt, position, restored = steps.restore(None, trained, opt)
            batches.set_state(position)
            at = restored["step"]
            setup.say(f"train: resumed {config.train.run} at step {at}")
        _loop(config, mesh, step_fn, trained, opt, frozen, batches, at, steps, opt_sharding, _Saver(
            steps, labels, origins, facts, params_then, first, meta, frozen
        ))  # fmt: skip
    return Path(config.train.run)


@dataclasses.dataclass(frozen=True)
class _Saver:
    """What a save needs beside the live state."""

    steps: checkpoint.Steps
    labels: dict
    origins: dict
    facts: dict
    start: dict
    first: dict
    meta: dict
    frozen: dict

    def __call__(self, step: int, trained: dict, opt, position: dict) -> None:
        state = optim.merge(trained, self.frozen)
        now = manifest.build(state, self.labels, self.origins, self.facts, self.start, self.first)
        self.steps.save(step, trained, opt, position, self.meta | {"manifest": now})


def _loop(config, mesh, step_fn, trained, opt, frozen, batches, at, steps, opt_sharding, save) -> None:
    t = config.train
    if at >= t.steps:
        setup.say(f"train: {t.run} already has its {t.steps} steps")
        return
    shardings = tuple(jax.tree.map(lambda x: x.sharding, tree) for tree in (trained, frozen))
    run, rate, last = None, optim.schedule(t), None
    tokens = t.batch * t.row_length
    began = time.monotonic()
    with (
        open(Path(t.run) / "metrics.jsonl", "a") as log,
        bar("train", (t.steps - at) * tokens, "tokens") as progress,
    ):

        def report(done) -> None:
            """The numbers of a step that was dispatched before the newest: reading them waits for no device."""
            step, metrics, epoch = done
            progress.advance(tokens)
            if step % t.log_every and step != t.steps:
                return
            values = {k: np.asarray(v).tolist() for k, v in jax.device_get(metrics).items()}
            if not math.isfinite(values["loss"]):
                raise DataError(
                    f"step {step}: loss is {values['loss']} (epoch {epoch:.2f}); lower train.learning_rate, or check "
                    f"the features; the last good checkpoint is {steps.latest() or 0}"
                )
            progress.note = (
                f"loss {values['loss']:.3f} acc {' '.join(f'{a:.2f}' for a in values['accuracy'])}"
            )
            line = dict(
                step=step, epoch=epoch, seconds=time.monotonic() - began, learning_rate=float(rate(step - 1))
            )
            log.write(json.dumps(line | values) + "\n")
            log.flush()

        for step in range(at + 1, t.steps + 1):
            batch, position = next(batches)
            batch = jax.device_put(batch, batch_shardings(mesh, batch))
            if run is None:
                run = step_fn.compiled(mesh, shardings[0], opt_sharding, shardings[1], batch)
            trained, opt, metrics = run(trained, opt, frozen, batch)
            if last is not None:
                report(last)
            last = (step, metrics, batches.epoch)
            if step % t.save_every == 0 or step == t.steps:
                save(step, trained, opt, position)
        report(last)


def _put(mesh, letters: dict, tree: dict) -> dict:
    return jax.tree.map(lambda a, x: jax.device_put(x, axes.named(mesh, a, x.shape)), letters, tree)


def _facts(config, files, source, card) -> tuple[np.ndarray, dict]:
    """The vocabulary map and the run-level part of the manifest."""
    tok = setup.tokenizer(files)
    made, counted = setup.vocabulary_map(config, source, setup.end_tokens(tok), files.shape.vocab_size)
    facts = counted | dict(
        vocabulary_map=manifest.digest(made.d2t), tokenizer_hash=card["request"]["tokenizer"],
        data={k: card[k] for k in ("fingerprint", "conversations", "tokens", "answers", "file", "refused")},
        held_out=card["held_out"], contamination=card["contamination"], versions=manifest.versions(),
    )  # fmt: skip
    return made.d2t, facts
