"""What moves and how: labels from patterns, AdamW inside the trained branch, nothing for the rest.

The tree is {"draft", "embedding", "target"}. Trained and frozen leaves live in two trees: only the first is
differentiated, updated and returned by the step; the second goes in and never comes out, so its bits cannot change.
"""

import re

import jax
import optax
from flax import traverse_util

from eagle3_jax.config import Train
from eagle3_jax.errors import ConfigError


def flat(tree: dict) -> dict:
    """`draft/fc/kernel` -> leaf."""
    return traverse_util.flatten_dict(tree, sep="/")


def nested(leaves: dict) -> dict:
    return traverse_util.unflatten_dict(leaves, sep="/")


def labels(tree: dict, freeze: tuple[str, ...]) -> dict:
    """A tree like `tree` of "train" or "frozen". A pattern that matches no leaf is a ConfigError."""
    names = list(flat(tree))
    for pattern in freeze:
        if not any(re.fullmatch(pattern, name) for name in names):
            raise ConfigError(
                f"train.freeze pattern {pattern!r} matches no parameter; there are {', '.join(names)}"
            )
    frozen = {name: any(re.fullmatch(p, name) for p in freeze) for name in names}
    if all(frozen.values()):
        raise ConfigError(f"train.freeze={list(freeze)} freezes every parameter: nothing is left to train")
    return nested({name: "frozen" if frozen[name] else "train" for name in names})


def split(tree: dict, label_tree: dict) -> tuple[dict, dict]:
    """(trained, frozen): the leaves of each label, nested."""
    leaves, label = flat(tree), flat(label_tree)
    return tuple(
        nested({n: x for n, x in leaves.items() if label[n] == kind}) for kind in ("train", "frozen")
    )


def merge(trained: dict, frozen: dict) -> dict:
    return nested(flat(trained) | flat(frozen))


def schedule(train: Train) -> optax.Schedule:
    """Linear warm-up to the full rate in `warmup` steps, then cosine to `final_learning_rate` at the last step."""
    peak, final = train.learning_rate, train.final_learning_rate
    cosine = optax.cosine_decay_schedule(peak, train.steps - train.warmup, alpha=final / peak)
    if not train.warmup:
        return cosine
    # The first step has a share of the rate, too: at 0 it would be lost.
    rise = optax.linear_schedule(peak / train.warmup, peak, max(train.warmup - 1, 1))
    return optax.join_schedules([rise, cosine], [train.warmup])


def make(train: Train, label_tree: dict) -> optax.GradientTransformation:
    """AdamW after clipping, on "train" leaves; clip and decay sit inside, so they see no other leaf.

    Norm scales are not decayed.
    """
    trained = optax.chain(
        optax.clip_by_global_norm(train.clip),
        optax.adamw(
            schedule(train), b1=0.9, b2=train.beta2, weight_decay=train.weight_decay,
            mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
        ),
    )  # fmt: skip
    return optax.partition({"train": trained, "frozen": optax.set_to_zero()}, label_tree)


def update(tx: optax.GradientTransformation, grads: dict, opt, trained: dict, frozen: dict):
    """One update of the trained tree. The transformation sees MaskedNode where a leaf is frozen."""
    hole = {name: optax.MaskedNode() for name in flat(frozen)}
    updates, opt = tx.update(nested(flat(grads) | hole), opt, nested(flat(trained) | hole))
    moved = nested({name: x for name, x in flat(updates).items() if name not in hole})
    return optax.apply_updates(trained, moved), opt


def init(tx: optax.GradientTransformation, trained: dict, frozen: dict):
    return tx.init(nested(flat(trained) | {name: optax.MaskedNode() for name in flat(frozen)}))
