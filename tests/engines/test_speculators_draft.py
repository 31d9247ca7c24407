"""speculators' own draft class computes what our draft computes, from the tensors that `bridge convert` writes."""

import pytest
import trainer_fixture
from trainer_fixture import SHAPES, TOLERANCE


@pytest.fixture(scope="module")
def answers(vllm, tmp_path_factory):
    return trainer_fixture.run(vllm, "run_speculators_draft.py", tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize("name", SHAPES)
def test_every_parameter_is_filled_and_every_tensor_has_a_place(answers, name):
    *_, found = answers[name]
    assert found["unfilled"].tolist() == [] and found["strange"].tolist() == []


@pytest.mark.parametrize("name", SHAPES)
def test_its_converter_keeps_all_but_the_norms_of_fc(answers, name):
    *_, found = answers[name]
    wanted = [f"fc_norm.{i}.weight" for i in range(3)] if name == "fc_norm" else []
    assert found["dropped"].tolist() == wanted


@pytest.mark.parametrize("name", SHAPES)
def test_the_logits_of_every_step_equal_the_flax_drafts(answers, name, record):
    found = trainer_fixture.differences(*answers[name])
    assert max(found) <= TOLERANCE
    dropped = answers[name][-1]["dropped"].size > 0
    note = "its converter leaves out fc_norm" if dropped else ""
    record(f"draft class and unroll, {name}", loads=True, logits=max(found), note=note)
