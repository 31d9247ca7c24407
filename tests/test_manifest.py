"""The digest: any mesh, any byte; the manifest: what moved, measured."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from eagle3_jax import axes
from eagle3_jax.train import manifest


def noise(dtype, shape=(16, 24)):
    return np.random.default_rng(0).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_digest_does_not_depend_on_the_mesh_and_numpy_agrees(dtype):
    x = noise(dtype)
    seen = {manifest.digest(x)}
    for data, model in ((1, 1), (8, 1), (4, 2), (2, 4)):
        for spec in (("data", "model"), ("model", None), (None, None)):
            sharding = NamedSharding(axes.make_mesh(data, model), PartitionSpec(*spec))
            seen.add(manifest.digest(jax.device_put(x, sharding)))
    assert len(seen) == 1


@pytest.mark.parametrize("dtype", [np.int32, np.bool_, np.float16, np.uint8])
def test_digest_of_a_live_array_equals_that_of_its_file(dtype):
    x = (noise(np.float32) * 100).astype(dtype)
    assert manifest.digest(jnp.asarray(x)) == manifest.digest(x)


def test_digest_of_a_long_numpy_array_is_that_of_the_live_one(monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 100)
    x = noise(np.float32)
    assert manifest.digest(x) == manifest.digest(jnp.asarray(x))


def test_digest_of_int64_sees_the_high_words():
    x = np.arange(100, dtype=np.int64)
    high = x.copy()
    high[7] += 1 << 40
    assert manifest.digest(x) != manifest.digest(high)


@pytest.mark.parametrize("live", [False, True])
def test_digest_changes_with_a_sign_of_zero_a_low_bit_and_any_swap(live):
    x = np.zeros((8, 8), np.float32)
    x[3] = np.linspace(-1, 1, 8)
    x[4, :2] = 0.0, -0.0
    sign, low, swap, rows = (x.copy() for _ in range(4))
    sign[0, 0] = -0.0
    low[3, 3] = np.nextafter(low[3, 3], 1)
    swap[4, :2] = -0.0, 0.0  # differ by 2**31 each: a sum of word * odd weight would not see it
    rows[[3, 5]] = rows[[5, 3]]
    changed = [x, sign, low, swap, rows, x.T]
    assert len({manifest.digest(jnp.asarray(a) if live else a) for a in changed}) == len(changed)


def state():
    return {
        "draft": {"fc": {"kernel": jnp.full((4, 2), 3.0)}, "norm": {"scale": jnp.zeros(2)}},
        "embedding": {"embedding": jnp.ones((3, 2), jnp.bfloat16)},
    }


LABELS = {
    "draft": {"fc": {"kernel": "train"}, "norm": {"scale": "train"}},
    "embedding": {"embedding": "frozen"},
    "target": {"head": "frozen"},
}
ORIGINS = {
    "draft/fc/kernel": manifest.RANDOM + "0",
    "draft/norm/scale": manifest.RANDOM + "0",
    "embedding/embedding": manifest.COPIED + "model.embed_tokens.weight",
}


def test_manifest_measures_what_moved_and_holds_both_digests_of_what_must_not():
    live = state()
    begun = manifest.build(live, LABELS, ORIGINS, {"data": "abc"})
    start = {"draft": jax.tree.map(np.asarray, live["draft"])}
    live["draft"] = jax.tree.map(lambda x: x + 4.0, live["draft"])
    live["embedding"] = {"embedding": live["embedding"]["embedding"].at[0, 0].set(2)}
    now = manifest.build(live, LABELS, ORIGINS, {"data": "abc"}, start, begun)["leaves"]

    kernel, scale, embedding = now.values()
    assert kernel["moved"] == pytest.approx(np.sqrt(8 * 16))
    assert kernel["relative"] == pytest.approx(4 / 3)
    assert scale["relative"] is None  # grew from nothing
    assert begun["leaves"]["draft/fc/kernel"]["moved"] == 0
    assert embedding["start_digest"] == begun["leaves"]["embedding/embedding"]["digest"]
    assert embedding["digest"] != embedding["start_digest"]
    assert embedding["dtype"] == "bfloat16" and embedding["shape"] == [3, 2]


def test_movement_is_the_same_on_eight_devices():
    x, y = noise(np.float32), noise(np.float32) * 1.5
    sharding = NamedSharding(axes.make_mesh(4, 2), PartitionSpec("data", "model"))
    leaves = [
        manifest.build({"a": a}, {"a": "train"}, {"a": manifest.RANDOM + "0"}, {}, {"a": y}, {"leaves": {}})[
            "leaves"
        ]["a"]
        for a in (jnp.asarray(x), jax.device_put(x, sharding))
    ]
    assert leaves[0]["digest"] == leaves[1]["digest"]
    assert leaves[0]["moved"] == pytest.approx(leaves[1]["moved"], rel=1e-6)
    assert leaves[0]["moved"] == pytest.approx(np.linalg.norm(x - y), rel=1e-6)
