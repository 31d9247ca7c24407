"""What a chart of the report draws of long, spiky and broken series."""

import numpy as np
import pytest

from eagle3_jax.report import chart, curves


def test_thinning_keeps_every_spike_and_gap_in_order():
    values = np.random.default_rng(0).normal(size=10_000)
    values[[17, 5000, 9998]] = 50, -50, 40
    values[7000:7100] = np.nan
    kept = chart.thin(values)
    assert len(kept) <= chart.MOST + 2 and kept == sorted(set(kept))
    assert {0, 17, 5000, 9998, 9999} <= set(kept) and np.isnan(values[kept]).any()
    assert chart.thin(values[:50]) == list(range(50))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 1.44), (0, 720), (3.2, 9.9), (0, 1e-3), (0, 123_456)])
def test_ticks_are_round_few_and_within(low, high):
    found = chart.ticks(low, high)
    assert 3 <= len(found) <= 7 and found == sorted(found) and low <= found[0] and found[-1] <= high
    np.testing.assert_allclose(np.diff(found), found[1] - found[0])
    assert all(len(f"{x:.6g}") <= 7 for x in found)


def test_the_smoothed_line_leaves_out_what_is_not_finite():
    values = [1.0] * 100
    values[30:33] = [float("nan"), float("inf"), float("-inf")]
    steps, smoothed, _ = chart.smooth(chart.Series("x", range(100), values), np.mean)
    assert smoothed == [1.0] * len(steps) and (steps[0], steps[-1]) == (0, 99)
    assert chart.smooth(chart.Series("x", range(10), values[:10]), np.mean) is None


def test_throughput_is_not_deceived_by_saves_and_restarts():
    """Two seconds a step; a save every tenth, a restart that compiles again, and a clock that stood still."""
    lines, seconds = [], 30.0
    for step in range(1, 61):
        seconds += 2.0 + 25.0 * (step % 10 == 1) + 60.0 * (step == 33) - 2.0 * (step == 44)
        lines.append(dict(step=step, seconds=seconds))
    steps, rates = curves.throughput(lines, 1024)
    assert curves.typical(rates) == 512 and max(rates) == 512 and 44 not in steps
    assert curves.throughput(lines[:1], 1024) == ([], []) and curves.typical([]) is None
