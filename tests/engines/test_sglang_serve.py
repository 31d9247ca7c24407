"""`bridge serve` with the real server: what it counts is what our decoder counts."""

import decode_fixture as tiny
import engine_fixture
import numpy as np
import pytest
from bridge_fixture import edit_config

from bridge import serve
from eagle3_jax import axes
from eagle3_jax.decode import evaluate
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.errors import UserError

PROMPTS = tiny.prompts(9, 1)
END, LIMIT = (1, 7), 40  # the target's own eos_token_id among them: SGLang ends there, told or not


@pytest.fixture
def directories(sglang, tmp_path):
    target = engine_fixture.save_target(tmp_path / "target", tiny.tiny().target, tiny.tiny().params)
    return engine_fixture.save_draft(tmp_path / "draft", target, tiny.SMALL.aux, tiny.trained()), target


@pytest.mark.parametrize("plan", [tiny.chain(3), Drafting(4, 3, 10)], ids=lambda p: p.name)
def test_the_three_accept_lengths_equal_their_counterparts(directories, plan, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    server = serve.plan(*directories, "cpu", plan)
    with serve.running(server, 300) as url:
        found = serve.measure(url, PROMPTS, LIMIT, END, 4)
    prompts = [dict(id=str(i), category="", ids=ids) for i, ids in enumerate(PROMPTS)]
    ours, answers = evaluate.evaluate(
        tiny.speculator(plan), tiny.tiny().params, tiny.trained(), prompts, END, axes.make_mesh(),
        max_new_tokens=LIMIT, batch=5,
    )  # fmt: skip
    assert found["tokens"] == [a.tokens for a in answers]
    for key in ("accept_length", "sglang_request", "verify_forwards", "accepted_drafts", "interval"):
        assert found[key] == pytest.approx(ours[key]), key
    assert found["sglang_server"] == pytest.approx(ours["sglang_server"], abs=1e-3)
    assert np.trim_zeros(found["histogram"], "b") == np.trim_zeros(ours["histogram"], "b")


def test_what_kills_the_engine_while_it_warms_up_is_shown(directories):
    """A layer beyond the last that SGLang captures: fc gets two states in place of three."""
    draft, target = directories
    edit_config(draft, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 4]})
    server = serve.Server(
        draft, target, "cpu", tiny.chain(3), "float32", 128, 31999, serve.sglang.python("cpu")
    )
    shown = r"SGLang .*; its last lines:\n(.|\n)*shapes cannot be multiplied"
    with pytest.raises(UserError, match=shown), serve.running(server, 300):
        pass
