"""The feature store: what was captured is what is read, and a kill, a bad number or a bad disk is noticed."""

import collections
import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from eagle3_jax.data import features
from eagle3_jax.errors import DataError

M, D = 6, 2
HEADER = {"target": "abc", "aux_layers": (1, 2, 3), "data": "def"}
ARRAYS = ("ids", "span", "aux", "final", "top", "lse")


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "CHUNK", 4)
    monkeypatch.setattr(features, "SHARD", 16)


def writer(path, dtype="float32", header=HEADER):
    return features.Writer(path, header, dtype, M, D)


def conversation(i):
    """Lengths straddle shards; one is longer than two of them."""
    rng, length = np.random.default_rng(i), (5, 12, 1, 37, 16)[i % 5]
    return dict(
        ids=rng.integers(0, 99, length),
        span=rng.integers(0, 3, length),
        aux=rng.normal(size=(length, M)).astype(np.float32),
        final=rng.normal(size=(length, D)).astype(np.float32),
        top=rng.integers(0, 99, length),
        lse=rng.normal(size=length).astype(np.float32),
        held_out=i % 3 == 0,
    )


def holds(store, count, dtype=np.float32):
    assert len(store.offsets) == count + 1 and store.card["conversations"] == count
    for i in range(count):
        wanted, at = conversation(i), slice(store.offsets[i], store.offsets[i + 1])
        assert store.held_out[i] == wanted["held_out"]
        for name in ARRAYS:
            kind = dtype if name in ("aux", "final") else getattr(store, name).dtype
            np.testing.assert_array_equal(getattr(store, name)[at], wanted[name].astype(kind))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_conversation_comes_back_bit_for_bit(tmp_path, dtype):
    with writer(tmp_path / "s", dtype) as out:
        for i in range(8):
            out.append(**conversation(i))
    store = features.open_store(tmp_path / "s")
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    holds(store, 8, kind)
    assert store.aux.dtype == kind and store.aux.shape == (store.offsets[-1], M)
    assert store.ids.dtype == store.span.dtype == store.top.dtype == np.int32
    assert store.card["aux_layers"] == [1, 2, 3] and store.card["tokens"] == len(store.ids)


@pytest.mark.parametrize("killed_after", [1, 2, 4, 5])
def test_a_killed_capture_goes_on_where_it_had_committed(tmp_path, killed_after):
    killed = writer(tmp_path / "s")
    for i in range(killed_after):
        killed.append(**conversation(i))
    del killed
    with pytest.raises(DataError, match="capture is not finished"):
        features.open_store(tmp_path / "s")
    with writer(tmp_path / "s") as out:
        assert killed_after - out.conversations <= 2  # at most one shard's worth is captured again
        for i in range(out.conversations, 8):
            out.append(**conversation(i))
    holds(features.open_store(tmp_path / "s"), 8)


def test_a_kill_between_data_and_commit_leaves_no_trace(tmp_path, monkeypatch):
    out = writer(tmp_path / "s")
    out.append(**conversation(1))
    monkeypatch.setattr(out, "_commit", lambda *a, **k: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        out.append(**conversation(3))
    with writer(tmp_path / "s") as out:
        assert out.conversations == 0
        for i in range(3):
            out.append(**conversation(i))
    holds(features.open_store(tmp_path / "s"), 3)


def test_an_error_keeps_what_came_before_and_a_finished_store_can_grow(tmp_path):
    with pytest.raises(KeyboardInterrupt), writer(tmp_path / "s") as out:
        out.append(**conversation(0))
        raise KeyboardInterrupt
    for upto in (3, 3, 6):
        with writer(tmp_path / "s") as out:
            for i in range(out.conversations, upto):
                out.append(**conversation(i))
        holds(features.open_store(tmp_path / "s"), upto)


@pytest.mark.parametrize("name", ["aux", "final", "lse"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_are_refused_by_conversation_token_and_array(tmp_path, name, value):
    bad = conversation(1)
    bad[name].reshape(12, -1)[7, -1] = value
    with writer(tmp_path / "s") as out:
        out.append(**conversation(0))
        with pytest.raises(DataError, match=f"conversation 1: {name} is {value} at token 7"):
            out.append(**bad)
        out.append(**conversation(1))
    holds(features.open_store(tmp_path / "s"), 2)


def test_a_number_that_only_bfloat16_cannot_hold_is_refused(tmp_path):
    bad = conversation(0)
    bad["aux"][2, 1] = np.finfo(np.float32).max
    with writer(tmp_path / "s", "bfloat16") as out, pytest.raises(DataError, match="aux is inf at token 2"):
        out.append(**bad)


def test_lengths_and_widths_that_differ_are_refused(tmp_path):
    with writer(tmp_path / "s") as out:
        with pytest.raises(DataError, match=r"conversation 0: top is \[4\], \[5\] wanted"):
            out.append(**conversation(0) | {"top": np.zeros(4)})
        with pytest.raises(DataError, match=r"final is \[5, 3\], \[5, 2\] wanted"):
            out.append(**conversation(0) | {"final": np.zeros((5, 3))})
        with pytest.raises(DataError, match="no tokens"):
            out.append(**{k: v[:0] for k, v in conversation(0).items() if k != "held_out"})


@pytest.mark.parametrize(
    ("header", "dtype", "message"),
    [
        (HEADER | {"target": "other"}, "float32", "target was 'abc' when this store was begun, now 'other'"),
        (HEADER | {"aux_layers": [1, 2, 4]}, "float32", "aux_layers was"),
        ({"target": "abc", "aux_layers": [1, 2, 3]}, "float32", "data was 'def' .* now None"),
        (HEADER, "bfloat16", "dtype was 'float32' when this store was begun, now 'bfloat16'"),
    ],
)
def test_a_store_of_other_features_is_refused_by_key(tmp_path, header, dtype, message):
    with writer(tmp_path / "s") as out:
        out.append(**conversation(0))
    with pytest.raises(DataError, match=message):
        writer(tmp_path / "s", dtype, header)
    holds(features.open_store(tmp_path / "s"), 1)


def test_a_directory_that_is_no_store_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(DataError, match=r"not empty \('thesis.txt'\)"):
        writer(tmp_path)
    with pytest.raises(DataError, match="no feature store"):
        features.open_store(tmp_path)
    with pytest.raises(DataError, match=r"store\.dtype='float64'"):
        writer(tmp_path / "s", "float64")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "CHUNK", 4)
        patch.setattr(features, "SHARD", 16)
        path = tmp_path_factory.mktemp("f") / "s"
        with writer(path) as out:
            for i in range(4):
                out.append(**conversation(i))
    return path


@pytest.mark.parametrize("array", ARRAYS)
def test_a_flipped_bit_is_an_error_where_it_is_and_nowhere_else(whole, tmp_path, array):
    path = shutil.copytree(whole, tmp_path / "s")
    (file,) = (
        f for f in (path / array / "c").rglob("*") if f.is_file() and f.relative_to(path).parts[2] == "1"
    )
    data = bytearray(file.read_bytes())
    data[3] ^= 4  # in the shard's first chunk: tokens 16 .. 19
    file.write_bytes(data)
    store = features.open_store(path)
    with pytest.raises(DataError, match=f"{array}: shard damaged within tokens 16 .. 17"):
        store._columns[array][16:18]
    assert len(store._columns[array][20:24]) == 4 and len(store._columns[array][:16]) == 16


@pytest.mark.parametrize("damage", ["cut", "remove"])
def test_a_cut_or_lost_shard_never_reads_as_zeros(whole, tmp_path, damage):
    path = shutil.copytree(whole, tmp_path / "s")
    file = path / "aux" / "c" / "1" / "0"
    file.unlink() if damage == "remove" else file.write_bytes(file.read_bytes()[:40])
    with pytest.raises(DataError, match="shard damaged"):
        features.open_store(path).aux[18:30]


@pytest.mark.parametrize("file", ["header.json", "commit.json", "rows.int64", "aux/zarr.json"])
def test_a_damaged_side_file_is_named(whole, tmp_path, file):
    path = shutil.copytree(whole, tmp_path / "s")
    (path / file).write_bytes((path / file).read_bytes()[:20])
    with pytest.raises(DataError, match=f"{file.split('/')[0]}: damaged"):
        features.open_store(path)


def test_reading_a_range_opens_only_its_shards(whole, tmp_path):
    path = shutil.copytree(whole, tmp_path / "s")
    shutil.rmtree(path / "aux" / "c" / "0")
    assert features.open_store(path).aux[16:30].shape == (14, M)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_the_disk_holds(tmp_path, monkeypatch, dtype):
    monkeypatch.undo()  # the real shards
    tokens, aux_width, hidden_size = 5000, 96, 32
    with features.Writer(tmp_path / "s", {}, dtype, aux_width, hidden_size) as out:
        small = np.zeros(tokens, np.int32)
        out.append(small, small, np.zeros((tokens, aux_width)), np.zeros((tokens, hidden_size)), small, small)
    used = sum(f.stat().st_size for f in (tmp_path / "s").rglob("*") if f.is_file())
    assert features.estimate(tokens, aux_width, hidden_size, dtype) == pytest.approx(used, rel=0.01)


def test_a_disk_that_is_too_small_is_said_before_anything_is_written(tmp_path, monkeypatch):
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, 10**9))
    path = tmp_path / "not" / "yet"
    assert features.check_space(path, 1000, M, D, "float32") < 10**9
    with pytest.raises(DataError, match=r"take 8\.0 GB, 1\.0 GB are free"):
        features.check_space(path, 10**8, M, D, "float32")
    assert not path.exists()


def test_the_header_is_plain_json(tmp_path):
    with writer(tmp_path / "s"):
        pass
    assert json.loads((tmp_path / "s" / "header.json").read_text())["aux_layers"] == [1, 2, 3]
    holds(features.open_store(tmp_path / "s"), 0)
