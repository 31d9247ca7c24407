"""`kill -9` before the first save, during one and at a step: what the run ends with is what it would have been."""

import pytest
import soak
import tiny


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tiny.prepared(tmp_path_factory.mktemp("project"))


def test_a_run_that_is_killed_three_times_ends_bit_for_bit_as_one_that_was_not(root):
    steps = soak.steps_for(len(soak.KINDS))
    soak.finish(root, root / "whole", steps)
    kills = soak.survive(root, root / "run", list(soak.KINDS))
    first, saving, at_step = kills
    assert not first.saved and first.logged == 0
    assert saving.half, "it was not killed while it saved"
    assert at_step.saved and at_step.saved[-1] < steps
    found = soak.equal(root / "whole", root / "run", steps)
    assert all(found.values()), found
