"""SGLang's own draft class loads what `bridge convert` writes, whole, and computes what the Flax draft computes."""

import bridge_fixture as fixture
import numpy as np
import pytest

from bridge import convert, parity
from eagle3_jax import tensors
from eagle3_jax.draft import model
from eagle3_jax.draft.shape import DraftShape

STEPS = 3  # drafting steps after the prefill
ROWS = 12  # of the prefill
TOLERANCE = 1e-5
SHAPES = [*fixture.SHAPES, "whole_vocabulary"]  # "plain" has grouped heads and head_dim != hidden / heads
SPOILT = "midlayer.hidden_norm.weight"


def _draft(name: str):
    """One of bridge_fixture's drafts in float32, or one whose draft vocabulary is the vocabulary."""
    if name != "whole_vocabulary":
        return fixture.draft(name, "float32")
    draft, rng = fixture.draft("plain", "float32"), np.random.default_rng(1)
    draft.shape = DraftShape(**fixture.PLAIN | {"draft_vocab_size": fixture.PLAIN["vocab_size"]})
    draft.d2t = np.zeros(draft.shape.vocab_size, np.int64)
    wanted = model.abstract(draft.shape)[1]["lm_head"]["kernel"].shape
    draft.params = draft.params | {"lm_head": {"kernel": rng.standard_normal(wanted, np.float32) / 5}}
    return draft


def _inputs(shape: DraftShape, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.integers(0, shape.vocab_size, rows), rng.standard_normal((rows, shape.sizes["m"]), np.float32)


@pytest.fixture(scope="module")
def answers(sglang, tmp_path_factory) -> dict[str, dict]:
    """Every shape, and last a directory with one tensor under another name: one process, since it starts slowly."""
    root, cases = tmp_path_factory.mktemp("drafts"), {}
    for name in [*SHAPES, "spoilt"]:
        draft = _draft("plain" if name == "spoilt" else name)
        convert.write(draft, "run", root / name)
        cases[name] = (root / name, *_inputs(draft.shape))
    found = tensors.read(root / "spoilt")
    found[SPOILT.replace("midlayer", "decoder")] = found.pop(SPOILT)
    tensors.save(root / "spoilt" / tensors.FILE, found)
    return dict(zip(cases, sglang.drafts("run_sglang_draft.py", [*cases.values()], STEPS), strict=True))


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_filled_from_the_directory(answers, name):
    assert answers[name]["unfilled"].tolist() == []


def test_a_tensor_under_another_name_leaves_a_parameter_unfilled(answers):
    assert answers["spoilt"]["unfilled"].tolist() == ["model.layers.0.hidden_norm.weight"]


@pytest.mark.parametrize("name", SHAPES)
def test_logits_states_and_proposals_equal_the_flax_drafts(answers, name, record):
    draft, theirs, largest = _draft(name), answers[name], 0.0
    ours = parity.Cached(draft, convert.DTYPES["float32"])
    stages = ours.prefill(*_inputs(draft.shape))
    for k in range(STEPS + 1):
        if k:
            stages = ours.draft(int(theirs[f"token/{k - 1}"][0]))
        for stage in ("logits", "carried"):
            assert theirs[f"{stage}/{k}"].shape == stages[stage].shape
            np.testing.assert_allclose(
                theirs[f"{stage}/{k}"], stages[stage], rtol=0, atol=TOLERANCE, err_msg=f"{stage}, step {k}"
            )
        largest = max(largest, float(np.abs(theirs[f"logits/{k}"] - stages["logits"]).max()))
        assert theirs[f"token/{k}"].tolist() == [ours.proposal(stages["logits"][-1])]
    record(f"draft class, {name}", loads=True, logits=largest, proposals=(STEPS + 1, STEPS + 1))
