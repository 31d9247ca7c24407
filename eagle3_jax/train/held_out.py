"""What is measured while training, on conversations that are not trained on: accept length, loss, accuracy.

The target answers some of their prompts once, when training starts or goes on; each evaluation then only lets the
draft walk over those answers (decode/walk.py), so that an offline run does not keep the target in memory.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.config import RunConfig
from eagle3_jax.data import chat
from eagle3_jax.data.loader import Source, pack, row
from eagle3_jax.decode import evaluate
from eagle3_jax.decode.speculate import DraftWeights
from eagle3_jax.decode.walk import Text, Texts, walk, written
from eagle3_jax.decode.writer import Writer
from eagle3_jax.draft import loss
from eagle3_jax.errors import ConfigError, DataError
from eagle3_jax.progress import bar
from eagle3_jax.target.shape import FAMILIES
from eagle3_jax.train import optim, setup
from eagle3_jax.train.step import Step


class HeldOut:
    """Measures a draft, as it would be exported, on the held-out side of `source`.

    Offline `target_params` are not the whole target's: it is loaded for its answers and let go again. Raises DataError
    where nothing is held out, ConfigError where `train.patience` wants an accept length that cannot be had here.
    """

    def __init__(
        self, config: RunConfig, files: setup.TargetFiles, source: Source, step: Step, target_params: dict,
        mesh: Mesh,
    ):  # fmt: skip
        there = np.flatnonzero(np.asarray(source.held_out))
        if not len(there):
            raise DataError(
                f"train.evaluate_every={config.train.evaluate_every}, but none of {len(source.held_out):,} "
                "conversations is held out; prepare more of them, or raise data.held_out"
            )
        self._config, self._step, self._mesh = config, step, mesh
        order = there[np.random.default_rng(0).permutation(len(there))]
        self._batches = _batches(config, source, order, mesh)
        self._sums = jax.jit(step.sums)
        self._texts = None
        if files.shape.model_type not in FAMILIES:
            why = f"a target of type {files.shape.model_type!r} cannot be run here: no accept length while training"
            if config.train.patience:
                raise ConfigError(f"train.patience={config.train.patience}: {why}")
            return setup.say(f"train: {why}")
        if step.target is None:
            target, target_params = setup.load_target(config, files, mesh)
        else:
            target = step.target
        ends = set(chat.end_tokens(setup.tokenizer(files)))
        writer = Writer(target, mesh, features=False)
        texts = _answered(config, source, order, ends, writer, target_params, mesh)
        self._texts = Texts(target, target_params, texts, config.evaluate.batch, mesh)

    def __call__(self, trained: dict, frozen: dict) -> dict:
        """Plain values: accept length and what belongs to it, and `held_out` with loss and accuracy."""
        totals = None
        for batch in self._batches:
            sums = self._sums(trained, frozen, jax.device_put(batch, axes.rows(self._mesh)))
            totals = sums if totals is None else jax.tree.map(jnp.add, totals, sums)
        value, losses_K = self._step.objective(totals)
        measured = dict(loss=value, losses=losses_K) | loss.metrics(totals)
        found = {"held_out": {k: np.asarray(x).tolist() for k, x in jax.device_get(measured).items()}}
        if self._texts is None:
            return found
        tree, exported = optim.merge(trained, frozen), self._config.target.dtype
        weights = DraftWeights(
            self._step.graph, jax.tree.map(lambda x: x.astype(exported), tree["draft"]),
            tree["embedding"]["embedding"], self._step.vocabulary.d2t,
        )  # fmt: skip
        steps = self._config.evaluate.steps
        accepted = walk(self._texts, weights, steps)
        settings = {"chain": f"{steps}-1-{steps + 1}", "prompts": len(accepted)}
        each = {"pairs": evaluate.pairs(accepted).tolist()}
        return evaluate.counts(accepted, steps) | settings | found | each


def is_best(lines: Sequence[dict]) -> bool:
    """Whether the last evaluation's accept length is above all before it."""
    lengths = [line["accept_length"] for line in lines if "accept_length" in line]
    return bool(lengths) and "accept_length" in lines[-1] and lengths[-1] > max(lengths[:-1], default=0)


def stalled(lines: Sequence[dict]) -> int:
    """Evaluations in a row, the last among them, without a clear gain.

    A gain is clear if the 95 % interval of the difference in accept length, bootstrapped over the prompts that both
    evaluations share, is above 0; it is taken against the evaluation of the last clear gain, so that slow ones add up.
    """
    best, count = None, 0
    for line in lines:
        now = np.array(line["pairs"])
        if best is None or len(now) != len(best) or evaluate.gain(best, now)[0] > 0:
            best, count = now, 0
        else:
            count += 1
    return count


def _batches(config: RunConfig, source: Source, order: np.ndarray, mesh: Mesh) -> list[dict]:
    """At most `evaluate.held_out_rows` packed rows, in batches as large as a training step's parts."""
    t, most = config.train, config.evaluate.held_out_rows
    size = t.batch // t.micro_batches
    lengths = np.diff(np.asarray(source.offsets))[order]
    chosen = order[: max(1, int(np.searchsorted(np.cumsum(lengths), most * t.row_length, side="right")))]
    rows = pack(lengths[: len(chosen)], t.row_length, seed=0)[:most]
    packed = [row(source, chosen[r].tolist(), t.row_length) for r in rows]
    empty = [{name: np.zeros_like(x) for name, x in packed[0].items()}] * (-len(packed) % size)
    filled = packed + empty
    return [
        {name: np.stack([r[name] for r in filled[i : i + size]]) for name in packed[0]}
        for i in range(0, len(filled), size)
    ]


def _answered(config, source, order, ends: set[int], writer: Writer, params: dict, mesh: Mesh) -> list[Text]:
    """The target's greedy answers to held-out prompts, with as much after each as a round may overshoot."""
    e = config.evaluate
    limit, beyond = e.max_new_tokens, e.steps + 1
    room = writer.target.shape.longest[0] - limit - beyond
    prompts = []
    for i in order.tolist():
        a, b = (int(x) for x in source.offsets[i : i + 2])
        supervised = np.flatnonzero(np.asarray(source.span[a:b]))
        # Of prompts that wait for the target's answer no token is supervised.
        end = a + int(supervised[0]) if len(supervised) else b
        if 0 < end - a <= room:
            prompts.append(np.asarray(source.ids[a:end]).tolist())
        if len(prompts) == e.held_out_prompts:
            break
    if not prompts:
        raise DataError(
            f"none of {len(order):,} held-out conversations has a prompt of at most {room} tokens, which is what "
            f"evaluate.max_new_tokens={limit} leaves"
        )
    batch = axes.round_up(min(e.batch, len(prompts)), mesh.shape["data"])
    with bar("held-out answers", len(prompts) * (limit + beyond), "tokens") as progress:
        return written(
            writer, params, prompts, limit=limit, beyond=beyond, end_tokens=ends, batch=batch,
            advance=progress.advance,
        )  # fmt: skip
