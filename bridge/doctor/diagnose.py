"""Which faults a draft has: hypotheses are measured one by one, then together where one alone is worth nothing."""

import dataclasses
from collections.abc import Callable, Iterable

from bridge.doctor import hypotheses, layouts
from bridge.doctor.hypotheses import Hypothesis
from bridge.doctor.probe import Measured
from bridge.doctor.reading import Reading
from eagle3_jax.decode import evaluate
from eagle3_jax.progress import bar

WORTH = 0.05  # accept length that a fix has to gain to be called a cause
HINT = 0.01  # and to be followed up; of both the interval has to lie above zero
NOTHING = 1.1  # below this next to nothing is accepted: faults may hide each other
ROUNDS = 4
FOLLOWED = 4  # of the single fixes, where it takes two to show anything

Probe = Callable[[Reading], Measured]
Fixes = tuple[Hypothesis, ...]


@dataclasses.dataclass(frozen=True)
class Cause:
    """A fault, and what the draft accepts without its fix, all the other causes fixed."""

    hypothesis: Hypothesis
    without: Measured
    cost: float


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """`causes` are ranked by what each costs. `free` are certain faults that cost nothing here."""

    served: Measured
    causes: list[Cause]
    mended: Measured
    reading: Reading  # with all causes fixed
    free: list[Hypothesis]
    alone: list[tuple[Hypothesis, Measured]]  # what each hypothesis would give by itself, best first


def diagnose(reading: Reading, probe: Probe) -> Diagnosis:
    """The causes of what `reading` loses; none where nothing that is known would gain."""
    served = probe(reading)
    chosen, now, at, alone = (), reading, served, None
    for _ in range(ROUNDS):
        together = _together(now)
        singles = _measured(now, [(h,) for h in layouts.all_of(now)], probe)
        alone = singles if alone is None else alone
        found = [*(_measured(now, [together], probe) if len(together) > 1 else []), *singles]
        best = _best(at, found)
        if best is None and _length(at) < NOTHING:
            best = _best(at, _measured(now, _pairs(now, together, singles), probe))
        if best is None:
            break
        fixes, at = best
        chosen, now = (*chosen, *fixes), _apply(now, fixes)
    causes, mended = _causes(reading, chosen, served, at, probe)
    whole = _apply(reading, tuple(c.hypothesis for c in causes))
    ranked = sorted(((h, m) for (h,), m in alone), key=lambda x: -_length(x[1]))
    return Diagnosis(served, causes, mended, whole, list(_together(whole)), ranked)


def _apply(reading: Reading, fixes: Fixes) -> Reading:
    """One after the other; a fix that another made needless is left out."""
    for fix in fixes:
        reading = fix.apply(reading) or reading
    return reading


def _together(reading: Reading) -> Fixes:
    """All that is certain, what one fix brings to light included."""
    found: Fixes = ()
    while True:
        known = {h.name for h in found}
        left = (h for h in hypotheses.certain(reading) if h.name not in known)
        fix = next((h for h in left if h.apply(reading) is not None), None)
        if fix is None:
            return found
        found, reading = (*found, fix), fix.apply(reading)


def _measured(now: Reading, candidates: Iterable[Fixes], probe: Probe) -> list[tuple[Fixes, Measured]]:
    found, candidates = [], list(candidates)
    with bar("what fixes would give", len(candidates), "tried") as progress:
        for fixes in candidates:
            found.append((fixes, probe(_apply(now, fixes))))
            progress.advance(1)
    return found


def _pairs(now: Reading, together: Fixes, singles: list[tuple[Fixes, Measured]]) -> list[Fixes]:
    """Beside all that is certain one more fix, and two: another map or one of the best, with each of the others."""
    base = together if len(together) > 1 else ()
    ranked = sorted(singles, key=lambda x: -_length(x[1]))
    best = {fixes[0].name for fixes, _ in ranked[:FOLLOWED]}
    others = layouts.all_of(_apply(now, base))
    maps = {h.name for h in hypotheses.maps(_apply(now, base))}
    first = [h for h in others if h.name in maps | best]
    pairs = [(*base, a, b) for a in first for b in others if a is not b and not {a.name, b.name} <= maps]
    return ([(*base, h) for h in others] if base else []) + pairs


def _length(measured: Measured) -> float:
    """One that does not start is worse than one that accepts nothing."""
    return 0.0 if measured.accept_length is None else measured.accept_length


def _gain(before: Measured, after: Measured) -> float:
    """In accept length; nothing where the interval does not exclude that it is chance."""
    if before.pairs is None or after.pairs is None:
        return _length(after) - _length(before)
    gain = _length(after) - _length(before)
    return gain if evaluate.gain(before.pairs, after.pairs)[0] > 0 else min(gain, 0.0)


def _best(at: Measured, found: list[tuple[Fixes, Measured]]) -> tuple[Fixes, Measured] | None:
    """Of those that gain something the one that gains most; of equals the first."""
    best, most = None, HINT
    for fixes, measured in found:
        if (gain := _gain(at, measured)) > most + 1e-9:
            best, most = (fixes, measured), gain
    return best


def _causes(
    reading: Reading, chosen: Fixes, served: Measured, at: Measured, probe: Probe
) -> tuple[list[Cause], Measured]:
    """Those of the chosen fixes that the rest cannot do without, ranked, and what they give together."""
    kept, costs = chosen, {}
    for fix in reversed(chosen):  # a first step may have been a wrong one, which a later one made needless
        rest = tuple(h for h in kept if h is not fix)
        without = probe(_apply(reading, rest)) if rest else served
        if _gain(without, at) > WORTH:
            costs[fix] = without
        else:
            kept, at = rest, without
    causes = [Cause(h, costs[h], _length(at) - _length(costs[h])) for h in kept]
    return sorted(causes, key=lambda c: -c.cost), at
