"""What may import what: data flows one way, and training needs no torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "eagle3_jax").rglob("*.py"))


def imported(path: Path) -> set[str]:
    """Top-level packages that a file imports anywhere, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_eagle3_jax_imports_neither_torch_nor_bridge(path):
    assert not imported(path) & {"torch", "bridge", "sglang", "vllm"}


def test_importing_every_module_of_both_packages_does_not_load_torch():
    files = [*MODULES, *sorted((ROOT / "bridge").glob("*.py"))]
    names = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in files]
    code = f"import sys, importlib\nfor n in {names}: importlib.import_module(n)\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
