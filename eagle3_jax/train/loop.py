"""The training loop: config -> mesh -> data -> parameters -> step -> restore or start -> loop."""

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np

from eagle3_jax import axes
from eagle3_jax import config as configuration
from eagle3_jax.config import RunConfig, Train
from eagle3_jax.data import chat
from eagle3_jax.data.loader import Batches
from eagle3_jax.draft import model
from eagle3_jax.draft import shape as draft_shape
from eagle3_jax.draft.unroll import needed_rows
from eagle3_jax.errors import CheckpointError, Stopped
from eagle3_jax.progress import bar
from eagle3_jax.target import weights
from eagle3_jax.train import checkpoint, manifest, metrics, optim, setup
from eagle3_jax.train.held_out import HeldOut, is_best, stalled
from eagle3_jax.train.step import Step, opt_shardings

EMBEDDING_AXES = {"embedding": "v d"}
# What the manifest says of data.json.
FACTS = ("fingerprint", "conversations", "tokens", "answers", "regenerated", "file", "refused")


def train(config: RunConfig) -> Path:
    """Train to `train.steps`, going on where the run directory stands; returns that directory.

    The draft's parameters come from (1) the newest step in the run directory, else (2) `train.init` if it
    names a run, else (3) the seed. Raises a UserError before anything is written where something does not fit, and
    Stopped after SIGTERM, when the step that it was at is saved.
    """
    t = config.train
    mesh = axes.make_mesh(config.mesh.data, config.mesh.model)
    axes.check_batch(mesh, t.batch // t.micro_batches, "train.batch / train.micro_batches")

    # Target and data
    files = setup.checked_target(config)
    plain = configuration.to_dict(config)
    begun = checkpoint.holds(t.run, plain)
    digest = weights.digest(files.directory)
    source, card = setup.source_of(config, digest)
    setup.check_prompts(config, card)
    train_side = np.flatnonzero(~np.asarray(source.held_out))
    batches = Batches(source, train_side, t.row_length, t.batch, t.seed, t.prefetch)

    # Vocabulary and draft: the run's own where it has begun, whatever the data would give now
    if begun:
        frozen_then, params_then, meta_then = checkpoint.read_start(t.run)
        first = meta_then["manifest"]
        _same(t.run, "target.path", meta_then["target"]["weights_digest"], digest)
        _same(t.run, "data.prepared", first["facts"]["data"]["fingerprint"], card["fingerprint"])
        shape, d2t, facts = checkpoint.shape_of(meta_then), frozen_then["d2t"], first["facts"]
        origins = {path: leaf["origin"] for path, leaf in first["leaves"].items()}
        graph, draft = model.abstract(shape)[0], checkpoint.load_draft(t.run, 0).params
    else:
        warm = setup.warm_start(config, files)
        shape = draft_shape.resolve(config, files.shape) if warm is None else warm.shape
        d2t, facts = _facts(config, files, source, card, warm, digest)
        graph, draft, origins = setup.initial_draft(config, shape, files, d2t, warm)

    # Parameters and optimiser on the mesh
    target, target_tree, target_axes = setup.frozen_target(config, files, d2t, mesh)
    letters = {"draft": model.abstract(shape)[2], "embedding": EMBEDDING_AXES, "target": target_axes}
    tree = {
        "draft": _put(mesh, letters["draft"], draft),
        "embedding": _put(mesh, letters["embedding"], {"embedding": files.rows(setup.EMBEDDING)}),
        "target": target_tree,
    }
    labels = optim.labels(tree, t.freeze)
    origins |= {"embedding/embedding": f"{manifest.COPIED}{setup.EMBEDDING}"}
    origins |= {
        f"target/{n}": f"{manifest.COPIED}{setup.target_tensor(n, files)}" for n in optim.flat(target_tree)
    }
    setup.print_layout(mesh, letters, tree, labels)
    trained, frozen = optim.split(tree, labels)
    del tree, draft
    tx = optim.make(t, labels)
    trained_sharding, frozen_sharding = (jax.tree.map(lambda x: x.sharding, x) for x in (trained, frozen))
    opt_sharding = opt_shardings(
        mesh, jax.eval_shape(lambda: optim.init(tx, trained, frozen)), trained_sharding
    )
    opt = jax.jit(lambda a, b: optim.init(tx, a, b), out_shardings=opt_sharding)(trained, frozen)

    # Start or restore
    if not begun:
        first = manifest.build(optim.merge(trained, frozen), labels, origins, facts)
        params_then = jax.device_get(trained)
    meta = dict(
        config=plain, shape=dataclasses.asdict(shape), aux_layers=list(draft_shape.aux_layers(config, files.shape)),
        target=dict(path=str(files.directory), shape=files.shape.model_dump(), weights_digest=digest),
    )  # fmt: skip
    if not begun:
        kept = {"d2t": d2t} | {name: x for name, x in frozen.items() if name != "target"}
        with checkpoint.room_to_write(t.run):
            checkpoint.start(t.run, kept, params_then, meta | {"manifest": first})
    with checkpoint.room_to_write(t.run), checkpoint.Steps(t.run, t.keep) as steps:
        at = 0
        if steps.latest() is not None:
            trained, opt, position, restored = steps.restore(None, trained, opt)
            batches.set_state(position)
            at = restored["step"]
            setup.say(f"train: going on at step {at} of {t.run}")

        step_fn = Step(t, graph, tx, setup.device_vocabulary(d2t, shape.vocab_size), target)
        run = step_fn.compiled(mesh, trained_sharding, opt_sharding, frozen_sharding)
        held_out = HeldOut(config, files, source, step_fn, target_tree, mesh) if t.evaluate_every else None
        tokens = t.batch * t.row_length
        log, pending = metrics.Log(t.run, at, optim.schedule(t)), None

        def save(step: int, position: dict) -> None:
            now = manifest.build(optim.merge(trained, frozen), labels, origins, facts, params_then, first)
            steps.save(step, trained, opt, position, meta | {"manifest": now}, log.accept_length(step))

        def evaluate(step: int) -> None:
            log.evaluation({"step": step, "epoch": batches.epoch} | held_out(trained, frozen))

        with log, bar("train", (t.steps - at) * tokens, "tokens") as progress, _asked_to_end() as asked:
            if held_out and not log.evaluated(at) and at % t.evaluate_every == 0:
                evaluate(at)  # the untrained draft, or a step that was saved when there was no time for it
            for step in range(at + 1, t.steps + 1):
                if _enough(t.patience, log.evaluations):
                    setup.say(_stopped(t, step - 1, log.evaluations))
                    break
                batch, position = next(batches)
                if t.rows == "supervised":
                    batch["rows"] = needed_rows(batch, t.unroll, t.mask)
                trained, opt, found = run(trained, opt, frozen, jax.device_put(batch, axes.rows(mesh)))
                if pending is not None:
                    # Of the step before: the device is busy with this one while the host reads.
                    metrics.check(pending[0], pending[-1], batches.conversations)
                    if pending[0] % t.log_every == 0:
                        progress.note = log.write(*pending)
                pending = (step, batches.epoch, found)
                progress.advance(tokens)
                stop = bool(asked)  # looked at once: what is reported as saved has to be
                last = step == t.steps
                measure = held_out and not stop and (last or step % t.evaluate_every == 0)
                if measure or last or stop or step % t.save_every == 0:
                    metrics.check(step, found, batches.conversations)
                    progress.note = log.write(*pending)
                    pending = None
                if measure:
                    evaluate(step)
                best = measure and is_best(log.evaluations)
                ended = last or stop or (measure and _enough(t.patience, log.evaluations))
                if best or ended or step % t.save_every == 0:
                    save(step, position)
                if stop and not last:
                    raise Stopped(
                        f"SIGTERM: step {step} of {t.steps} is saved in {t.run}; the same command goes on"
                    )
    return Path(t.run)


def _enough(patience: int | None, evaluations: list[dict]) -> bool:
    return patience is not None and stalled(evaluations) >= patience


def _stopped(t: Train, step: int, evaluations: list[dict]) -> str:
    best = max(line["accept_length"] for line in evaluations)
    return (
        f"train: stopped at step {step} of {t.steps}: {t.patience} evaluations in a row without a clear gain over the "
        f"best, {best:.3f} held-out accept length (--step best of evaluate and convert takes that one)"
    )


@contextlib.contextmanager
def _asked_to_end() -> Iterator[list]:
    """A list that fills when SIGTERM comes."""
    came: list[int] = []
    try:
        before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    except ValueError:  # only the main thread may; another's caller has a handler of its own
        yield came
        return
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, before)


def _same(run: str, key: str, then: str, now: str) -> None:
    if then != now:
        raise CheckpointError(
            f"{run}: begun with {key} of digest {then[:12]}, now it is {now[:12]}; "
            "restore what it was, or name another train.run"
        )


def _put(mesh, letters: dict, tree: dict) -> dict:
    return jax.tree.map(lambda a, x: jax.device_put(x, axes.named(mesh, a, x.shape)), letters, tree)


def _facts(config, files, source, card, warm, digest: str) -> tuple[np.ndarray, dict]:
    """d2t and the run-level part of the manifest."""
    tok = setup.tokenizer(files)
    kept = None if warm is None else warm.d2t
    d2t, facts = setup.vocabulary_map(config, source, chat.end_tokens(tok), files.shape.vocab_size, kept)
    facts |= dict(
        vocabulary_map=manifest.digest(d2t), tokenizer_hash=card["request"]["tokenizer"],
        data={k: card[k] for k in FACTS if k in card},
        held_out=card["held_out"], contamination=card["contamination"], versions=manifest.versions(),
    )  # fmt: skip
    if warm is not None:
        same = warm.meta["target"]["weights_digest"] == digest
        facts["warm_start"] = dict(
            run=config.train.init, step=warm.step, vocabulary_map="kept", trained_for="this target" if same
            else f"a target of weights {warm.meta['target']['weights_digest'][:12]}",
        )  # fmt: skip
    return d2t, facts
