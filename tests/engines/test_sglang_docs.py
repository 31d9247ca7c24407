"""The documented commands that need the real SGLang, in the tiny project of tests/documented.py."""

import documented

COMMANDS = [
    (page, c) for page in documented.PAGES for c in documented.commands_of(page) if documented.needs_engine(c)
]


def test_commands_that_need_an_engine_are_documented_and_run(sglang, tmp_path, monkeypatch, capsys):
    documented.stand_in(monkeypatch, tmp_path)
    documented.project(tmp_path)
    assert COMMANDS
    for command in dict.fromkeys(c for _, c in COMMANDS):
        command = command.replace("runs/mine", "runs/demo").replace("runs/demo-served", "runs/demo-export")
        assert documented.run(command.replace("path/to/target", documented.TARGET)) == 0, (
            f"{command}\n{capsys.readouterr()}"
        )
