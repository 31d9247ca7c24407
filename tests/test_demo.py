"""The demo's own logic, on a tiny target that answers for itself."""

import json
from pathlib import Path

import pytest
import tiny

from eagle3_jax import demo
from eagle3_jax.data import features
from eagle3_jax.errors import ConfigError
from eagle3_jax.report import page

CONFIG = Path(__file__).parents[1] / demo.CONFIG


def test_minutes_scale_tokens_and_steps_and_nothing_that_defines_the_draft():
    full, short = demo.configure(CONFIG), demo.configure(CONFIG, 30)
    assert demo.configure(CONFIG, demo.FULL_MINUTES) == full
    share = short.train.steps / full.train.steps
    assert 0.3 < share < 0.7
    assert demo.configure(CONFIG, 5).train.steps < short.train.steps
    assert short.data.max_tokens == pytest.approx(full.data.max_tokens * share, rel=0.2)
    assert short.draft == full.draft and short.target == full.target and short.train.run == full.train.run
    assert short.store.path != full.store.path and short.data.prepared != full.data.prepared
    with pytest.raises(ConfigError, match="DEMO_MINUTES=0 must be within 1"):
        demo.configure(CONFIG, 0)


def test_the_demo_runs_once_and_reuses_what_is_done(tmp_path, capsys):
    root = tiny.project(tmp_path)
    own = (
        "data.answers=target",
        "data.max_new_tokens=12",
        "data.answer_batch=4",
        "evaluate.max_new_tokens=8",
    )
    config = tiny.config(root, *own)
    run = demo.run(config)
    store = features.open_store(config.store.path)
    assert store.span.any() and store.card["answers"] == "target"
    told = demo.summary(run)
    result = json.loads((run / "evaluate.json").read_text())
    before = json.loads((run / "evaluate_untrained.json").read_text())
    assert before["step"] == 0 and result["step"] == config.train.steps
    assert f"accept length {result['accept_length']:.3f}" in told and f"{before['accept_length']:.3f}" in told
    assert "minutes of training (chain 3-1-4, teacher-forced" in told
    assert [p["step"] for p in json.loads((run / "curve.json").read_text())] == [0, 5, 10]

    shown = page.render(run)
    assert f'<span id="accept-length">{result["accept_length"]:.3f}</span>' in shown
    assert (
        shown.count('<mark class="s1">') > 1 or shown.count('<mark class="s2">') > 1
    )  # answers of the store

    files = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file() and p.name != "metrics.jsonl"}
    capsys.readouterr()
    demo.run(config)
    assert "evaluate step" not in capsys.readouterr().err
    assert {p: p.stat().st_mtime_ns for p in files} == files

    longer = tiny.config(root, *own, "train.steps=12")
    demo._set_aside(run, longer)
    assert not run.exists() and (run.with_name("run.1") / "evaluate.json").exists()
