"""Greedy speculative decoding in plain numpy, float64, one prompt at a time, nothing remembered between steps.

Every forward pass starts from the tokens alone: the target reads the whole text again, the draft all of its
rows again. Weights are the nested dicts of the models under test, so axes are as `axes.py` names them.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass
class Round:
    n: int  # tokens before the bonus
    bonus: int
    drafts: list[int]  # nodes 1, 2, ..; node 0 is the bonus
    parents: list[int]  # the node that each draft follows
    accepted: int
    emitted: list[int]


@dataclasses.dataclass
class Oracle:
    """A target with `target` weights, and a draft with `draft` weights; sizes come from the arrays."""

    target: dict
    draft: dict
    aux_layers: tuple[int, ...]
    draft_ids: np.ndarray  # draft index -> token id
    eps: float
    theta: float
    fc_norm: bool = False
    norm_output: bool = False
    true_ancestors: bool = False  # what a drafted row sees of the others: not what SGLang does

    def decode(self, prompt, plan, *, max_new_tokens: int, end_tokens) -> tuple[list[int], list[Round]]:
        """The answer and its verify steps; `plan` is (steps, topk, tokens)."""
        text = [*map(int, prompt)]
        answer, rounds = [self._greedy(text)], []
        while len(answer) < max_new_tokens and not set(answer) & set(end_tokens):
            bonus = answer[-1] if not rounds else rounds[-1].emitted[-1]
            drafts, parents = self.propose(text, bonus, *plan)
            n, node, emitted = len(text), 0, []
            while node is not None:
                text.append([bonus, *drafts][node])
                emitted.append(self._greedy(text))
                after = [i + 1 for i, p in enumerate(parents) if p == node and drafts[i] == emitted[-1]]
                node = after[0] if after else None
            rounds.append(Round(n, bonus, drafts, parents, len(emitted) - 1, emitted))
            for token in emitted:
                if len(answer) < max_new_tokens and not set(answer) & set(end_tokens):
                    answer.append(token)
        return answer, rounds

    def features(self, text) -> tuple[np.ndarray, np.ndarray]:
        """Outputs of the aux layers side by side [T, M], and logits [T, V]."""
        w = self.target
        x, see = _f64(w["embed"]["embedding"])[text], np.tri(len(text), dtype=bool)
        places, captured = np.arange(len(text)), []
        for i in range(len(w["layers"]["q"]["kernel"])):
            # One layer of the stack, under the names that a single layer has.
            layer = {name: {k: _f64(v[i]) for k, v in leaf.items()} for name, leaf in w["layers"].items()}
            x = self._block(layer, x, self._norm(x, layer["input_layernorm"]), places, see)
            if i in self.aux_layers:
                captured.append(x)
        head = w["lm_head"]["kernel"] if "lm_head" in w else w["embed"]["embedding"]
        return np.concatenate(captured, axis=1), self._norm(x, w["norm"]) @ _f64(head).T

    def _greedy(self, text) -> int:
        """The target's choice after the text."""
        return int(self.features(text)[1][-1].argmax())

    def propose(self, text, bonus: int, steps: int, topk: int, tokens: int) -> tuple[list[int], list[int]]:
        """Drafts and parents of a tree; with topk 1 it is a chain.

        Row p pairs the state of token p with the embedding of token p + 1. Drafted rows come after them: there are
        `topk` beams, and beam r sees the rows that were drafted in beam r before, whatever nodes they were, while
        the state that it reads is its own parent's.
        """
        fused, w = self.features(text)[0], self.draft
        if self.fc_norm:
            parts = np.split(fused, len(self.aux_layers), axis=1)
            fused = np.concatenate([self._norm(p, w[f"fc_norm_{i}"]) for i, p in enumerate(parts)], axis=1)
        known = list(zip(fused @ _f64(w["fc"]["kernel"]), [*text[1:], bonus], strict=True))
        pool = []  # (token, parent in the pool or None, probability of the path)
        beams = [[] for _ in range(topk)]
        leaves = [
            (None, 1.0, [], *self._draft(known))
        ]  # node, its path's probability and rows, what follows, state
        for _ in range(steps):
            level = []
            for node, path, rows, follows, state in leaves:
                for i in np.argsort(-follows, kind="stable")[:topk]:
                    level.append((len(pool), path * follows[i], rows, state))
                    pool.append((int(self.draft_ids[i]), node, path * follows[i]))
            level.sort(key=lambda leaf: -leaf[1])
            leaves = []
            for place, (node, path, rows, state) in enumerate(level[:topk]):
                seen = rows if self.true_ancestors else beams[place]
                rows = [*seen, (state, pool[node][0])]
                leaves.append((node, path, rows, *self._draft(known + rows)))
            beams = [leaf[2] for leaf in leaves]
        best = sorted(sorted(range(len(pool)), key=lambda i: -pool[i][2])[: tokens - 1])
        parents = [0 if pool[i][1] is None else 1 + best.index(pool[i][1]) for i in best]
        return [pool[i][0] for i in best], parents

    def _draft(self, rows) -> tuple[np.ndarray, np.ndarray]:
        """After rows of (state, token): probabilities over the draft vocabulary, and the next row's state."""
        states, ids = np.stack([r[0] for r in rows]), [r[1] for r in rows]
        w, layer, table = self.draft, self.draft["midlayer"], _f64(self.target["embed"]["embedding"])
        read = np.concatenate(
            [self._norm(table[ids], layer["input_layernorm"]), self._norm(states, layer["hidden_norm"])],
            axis=1,
        )
        places, see = np.arange(len(ids)), np.tri(len(ids), dtype=bool)
        out = self._block(layer, states, read, places, see)[-1]
        normed = self._norm(out, w["norm"])
        odds = np.exp(normed @ _f64(w["lm_head"]["kernel"]))
        return odds / odds.sum(), normed if self.norm_output else out

    def _block(self, w, x, read, places, see):
        """Llama's layer: attention reads `read`, the residual is `x`."""
        q, k, v = (np.tensordot(read, _f64(w[name]["kernel"]), 1) for name in "qkv")
        if "q_norm" in w:
            q, k = self._norm(q, w["q_norm"]), self._norm(k, w["k_norm"])
        q, k = self._rotate(q, places), self._rotate(k, places)
        shared = q.shape[1] // k.shape[1]
        heads = []
        for n in range(q.shape[1]):
            scores = np.where(see, q[:, n] @ k[:, n // shared].T / np.sqrt(q.shape[2]), -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ v[:, n // shared])
        x = x + np.tensordot(np.stack(heads, axis=1), _f64(w["o"]["kernel"]), 2)
        y = self._norm(x, w["post_attention_layernorm"])
        gate = y @ _f64(w["gate"]["kernel"])
        return x + (gate / (1 + np.exp(-gate)) * (y @ _f64(w["up"]["kernel"]))) @ _f64(w["down"]["kernel"])

    def _norm(self, x, w):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.eps) * _f64(w["scale"])

    def _rotate(self, x, places):
        """Channel i and channel i + half turn together, as one complex number."""
        half = x.shape[-1] // 2
        turn = np.exp(1j * np.outer(places, self.theta ** (-np.arange(half) / half)))[:, None]
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)


def _f64(x) -> np.ndarray:
    return np.asarray(x, np.float64)
