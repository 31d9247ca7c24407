"""The documented commands that need the real SGLang, in the tiny project of tests/documented.py."""

import documented

AS_IN_THE_PROJECT = {
    "runs/mine": "runs/demo", "runs/demo-served": "runs/demo-export", "path/to/target": documented.TARGET,
}  # fmt: skip


def needed() -> list[str]:
    """Each once, whatever a page calls the run."""
    found = [
        c for page in documented.PAGES for c in documented.commands_of(page) if documented.needs_engine(c)
    ]
    for there, here in AS_IN_THE_PROJECT.items():
        found = [command.replace(there, here) for command in found]
    return sorted({" ".join(command.split()) for command in found})


def test_documented_commands_that_need_an_engine_run(sglang, tmp_path, monkeypatch, capsys):
    documented.stand_in(monkeypatch, tmp_path)
    documented.project(tmp_path)
    commands = needed()
    assert len(commands) > 1
    for command in commands:
        assert documented.run(command) == 0, f"{command}\n{capsys.readouterr()}"
