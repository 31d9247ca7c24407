"""Accept length of a draft on a set of prompts, from the decoder's own rounds, with a check against greedy."""

import collections
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode.speculate import Answer, DraftWeights, Speculator, decode, pad_texts
from eagle3_jax.errors import DataError
from eagle3_jax.progress import bar
from eagle3_jax.target.model import Target

DEFINITION = (
    "1 + accepted drafts / verify forwards, pooled over prompts; the prefill and its token excluded, "
    "the last step's overshoot counted"
)
NEAR_TIE = 1e-5  # relative: both implementations must score the two candidates this close
MOST_EXCUSED = 1 / 500  # of the tokens
# Two forward passes of other shapes round differently: in bfloat16 that decides far more often.
BFLOAT16_TIE, BFLOAT16_EXCUSED = 2.0**-5, 1 / 20


def evaluate(
    speculator: Speculator, params: dict, weights: DraftWeights, prompts: Sequence[dict],
    end_tokens: tuple[int, ...], mesh: Mesh, *, max_new_tokens: int, batch: int, label: str = "evaluate",
) -> tuple[dict, list[Answer]]:  # fmt: skip
    """Decode `prompts` (dicts of id, category, ids): what evaluate.json holds, and the answers.

    Raises DataError where the decoder's text is not the target's greedy text.
    """
    target, plan, sampling = speculator.target, speculator.plan, speculator.sampling
    batch = min(batch, len(prompts))
    with bar(label, len(prompts) * max_new_tokens, "tokens") as progress:
        answers = decode(
            speculator, params, weights, [p["ids"] for p in prompts], max_new_tokens=max_new_tokens,
            end_tokens=end_tokens, batch=batch, advance=progress.advance,
        )  # fmt: skip
    result = summary(prompts, answers, plan.steps) | {
        "settings": {
            plan.kind: plan.name, "steps": plan.steps, "topk": plan.topk, "tokens": plan.tokens,
            "temperature": sampling.temperature, "prompts": len(prompts), "max_new_tokens": max_new_tokens,
            "dtype": str(target.dtype),
        },
        "definition": DEFINITION,
    }  # fmt: skip
    if sampling.temperature:
        result["settings"]["seed"] = sampling.seed
        return result, answers
    tie, one_in = _tie_rule(target)
    result["greedy"] = {
        "tokens": sum(len(a.tokens) for a in answers),
        "near_ties": check_greedy(target, params, prompts, answers, batch, mesh),
        "rule": f"the two candidates' logits within {tie:.0e} relative, at most 1 token in {one_in:.0f}",
    }
    return result, answers


def summary(prompts: Sequence[dict], answers: Sequence[Answer], steps: int) -> dict:
    """Accept length with its bootstrap interval, per position, histogram, per category, SGLang's definitions.

    A position is a depth: of a tree's drafts the accepted ones are a path from the bonus.
    """
    accepted = [np.array([r.accepted for r in a.rounds], int) for a in answers]
    by_category = collections.defaultdict(list)
    for prompt, rounds in zip(prompts, accepted, strict=True):
        by_category[prompt["category"]].append(rounds)
    found = counts(accepted, steps)
    return found | {
        "by_category": {name: accept_length(pairs(a)) for name, a in sorted(by_category.items())},
        # SGLang counts tokens of the answer, the prefill's one included, over verify forwards.
        "sglang_request": sum(len(a.tokens) for a in answers) / max(found["verify_forwards"], 1),
        "sglang_server": found["accept_length"],
        "looping": float(np.mean([loops(a.tokens) for a in answers])),
    }


def counts(accepted: Sequence[np.ndarray], steps: int) -> dict:
    """Accept length with its interval, per position and as a histogram, of each prompt's accepted drafts per round."""
    rounds = np.concatenate(accepted)
    return {
        "accept_length": accept_length(pairs(accepted)),
        "interval": interval(pairs(accepted)),
        "verify_forwards": len(rounds),
        "accepted_drafts": int(rounds.sum()),
        "acceptance_by_position": [float(np.mean(rounds > k)) if len(rounds) else 0.0 for k in range(steps)],
        "histogram": np.bincount(rounds, minlength=steps + 1).tolist(),
    }


def pairs(accepted: Sequence[np.ndarray]) -> np.ndarray:
    """[prompts, (accepted, forwards)]."""
    return np.array([(a.sum(), len(a)) for a in accepted])


def accept_length(pairs: np.ndarray) -> float:
    """Of [prompts, (accepted, forwards)]."""
    accepted, forwards = pairs.sum(axis=0)
    return float(1 + accepted / max(forwards, 1))


def interval(pairs: np.ndarray, draws: int = 2000) -> list[float]:
    """95 % bootstrap interval over prompts."""
    return _percentiles(_drawn(pairs, _draws(len(pairs), draws)))


def gain(before: np.ndarray, after: np.ndarray) -> list[float]:
    """95 % bootstrap interval of the gain in accept length, both drafts on the same prompts in the same order."""
    draws = _draws(len(before), 2000)
    return _percentiles(_drawn(after, draws) - _drawn(before, draws))


def _draws(prompts: int, count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(prompts, size=(count, prompts))


def _drawn(pairs: np.ndarray, draws: np.ndarray) -> np.ndarray:
    sums = pairs[draws].sum(axis=1)
    return 1 + sums[:, 0] / np.maximum(sums[:, 1], 1)


def _percentiles(values: np.ndarray) -> list[float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return [float(low), float(high)]


def loops(tokens: Sequence[int], longest: int = 24) -> bool:
    """Whether an answer ends in a loop: its last 48 tokens repeat with a period of at most 24."""
    tail = list(tokens[-2 * longest :])
    return len(tail) == 2 * longest and any(tail[p:] == tail[:-p] for p in range(1, longest + 1))


def _tie_rule(target: Target) -> tuple[float, float]:
    """Relative gap within which two candidates are tied, and of how many tokens one may be such a tie."""
    exact = target.dtype == jnp.float32
    return (NEAR_TIE, 1 / MOST_EXCUSED) if exact else (BFLOAT16_TIE, 1 / BFLOAT16_EXCUSED)


def check_greedy(
    target: Target, params, prompts, answers: Sequence[Answer], batch: int, mesh: Mesh
) -> list[dict]:
    """Near ties at which the decoder left the target's greedy text; anything else is a DataError.

    A text is greedy if each token is the argmax after the text before it, so that one forward pass over the
    finished texts decides, without the cache.
    """

    @jax.jit
    def score(params, ids_BT, position_BT, segment_BT, at_BN, chosen_BN):
        """At N positions of each row: argmax, its logit and the chosen next token's logit."""
        _, final_BTD = target.features(params, ids_BT, position_BT, segment_BT)
        logits_BNV = target.logits(params, jnp.take_along_axis(final_BTD, at_BN[..., None], axis=1))
        chosen_BN = jnp.take_along_axis(logits_BNV, chosen_BN[..., None], axis=-1)[..., 0]
        return jnp.argmax(logits_BNV, axis=-1), jnp.max(logits_BNV, axis=-1), chosen_BN

    tie, one_in = _tie_rule(target)
    excused, order = [], sorted(range(len(prompts)), key=lambda i: len(prompts[i]["ids"]))
    batch = axes.round_up(batch, mesh.shape["data"])
    total, longest = sum(len(a.tokens) for a in answers), max(len(a.tokens) for a in answers)
    with bar("check against greedy", total, "tokens") as progress:
        for start in range(0, len(order), batch):
            part = order[start : start + batch]
            filled = part + [part[-1]] * (batch - len(part))
            packed = pad_texts([[*prompts[i]["ids"], *answers[i].tokens] for i in filled])
            at_BN, chosen_BN = np.zeros((2, batch, longest), np.int32)
            for b, i in enumerate(filled):
                n = len(answers[i].tokens)
                at_BN[b, :n] = len(prompts[i]["ids"]) - 1 + np.arange(n)
                chosen_BN[b, :n] = answers[i].tokens
            placed = jax.device_put((*packed, at_BN, chosen_BN), axes.rows(mesh))
            best, top, mine = jax.device_get(score(params, *placed))
            for b, i in enumerate(part):
                for t, token in enumerate(answers[i].tokens):
                    if (want := int(best[b, t])) == token:
                        continue
                    logit, runner_up, other = answers[i].scores[t]
                    here = float((top[b, t] - mine[b, t]) / abs(top[b, t]))
                    there = (logit - other) / abs(logit)
                    if runner_up != want:  # in bfloat16 three may be tied
                        there = np.inf if target.dtype == jnp.float32 else 0.0
                    if here > tie or there > tie:
                        raise DataError(
                            f"prompt {prompts[i]['id']}: token {t} of the answer is {token}, greedy decoding gives "
                            f"{want} (relative gap {here:.1e}); the decoder is not lossless"
                        )
                    excused.append(
                        dict(prompt=prompts[i]["id"], token=t, chosen=token, greedy=want, gap=here)
                    )
            progress.advance(sum(len(answers[i].tokens) for i in part))
    if len(excused) > total / one_in:
        raise DataError(
            f"{len(excused)} near ties in {total} tokens, at most 1 in {one_in:.0f} may be excused"
        )
    return excused
