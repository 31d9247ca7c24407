"""Run the frozen target once over the prepared conversations and keep what it says in the feature store."""

import sys

import jax
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.config import RunConfig
from eagle3_jax.data import features
from eagle3_jax.data.loader import pack, row
from eagle3_jax.data.prepare import Tokens
from eagle3_jax.decode.writer import Writer
from eagle3_jax.errors import ConfigError
from eagle3_jax.progress import bar
from eagle3_jax.target.model import Target

WINDOW = 512  # conversations that are packed, or answered, together; a killed capture repeats at most one


def capture(
    config: RunConfig,
    target: Target,
    params: dict,
    tokens: Tokens,
    end_tokens: tuple[int, ...],
    digest: str,
    mesh: Mesh,
) -> features.Store:
    """Features of all prepared conversations, in their order; goes on where an earlier call was stopped.

    With `data.answers == "target"` the prepared conversations are prompts and the target writes the answers
    on the way. `digest` names the target's weights. Raises ConfigError, DataError.
    """
    if config.store is None:
        raise ConfigError("capture needs store.path: where the features go")
    own = config.data.answers == "target"
    header = dict(
        target=digest, aux_layers=list(target.aux_layers), data=tokens.card["fingerprint"],
        answers=config.data.answers, max_new_tokens=config.data.max_new_tokens if own else None,
        compute_dtype=config.target.dtype,
    )  # fmt: skip
    shape, store = target.shape, config.store
    sizes = (len(target.aux_layers) * shape.hidden_size, shape.hidden_size, store.dtype)
    total = len(tokens.held_out)
    most = len(tokens.ids) + (total * config.data.max_new_tokens if own else 0)
    width, hidden, dtype = sizes
    with features.Writer(store.path, header, dtype, width, hidden) as writer:
        if writer.conversations < total:
            left = most * (total - writer.conversations) // total
            needed = features.check_space(store.path, left, *sizes)
            print(f"capture: at most {left:,} tokens, {needed / 1e9:.2f} GB in {store.path}", file=sys.stderr)
            with bar("capture", left, "tokens") as progress:
                run = _answers if own else _teacher_forced
                run(config, target, params, tokens, writer, end_tokens, mesh, progress)
    return features.open_store(store.path)


def _teacher_forced(config, target, params, tokens, writer, _, mesh, progress) -> None:
    forward = jax.jit(lambda p, ids, position, segment: _all(target, p, ids, position, segment))
    T, B = config.data.max_length, axes.round_up(config.train.batch, mesh.shape["data"])
    lengths = np.diff(tokens.offsets)
    for first in range(writer.conversations, len(lengths), WINDOW):
        chosen = np.arange(first, min(first + WINDOW, len(lengths)))
        rows = [chosen[r].tolist() for r in pack(lengths[chosen], T, seed=0)]
        found = {}
        for start in range(0, len(rows), B):
            part = rows[start : start + B]
            packed = [row(tokens, r, T) for r in part + [part[-1]] * (B - len(part))]
            ids, position, segment = (
                np.stack([r[n] for r in packed]) for n in ("ids", "position", "segment")
            )
            placed = jax.device_put((ids, position, segment), axes.rows(mesh))
            out = jax.device_get(forward(params, *placed))
            for b, conversations in enumerate(part):
                for number, i in enumerate(conversations, 1):
                    found[i] = [x[b, segment[b] == number] for x in out]
            progress.advance(int(lengths[[i for r in part for i in r]].sum()))
        for i in chosen.tolist():
            a, b = tokens.offsets[i : i + 2]
            writer.append(tokens.ids[a:b], tokens.span[a:b], *found[i], held_out=bool(tokens.held_out[i]))


def _all(target: Target, params, ids, position, segment):
    aux, final = target.features(params, ids, position, segment)
    return aux, final, *target.top_and_lse(params, final)


def _answers(config, target, params, tokens, writer, end_tokens, mesh, progress) -> None:
    machine, limit = Writer(target, mesh), config.data.max_new_tokens
    B = axes.round_up(config.data.answer_batch, mesh.shape["data"])
    for first in range(writer.conversations, len(tokens.held_out), WINDOW):
        chosen = list(range(first, min(first + WINDOW, len(tokens.held_out))))
        prompts = {i: np.asarray(tokens.ids[tokens.offsets[i] : tokens.offsets[i + 1]]) for i in chosen}
        order = sorted(chosen, key=lambda i: len(prompts[i]))
        found = {}
        for start in range(0, len(order), B):
            part = order[start : start + B]
            filled = part + [part[-1]] * (B - len(part))
            start_at, share = progress.done, len(part) / len(filled)
            written = machine.write(
                params, [prompts[i] for i in filled], limit, end_tokens,
                advance=lambda tokens, share=share: progress.advance(tokens * share),
            )  # fmt: skip
            found |= zip(filled, written, strict=True)
            # Answers that end early were part of the estimate.
            progress.advance(start_at + sum(len(prompts[i]) + limit for i in part) - progress.done)
        for i in chosen:
            w = found[i]
            span = (np.arange(len(w.ids)) >= w.answer).astype(np.int32)
            writer.append(w.ids, span, w.aux, w.final, w.top, w.lse, held_out=bool(tokens.held_out[i]))
