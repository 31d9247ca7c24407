"""The commands that README.md and docs/ show, and a tiny project in which they run as they stand there."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
import tiny
import yaml

from bridge import cli as bridge_cli
from bridge import convert
from eagle3_jax import cli, commands, config, defaults
from eagle3_jax.train.loop import train

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
APPS = {"eagle3": cli.app, "bridge": bridge_cli.app}
TARGET = "smollm2-135m-instruct"  # the built-in one: in the tiny project its target goes by that name


def commands_of(page: str) -> list[str]:
    """Every line of the page's bash blocks, without its comment."""
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    lines = [re.sub(r"\s+#.*$", "", line) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def needs_engine(command: str) -> bool:
    """Whether it looks for the real SGLang."""
    words = command.split()
    return "--verify" in words or words[:2] in (
        [".venv/bin/bridge", "serve"], [".venv/bin/bridge", "verify"],
    )  # fmt: skip


def project(root: Path) -> Path:
    """As a reader has it after `make demo`: configurations, a run, its evaluation and its export."""
    tiny.prepared(root)
    (root / "configs").mkdir()
    for file in (ROOT / "configs").glob("*.yaml"):
        shutil.copy(file, root / "configs")
    configure(root, "demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run = train(config.load("configs/demo.yaml"))
        commands.evaluate(run, save_as=commands.RESULT)
        convert.convert(run, "runs/demo-export")
    return root


def configure(root: Path, name: str) -> None:
    """configs/NAME.yaml for the tiny project."""
    settings = (
        f"train.run=runs/{name}", f"target.path={TARGET}", "evaluate.max_new_tokens=8",
        "regenerate={path: runs/own.jsonl, max_new_tokens: 12}",
    )  # fmt: skip
    tree = config.to_dict(tiny.config(root, *settings))
    (root / "configs" / f"{name}.yaml").write_text(yaml.safe_dump(tree))


def run(command: str) -> int:
    """The exit code of an `eagle3` or `bridge` command, run in this process."""
    program, *arguments = shlex.split(command)
    with pytest.raises(SystemExit) as end:
        cli.run(APPS[Path(program).name], Path(program).name, arguments)
    return end.value.code or 0


def stand_in(patch: pytest.MonkeyPatch, root: Path) -> None:
    """From here on commands run in the project, with its target under the built-in one's name."""
    patch.chdir(root)
    patch.setattr(defaults, "target", lambda name: root / "target")
    patch.setattr(defaults, "mt_bench", lambda: defaults.evaluation_prompts(root / "prompts.jsonl"))
