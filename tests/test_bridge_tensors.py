"""Safetensors: what goes through the file comes back, and damage is named."""

import json

import ml_dtypes
import numpy as np
import pytest

from eagle3_jax import tensors
from eagle3_jax.errors import WeightError


def test_a_transposed_view_survives_the_file(tmp_path):
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    tensors.save(tmp_path / "a.safetensors", {"t": x.T, "step": x[:, ::2], "one": np.array(7, np.int64)})
    back = tensors.read(tmp_path / "a.safetensors")
    np.testing.assert_array_equal(back["t"], x.T)
    np.testing.assert_array_equal(back["step"], x[:, ::2])
    assert back["one"].shape == ()


def test_every_dtype_keeps_its_bits(tmp_path):
    bits = np.arange(256, dtype=np.uint8)
    arrays = {k: bits.view(v) if v != np.bool_ else bits > 9 for k, v in tensors.DTYPES.items()}
    tensors.save(tmp_path / "a.safetensors", arrays, {"made": "here"})
    opened = tensors.open_tensors(tmp_path / "a.safetensors")
    for name, x in arrays.items():
        assert opened[name].dtype == x.dtype and opened[name].shape == x.shape
        assert opened[name][...].tobytes() == x.tobytes()
    assert tensors.metadata(tmp_path / "a.safetensors")["made"] == "here"


def test_a_save_that_fails_midway_leaves_the_old_file_alone(tmp_path, monkeypatch):
    tensors.save(tmp_path / "a.safetensors", {"x": np.ones(2)})

    def full_disk(arrays, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(tensors, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        tensors.save(tmp_path / "a.safetensors", {"x": np.zeros(2)})
    np.testing.assert_array_equal(tensors.read(tmp_path / "a.safetensors")["x"], np.ones(2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def test_slices_of_shards_are_read_without_the_rest(tmp_path):
    x = np.arange(20, dtype=np.float32).reshape(5, 4).astype(ml_dtypes.bfloat16)
    tensors.save(tmp_path / "1.safetensors", {"a": x})
    tensors.save(tmp_path / "2.safetensors", {"b": -x})
    (tmp_path / tensors.INDEX).write_text(
        json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}})
    )
    opened = tensors.open_tensors(tmp_path)
    np.testing.assert_array_equal(opened["a"][1:3], x[1:3])
    np.testing.assert_array_equal(opened["b"][:, 2:], -x[:, 2:])
    np.testing.assert_array_equal(np.concatenate(list(opened["a"].blocks(2))), x)
    assert opened["b"].shape == (5, 4) and set(tensors.read(tmp_path)) == {"a", "b"}


@pytest.mark.parametrize("keep", [3, 40, -1])
def test_a_truncated_file_is_named(tmp_path, keep):
    file = tmp_path / "model.safetensors"
    tensors.save(file, {"x": np.ones((4, 4))})
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(WeightError, match=r"model\.safetensors: truncated"):
        tensors.read(tmp_path)


def test_a_shard_that_is_missing_or_lies_is_named(tmp_path):
    index = tmp_path / tensors.INDEX
    index.write_text(json.dumps({"weight_map": {"x": "gone.safetensors"}}))
    with pytest.raises(WeightError, match=r"names the shard 'gone\.safetensors'"):
        tensors.open_tensors(tmp_path)
    tensors.save(tmp_path / "gone.safetensors", {"y": np.ones(1)})
    with pytest.raises(WeightError, match="'x' is said to be in"):
        tensors.open_tensors(tmp_path)
    index.write_text("{")
    with pytest.raises(WeightError, match="not an index"):
        tensors.open_tensors(tmp_path)


def test_pickles_and_nothing_are_refused(tmp_path):
    with pytest.raises(WeightError, match=r"no model\.safetensors"):
        tensors.read(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    for path in (tmp_path, tmp_path / "pytorch_model.bin"):
        with pytest.raises(WeightError, match="pickle"):
            tensors.read(path)
    with pytest.raises(WeightError, match="not found"):
        tensors.read(tmp_path / "nowhere")


def test_a_float8_tensor_is_refused_only_when_read(tmp_path):
    weights = {"eight": np.zeros(4, ml_dtypes.float8_e4m3fn), "x": np.ones(2, np.float32)}
    tensors.save(tmp_path / "model.safetensors", weights)
    opened = tensors.open_tensors(tmp_path)
    assert opened["x"][...].sum() == 2
    with pytest.raises(WeightError, match="'eight' is F8_E4M3"):
        opened["eight"][...]
