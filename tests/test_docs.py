"""The documentation is true: its commands run, what it names exists, its links lead somewhere."""

import re
import subprocess
import sys

import documented
import pytest
from documented import PAGES, ROOT

from eagle3_jax.config import RunConfig

# These change the machine or wait for a reader.
NOT_RUN = ("sudo apt-get ", ".venv/bin/pip install ", ".venv/bin/tensorboard ")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    root = tmp_path_factory.mktemp("documented")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documented.defaults, "target", lambda name: root / "target")
        return documented.project(root)


def in_repository(command: str) -> int:
    """What builds environments or runs for long: only what it would do."""
    command = f"make -n {command[5:]}" if command.startswith("make ") else f"{command} --dry-run"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode if done.stdout.strip() else 1


def in_project(command: str, root) -> int:
    if command.startswith(".venv/bin/python "):
        command = command.replace(".venv/bin/python", sys.executable, 1)
    code = subprocess.run(["bash", "-c", command], cwd=root, check=False).returncode
    if command.startswith("cp "):  # what the reader does next: set target, data and run
        documented.configure(root, "mine")
    return code


@pytest.mark.parametrize("page", [p for p in PAGES if documented.commands_of(p)])
def test_every_documented_command_runs(page, project, monkeypatch, capsys):
    documented.stand_in(monkeypatch, project)
    for command in documented.commands_of(page):
        if command.startswith(NOT_RUN) or documented.needs_engine(command):
            continue
        if command.startswith(("make ", "tpu_scripts/")):
            code = in_repository(command)
        elif command.startswith((".venv/bin/eagle3 ", ".venv/bin/bridge ")):
            code = documented.run(command)
        else:
            code = in_project(command, project)
        assert code == 0, f"{page}: {command}\n{capsys.readouterr()}"


def words(page: str) -> list[str]:
    """What stands between backquotes, outside blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_is_named_exists(page):
    sections = {name: field.annotation for name, field in RunConfig.model_fields.items()}
    known = {
        f"{section}.{key}"
        for section, kind in sections.items()
        for part in (kind, *getattr(kind, "__args__", ()))
        for key in getattr(part, "model_fields", ())
    }
    named = {
        m[1]
        for word in words(page)
        for m in re.finditer(rf"\b((?:{'|'.join(sections)})\.[a-z_]+)\b(?!\.)", word)
    }
    files = {"data.json", "evaluate.json", "train.sh"}
    assert not named - known - files


@pytest.mark.parametrize("page", PAGES)
def test_every_file_and_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / page).read_text())
    lost = [x for x in links if "://" not in x and not ((ROOT / page).parent / x).exists()]
    roots = ("eagle3_jax/", "bridge/", "configs/", "tests/", "benchmarks/", "docs/", "tpu_scripts/")
    paths = [word.split()[0] for word in words(page) if word.startswith(roots)]
    assert not lost and not [p for p in paths if not (ROOT / p).exists() and p != "configs/mine.yaml"]


def test_every_page_can_be_found_from_the_readme():
    assert all(f"({page})" in (ROOT / "README.md").read_text() for page in PAGES[1:])
