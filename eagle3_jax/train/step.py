"""The training step: the one `jax.jit` of training, with a sharding for everything that goes in and out."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.config import Train
from eagle3_jax.draft import loss, model
from eagle3_jax.draft.unroll import Batch, Vocabulary, unroll
from eagle3_jax.target.model import Target
from eagle3_jax.train import optim


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What the arithmetic of a step depends on, beside the arrays.

    `target` None: offline, features come with the batch and the frozen tree holds the target head's rows of the
    draft vocabulary under target/head/kernel. Else the frozen target runs inside the step.
    """

    train: Train
    graph: nnx.GraphDef
    tx: optax.GradientTransformation
    vocabulary: Vocabulary
    target: Target | None = None

    def sums(self, trained: dict, frozen: dict, batch: dict) -> loss.Sums:
        """The loss's sums over one (micro-)batch; everything that differentiates goes through here."""
        tree = optim.merge(trained, frozen)
        batch, head_UD = self._features(tree["target"], batch)
        draft = model.bind(self.graph, tree["draft"])
        t = self.train
        return unroll(
            draft, tree["embedding"]["embedding"], head_UD, self.vocabulary, batch,
            depth=t.unroll, mask=t.mask, oov_rows=t.oov_rows,
        )[0]  # fmt: skip

    def _features(self, target: dict, batch: dict) -> tuple[Batch, jax.Array]:
        compute = jnp.dtype(self.train.dtype)
        if self.target is None:
            head_UD = target["head"]["kernel"]
        else:
            aux, final = self.target.features(target, batch["ids"], batch["position"], batch["segment"])
            top, lse = self.target.top_and_lse(target, final)
            batch = batch | dict(aux=aux, final=final, top=top, lse=lse)
            head_UD = self.target.head(target)[draft_ids(self.vocabulary)]
        batch = batch | {name: batch[name].astype(compute) for name in ("aux", "final")}
        return Batch(**batch), head_UD

    def objective(self, sums: loss.Sums) -> tuple[jax.Array, jax.Array]:
        t = self.train
        return loss.objective(sums, kind=t.loss, normalise=t.normalise, decay=t.decay)

    def gradients(self, trained: dict, frozen: dict, batch: dict):
        """(loss, per-step losses [K], sums, gradients) of the whole batch, in `micro_batches` parts.

        The loss is a function of the batch's sums, so its gradient is that of the sums weighted by d loss / d sum.
        Those weights need the whole batch's counts (and for lk_lambda its rates): a first pass finds them. For
        the other losses the weights depend on counts alone and XLA drops the draft from that pass.
        """
        n = self.train.micro_batches
        if n == 1:

            def whole(trained):
                sums = self.sums(trained, frozen, batch)
                value, losses_K = self.objective(sums)
                return value, (losses_K, sums)

            (value, (losses_K, sums)), grads = jax.value_and_grad(whole, has_aux=True)(trained)
            return value, losses_K, sums, grads
        # Row i goes to part i % n: every data shard keeps its rows in every part.
        parts = jax.tree.map(lambda x: x.reshape(-1, n, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(total, part):
            return jax.tree.map(jnp.add, total, self.sums(trained, frozen, part)), None

        first = jax.tree.map(lambda x: x[0], parts)
        zero = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(self.sums, trained, frozen, first)
        )
        total, _ = jax.lax.scan(add, zero, parts)
        weights, _ = jax.grad(self.objective, has_aux=True)(total)

        def add_gradient(carry, part):
            sums, back = jax.vjp(lambda trained: self.sums(trained, frozen, part), trained)
            return jax.tree.map(jnp.add, carry, (sums, back(weights)[0])), None

        nothing = (zero, jax.tree.map(jnp.zeros_like, trained))
        (sums, grads), _ = jax.lax.scan(add_gradient, nothing, parts)
        value, losses_K = self.objective(sums)
        return value, losses_K, sums, grads

    def __call__(self, trained: dict, opt, frozen: dict, batch: dict):
        """One update: (trained, opt, metrics)."""
        value, losses_K, sums, grads = self.gradients(trained, frozen, batch)
        trained, opt = optim.update(self.tx, grads, opt, trained, frozen)
        log = dict(loss=value, losses=losses_K, grad_norm=optax.global_norm(grads)) | loss.metrics(sums)
        log["rows_computed"] = jnp.float32(
            batch["rows"].shape[1] / batch["ids"].shape[1] if "rows" in batch else 1
        )
        return trained, opt, log

    def compiled(self, mesh: Mesh, trained_sharding, opt_sharding, frozen_sharding) -> Callable:
        """Jitted on `mesh`; trained leaves and optimiser state are donated. Batches come placed."""
        return jax.jit(
            self.__call__,
            in_shardings=(trained_sharding, opt_sharding, frozen_sharding, axes.rows(mesh)),
            out_shardings=(trained_sharding, opt_sharding, axes.named(mesh, "")),
            donate_argnums=(0, 1),
        )


def draft_ids(vocabulary: Vocabulary) -> jax.Array:
    """Target id of every draft id, [U]."""
    return jnp.arange(len(vocabulary.d2t)) + vocabulary.d2t


def opt_shardings(mesh: Mesh, opt, trained_shardings: dict):
    """Moments lie where their parameter lies, counters everywhere."""
    where = optim.flat(trained_shardings)

    def one(path, _):
        keys = [k.key for k in path if isinstance(k, jax.tree_util.DictKey)]
        names = ["/".join(keys[i:]) for i in range(len(keys))]
        return next((where[n] for n in names if n in where), axes.named(mesh, ""))

    return jax.tree.map_with_path(one, opt)
