"""One batch is four micro-batches is eight devices; to compute only the rows that count changes nothing."""

import functools
import itertools

import jax
import numpy as np
import pytest
import step_fixture as fixture

from eagle3_jax import axes
from eagle3_jax.draft.unroll import needed_rows

# lk_alpha has no cross entropy, so nothing to normalise.
CASES = [
    c for c in itertools.product(("ce", "lk_alpha", "lk_lambda"), ("serve", "eagle"), ("rows", "tokens"))
    if c[0] != "lk_alpha" or c[2] == "rows"
]  # fmt: skip


def gradients(case, micro_batches: int = 1, devices: int = 1, few_rows: bool = False):
    kind, mask, normalise = case
    settings = fixture.train(loss=kind, mask=mask, normalise=normalise, unroll=2, micro_batches=micro_batches)
    data = fixture.batch()
    if few_rows:
        data["rows"] = needed_rows(data, settings.unroll, mask)
        assert data["rows"].shape[1] < data["ids"].shape[1]
    trained, frozen, batch = fixture.placed(axes.make_mesh(devices, 1), data=data)
    run = jax.jit(fixture.make(settings).gradients)
    return jax.device_get(run(trained, frozen, batch))


one = functools.cache(gradients)


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.parametrize(
    "split",
    [{"micro_batches": 4}, {"devices": 8}, {"few_rows": True, "micro_batches": 2, "devices": 4}],
    ids=["micro-batches", "devices", "rows"],
)
def test_one_batch_is_its_parts(case, split):
    value, losses, sums, grads = one(case)
    got_value, got_losses, got_sums, got_grads = gradients(case, **split)
    np.testing.assert_allclose(got_value, value, rtol=1e-6)
    np.testing.assert_allclose(got_losses, losses, rtol=1e-6)
    for name, x in sums._asdict().items():
        np.testing.assert_allclose(getattr(got_sums, name), x, rtol=2e-6, err_msg=name)
    fixture.assert_close_gradients(got_grads, grads)
