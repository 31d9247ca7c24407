"""Speculative decoding, batched and jitted, as SGLang runs it: a chain of drafts, or a tree (topk > 1).

One round: the target verifies the bonus and the drafts after it; the drafts on the way from the bonus along its own
choices are accepted and its choice after them is the next bonus (its choice: the best token or, with a temperature,
one drawn at each node, see `_choices`); the draft then re-reads the accepted tokens with real
target states ("extend") and drafts anew on its own states. The draft's keys of drafted rows are scratch.

Row n-1 of the draft reads the embedding of x[n] and the target states of x[n-1]; n counts the tokens that the
target has in its cache, x[n] is the bonus.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from eagle3_jax import axes
from eagle3_jax.decode import tree
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.sampling import GREEDY, Sampling, choose
from eagle3_jax.draft import model
from eagle3_jax.layers import cached_attention, empty_cache, keep_slots, slots_seen
from eagle3_jax.target.model import Target


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["params", "embedding", "d2t"],
    meta_fields=["graph"],
)
@dataclasses.dataclass(frozen=True)
class DraftWeights:
    """A draft as serving needs it."""

    graph: nnx.GraphDef
    params: dict  # tree of draft/model.py
    embedding: jax.Array
    d2t: jax.Array  # [U] int32 offsets


@dataclasses.dataclass
class Round:
    """One verify step of one prompt. `n`: tokens in the target's cache before it; the drafting row is n-1.

    Node 0 is the bonus, node i+1 is drafts[i], a child of node parents[i].
    """

    n: int
    bonus: int
    drafts: list[int]
    parents: list[int]
    accepted: int
    emitted: list[int]  # accepted drafts and the new bonus


@dataclasses.dataclass
class Answer:
    """What decoding one prompt gave. `tokens` end with the end token or at max_new_tokens."""

    tokens: list[int]
    rounds: list[Round]
    scores: list[tuple[float, int, float]]  # per token: its logit, the runner-up and the runner-up's logit


def _draft_rows(draft: model.Draft, weights, cache, ids_BT, state_BTD, start_B, position_BT, mask_BTS=None):
    """Run the draft's layer on T rows that go to slots `start` .. of its cache; returns logits, states, cache."""
    embed_BTD = weights.embedding[ids_BT].astype(state_BTD.dtype)
    x_BTC = draft.inputs(embed_BTD, state_BTD)
    q, (k, v) = draft.query(x_BTC, position_BT), draft.key_value(x_BTC, position_BT)
    attended, cache = cached_attention(q, k, v, cache, start_B, mask_BTS)
    logits_BTU, state_BTD = draft.head(draft.finish(state_BTD, attended))
    return logits_BTU, state_BTD, cache


def extend_and_draft(weights: DraftWeights, cache, ids_BT, aux_BTM, start_B, pick_B, plan: Drafting):
    """Read T verified rows (next tokens `ids`, target states `aux`), then draft a tree after row `pick`.

    Returns (drafts [B, N], parents [B, N], cache), see tree.choose. Of each level the `topk` best candidates are
    rows of the next forward pass, best first. The state that such a row starts from is its parent's; its keys are
    row r's of the earlier levels, whatever nodes stood there: so does SGLang, and a draft's proposals depend on it.
    """
    draft = model.bind(weights.graph, weights.params)
    B, topk = len(start_B), plan.topk
    rows = jnp.arange(B)
    position_BT = start_B[:, None] + jnp.arange(ids_BT.shape[1])[None]
    logits, state, cache = _draft_rows(
        draft, weights, cache, ids_BT, draft.fuse(aux_BTM), start_B, position_BT
    )
    logits_BKU, state_BKD = logits[rows, pick_B][:, None], state[rows, pick_B][:, None]
    n_B = start_B + pick_B + 1
    score_BK, parent_BK = jnp.ones((B, 1), jnp.float32), jnp.full((B, 1), -1, jnp.int32)
    pool, size = [], 0
    for j in range(plan.steps):
        index_BC, score_BC = tree.children(logits_BKU, score_BK, topk)
        token_BC = index_BC + weights.d2t[index_BC]
        pool.append((token_BC, score_BC, jnp.repeat(parent_BK, topk, axis=1)))
        if j + 1 < plan.steps:
            score_BK, at_BK = jax.lax.top_k(score_BC, topk)
            own = jnp.tile(jnp.eye(topk, dtype=bool), (1, j + 1))[None]
            mask_BKS = slots_seen(n_B, jnp.broadcast_to(own, (B, *own.shape[1:])), cache["k"].shape[3])
            position_BK = jnp.broadcast_to((n_B + j)[:, None], (B, topk))
            logits_BKU, state_BKD, cache = _draft_rows(
                draft, weights, cache, tree.take(token_BC, at_BK), tree.take(state_BKD, at_BK // topk),
                n_B + j * topk, position_BK, mask_BKS,
            )  # fmt: skip
            parent_BK = size + at_BK
            size += token_BC.shape[1]
    token_BP, score_BP, parent_BP = (jnp.concatenate(x, axis=1) for x in zip(*pool, strict=True))
    return *tree.choose(token_BP, score_BP, parent_BP, plan.tokens - 1), cache


def _choices(logits_BTV, sampling: Sampling, stream_B, place_BT):
    """The target's choice after every node, the best logit, the runner-up and its logit, each [B, T].

    A draft is right if it is what was drawn at its parent: it is accepted with the target's own probability of it,
    and what stands in the place of a rejected one comes from the rest. That is verification by the target alone
    (SGLang's tree_speculative_sampling_target_only, thresholds 1): the text is distributed as the target's own.
    """
    two = _best_two(logits_BTV)
    if sampling.temperature == 0:
        return two
    B, T, V = logits_BTV.shape
    drawn = choose(logits_BTV.reshape(B * T, V), sampling, jnp.repeat(stream_B, T), place_BT.reshape(B * T))
    return drawn.reshape(B, T), *two[1:]


def _best_two(logits_BTV):
    """Argmax, its logit, the runner-up and its logit, each [B, T]."""
    best = jnp.argmax(logits_BTV, axis=-1)
    top = jnp.max(logits_BTV, axis=-1)
    rest = jnp.where(jnp.arange(logits_BTV.shape[-1])[None, None] == best[..., None], -jnp.inf, logits_BTV)
    return best.astype(jnp.int32), top, jnp.argmax(rest, axis=-1).astype(jnp.int32), jnp.max(rest, axis=-1)


class Speculator:
    """Compiled prefill and round of one target and way of drafting; rows are spread over the data axis."""

    def __init__(self, target: Target, plan: Drafting, mesh: Mesh, sampling: Sampling = GREEDY):
        self.target, self.plan, self.sampling, self.shards = target, plan, sampling, mesh.shape["data"]
        self._prefill = axes.over_rows(self._prefill_impl, mesh, arguments=4, whole=1, donate=(1,))
        self._start = axes.over_rows(self._start_impl, mesh, arguments=9, whole=2, donate=(2, 3))
        self._round = axes.over_rows(self._round_impl, mesh, arguments=4, whole=2, donate=(2,))

    def _prefill_impl(self, target_params, cache, ids_BT, start_B):
        aux, final, cache = self.target.decode(target_params, cache, ids_BT, start_B)
        return cache, (aux, final)

    def _start_impl(
        self, target_params, weights, cache, draft_cache, aux_BTM, final_BTD, ids_BT, n_B, stream_B
    ):
        rows = jnp.arange(len(n_B))
        logits_B1V = self.target.logits(target_params, final_BTD[rows, n_B - 1][:, None])
        two = _choices(logits_B1V, self.sampling, stream_B, n_B[:, None])
        bonus_B = two[0][:, 0]
        next_BT = jnp.pad(ids_BT[:, 1:], ((0, 0), (0, 1))).at[rows, n_B - 1].set(bonus_B)
        drafts, parents, draft_cache = extend_and_draft(
            weights, draft_cache, next_BT, aux_BTM, jnp.zeros_like(n_B), n_B - 1, self.plan
        )
        state = dict(
            cache=cache, draft_cache=draft_cache, n=n_B, bonus=bonus_B, drafts=drafts, parents=parents,
            stream=stream_B,
        )  # fmt: skip
        return state, two

    def _round_impl(self, target_params, weights, state, active_B):
        plan, n_B, drafts_BN, parents_BN = self.plan, state["n"], state["drafts"], state["parents"]
        ids_BT = jnp.concatenate([state["bonus"][:, None], drafts_BN], axis=1)
        if plan.topk == 1:
            see_BTT, below_BT = None, jnp.arange(ids_BT.shape[1])[None]
        else:
            see_BTT = tree.ancestors(parents_BN, plan.depth)
            below_BT = jnp.sum(see_BTT, axis=2, dtype=jnp.int32) - 1
        aux, final, cache = self.target.decode(target_params, state["cache"], ids_BT, n_B, see_BTT)
        place_BT = n_B[:, None] + below_BT + 1
        two = _choices(self.target.logits(target_params, final), self.sampling, state["stream"], place_BT)
        accepted_B, path = tree.walk(drafts_BN, parents_BN, two[0], plan.depth)
        if plan.topk > 1:  # a chain's accepted tokens are where they belong
            cache = [keep_slots(layer, n_B, path, plan.tokens) for layer in cache]
        aux, *two = (tree.take(x, path) for x in (aux, *two))
        drafts, parents, draft_cache = extend_and_draft(
            weights, state["draft_cache"], two[0], aux, n_B, accepted_B, plan
        )
        bonus_B = jnp.take_along_axis(two[0], accepted_B[:, None], axis=1)[:, 0]
        # A finished row repeats its last round, so that it cannot run ever farther past the end of its cache,
        # where writes are moved back: nobody reads that row again.
        new = dict(
            cache=cache, draft_cache=draft_cache, n=jnp.where(active_B, n_B + accepted_B + 1, n_B),
            bonus=jnp.where(active_B, bonus_B, state["bonus"]),
            drafts=jnp.where(active_B[:, None], drafts, drafts_BN),
            parents=jnp.where(active_B[:, None], parents, parents_BN), stream=state["stream"],
        )  # fmt: skip
        return new, (accepted_B, drafts_BN, parents_BN, *two)

    def batch(
        self, target_params, weights: DraftWeights, prompts: Sequence[Sequence[int]], length: int,
        streams: Sequence[int],
    ):  # fmt: skip
        """Start one batch: (state, first tokens). `length`: the size of the caches; `streams`: sampling.choose."""
        ids_BT, n_B = pad_prompts(prompts)
        B, shape = len(prompts), model.bind(weights.graph, weights.params).shape
        draft_cache = empty_cache(B, shape.num_key_value_heads, shape.head_dim, length, self.target.dtype)
        cache = self.target.new_cache(B, length)
        cache, (aux, final) = prefill(functools.partial(self._prefill, target_params), cache, ids_BT)
        stream_B = np.asarray(streams, np.int32)
        return self._start(target_params, weights, cache, draft_cache, aux, final, ids_BT, n_B, stream_B)

    def round(self, target_params, weights, state, active_B):
        return self._round(target_params, weights, state, active_B)


# Lengths are rounded up to these, so that few shapes are compiled.
PROMPT, TEXT, CACHE = 32, 64, 128


def cache_room(length: int) -> int:
    return axes.round_up(length, CACHE)


def pad_prompts(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Ids padded on the right [B, T], T a multiple of PROMPT, and lengths [B]; int32."""
    return _pad(prompts, PROMPT)


def _pad(rows: Sequence[Sequence[int]], step: int) -> tuple[np.ndarray, np.ndarray]:
    ids_BT = np.zeros((len(rows), axes.round_up(max(map(len, rows)), step)), np.int32)
    for padded, ids in zip(ids_BT, rows, strict=True):
        padded[: len(ids)] = ids
    return ids_BT, np.array([*map(len, rows)], np.int32)


def prefill(run: Callable, cache, ids_BT: np.ndarray):
    """`run(cache, ids, start) -> (cache, outputs)` over PROMPT tokens at a time: one shape, whatever the length.

    Returns the cache and the outputs, joined along T.
    """
    parts = []
    for start in range(0, ids_BT.shape[1], PROMPT):
        at_B = np.full(len(ids_BT), start, np.int32)
        cache, out = run(cache, ids_BT[:, start : start + PROMPT], at_B)
        parts.append(out)
    return cache, jax.tree.map(lambda *x: jnp.concatenate(x, axis=1), *parts)


def pad_texts(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, positions and segments [B, T] of one text per row, for a forward pass."""
    ids_BT, n_B = _pad(texts, TEXT)
    position_BT = np.broadcast_to(np.arange(ids_BT.shape[1], dtype=np.int32), ids_BT.shape)
    return ids_BT, position_BT, (position_BT < n_B[:, None]).astype(np.int32)


def decode(
    speculator: Speculator, target_params: dict, weights: DraftWeights, prompts: Sequence[Sequence[int]], *,
    max_new_tokens: int, end_tokens: Sequence[int], batch: int, advance: Callable[[int], None] = lambda n: None,
) -> list[Answer]:  # fmt: skip
    """Decode all prompts, `batch` at a time, those of like length together; answers in the prompts' order.

    Sampled answers are those of each prompt's number, whatever the batch. `advance(tokens)` is told of every round's
    new tokens.
    """
    target_params = speculator.target.unstacked(target_params)
    batch = axes.round_up(batch, speculator.shards)
    answers: dict[int, Answer] = {}
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        # A short last batch is filled up with its last prompt, so that it has the shape of the others.
        padded = chosen + [chosen[-1]] * (batch - len(chosen))
        filled = [prompts[i] for i in padded]
        longest = axes.round_up(max(map(len, filled)), PROMPT)
        room = cache_room(longest + max_new_tokens + speculator.plan.slots)
        state, two = speculator.batch(target_params, weights, filled, room, padded)
        two = jax.device_get(two)
        ends = set(end_tokens)
        found = [Answer([int(two[0][b, 0])], [], [_score(two, b, 0)]) for b in range(len(chosen))]
        while any(active := [not _done(a, ends, max_new_tokens) for a in found]):
            before, bonus = jax.device_get((state["n"], state["bonus"]))
            mask_B = np.array(active + [False] * (batch - len(chosen)))
            state, out = speculator.round(target_params, weights, state, mask_B)
            accepted, drafts, parents, *two = jax.device_get(out)
            new = 0
            for b, answer in enumerate(found):
                if active[b]:
                    a = int(accepted[b])
                    emitted = two[0][b, : a + 1].tolist()
                    tree_of_b = drafts[b].tolist(), parents[b].tolist()
                    answer.rounds.append(Round(int(before[b]), int(bonus[b]), *tree_of_b, a, emitted))
                    kept = _cut(emitted, ends, max_new_tokens - len(answer.tokens))
                    answer.tokens += kept
                    answer.scores += [_score(two, b, t) for t in range(len(kept))]
                    new += len(kept)
            advance(new)
        answers |= dict(zip(chosen, found, strict=True))
    return [answers[i] for i in range(len(prompts))]


def _score(two, b: int, t: int) -> tuple[float, int, float]:
    return float(two[1][b, t]), int(two[2][b, t]), float(two[3][b, t])


def _done(answer: Answer, ends: set[int], limit: int) -> bool:
    return len(answer.tokens) >= limit or answer.tokens[-1] in ends


def _cut(tokens: list[int], ends: set[int], room: int) -> list[int]:
    """The tokens up to the end token, which stays, or up to the limit."""
    stop = next((i + 1 for i, t in enumerate(tokens) if t in ends), len(tokens))
    return tokens[: min(stop, room)]
