"""Does the draft directory compute what the run's checkpoint computes? Flax against PyTorch, through the file."""

import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np

from bridge import convert
from eagle3_jax.draft import model
from eagle3_jax.errors import WeightError

# Max |difference| of the logits; elsewhere times the root mean square of the row, where that exceeds 1: the
# residual stream is not normed, and some of its channels grow to thousands.
TOLERANCE = 1e-4
STEPS = 7  # drafting steps after the prefill
PROMPTS = (1, 6, 33)  # rows of the prefills

STAGES = (
    "embedding", "fc", "input_layernorm", "hidden_norm", "q", "k", "v", "attention", "o", "mlp", "norm",
    "logits", "carried", "token",
)  # fmt: skip
SIZES = (
    "hidden_size", "num_aux_hidden_states", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "draft_vocab_size",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where the two computations first part."""

    prompt: int  # rows of the prefill
    row: str  # "prefill" or "draft step 3"
    stage: str
    size: float  # max |difference|; for "token" the number of different target ids


@dataclasses.dataclass(frozen=True)
class Report:
    first: Difference | None
    largest: dict[str, float]  # stage -> max |difference| over all rows that were compared
    prompts: tuple[int, ...]
    steps: int
    dtype: str  # the file's; both sides compute in float32 with weights rounded to it
    step: int  # of the checkpoint

    @property
    def ok(self) -> bool:
        return self.first is None


def parity(run: str | Path, directory: str | Path, step: int | str | None = None, seed: int = 0) -> Report:
    """Compare a run's checkpoint with a draft directory on random tokens and aux states.

    Prompts of several lengths, the prefill and seven drafting steps each; every stage within TOLERANCE and
    the same proposals, as target ids. Stops at the first difference. Raises UserError where one of the two cannot be
    loaded or PyTorch is missing.
    """
    from eagle3_jax.train import checkpoint  # Orbax is slow to import and only needed here

    return compare(checkpoint.load_draft(run, step), directory, seed)


def compare(draft, directory: str | Path, seed: int = 0) -> Report:
    """`parity` for a draft that is already loaded (train.checkpoint.LoadedDraft)."""
    from bridge.reference import Reference  # torch

    theirs, shape = Reference(directory), draft.shape
    for key in SIZES:
        if (found := getattr(theirs.shape, key)) != (wanted := getattr(shape, key)):
            raise WeightError(f"{directory}/{convert.CONFIG}: {key}={found}, the checkpoint's is {wanted}")
    dtype = convert.read_config(directory).get("torch_dtype")
    if dtype not in convert.DTYPES:
        raise WeightError(
            f"{directory}/{convert.CONFIG}: torch_dtype={dtype!r}; known: {', '.join(convert.DTYPES)}"
        )
    ours, rng = Cached(draft, convert.DTYPES[dtype]), np.random.default_rng(seed)
    prompts = tuple(n for n in PROMPTS if n + STEPS <= shape.max_position_embeddings)
    if not prompts:
        raise WeightError(
            f"{directory}: max_position_embeddings={shape.max_position_embeddings} leaves no room for {STEPS} steps"
        )
    largest: dict[str, float] = {}
    for n in prompts:
        ids = rng.integers(0, shape.vocab_size, n)
        aux = rng.standard_normal((n, shape.sizes["m"]), np.float32)
        token = -1
        for k in range(STEPS + 1):
            a, b = (side.draft(token) if k else side.prefill(ids, aux) for side in (ours, theirs))
            for side, stages in ((ours, a), (theirs, b)):
                stages["token"] = np.array([side.proposal(stages["logits"][-1])])
            for stage in (s for s in STAGES if s in a):
                size, agree = _compare(stage, a[stage], b[stage])
                largest[stage] = max(largest.get(stage, 0.0), size)
                if not agree:
                    first = Difference(n, f"draft step {k}" if k else "prefill", stage, size)
                    return Report(first, largest, prompts, STEPS, dtype, draft.step)
            token = int(a["token"][0])
    return Report(None, largest, prompts, STEPS, dtype, draft.step)


class Cached:
    """The Flax draft over a growing cache, one sequence: the same interface as reference.Reference."""

    def __init__(self, draft, dtype: np.dtype):
        self.shape, self.d2t = draft.shape, draft.d2t
        self.embedding = draft.embedding.astype(np.float32)
        self.graph, _, _ = model.abstract(draft.shape)
        self.params = jax.tree.map(lambda x: jax.device_put(x.astype(dtype).astype(np.float32)), draft.params)

    def prefill(self, ids: np.ndarray, aux: np.ndarray) -> dict[str, np.ndarray]:
        empty = np.zeros((0, self.shape.num_key_value_heads, self.shape.head_dim), np.float32)
        self.keys, self.values = empty, empty
        with jax.default_matmul_precision("highest"):
            state = np.asarray(_fuse(self.graph, self.params, aux[None]))[0]
        return self._rows(ids, state) | {"fc": state}

    def draft(self, token: int) -> dict[str, np.ndarray]:
        return self._rows(np.array([token]), self.carried[-1:])

    def proposal(self, logits: np.ndarray) -> int:
        index = int(np.argmax(logits))
        return index + int(self.d2t[index])

    def _rows(self, ids: np.ndarray, state: np.ndarray) -> dict[str, np.ndarray]:
        position = np.arange(len(self.keys), len(self.keys) + len(ids), dtype=np.int32)
        embed = self.embedding[ids]
        with jax.default_matmul_precision("highest"):
            stages = _numpy(_before(self.graph, self.params, embed[None], state[None], position[None]))
            self.keys = np.concatenate([self.keys, stages["k"]])
            self.values = np.concatenate([self.values, stages["v"]])
            attended = self._attend(stages["q"], position)
            stages |= _numpy(_after(self.graph, self.params, state[None], attended[None]))
        self.carried = stages["carried"]
        stages |= {"embedding": embed, "attention": attended}
        return {name: x.reshape(len(ids), -1) for name, x in stages.items()}

    def _attend(self, q_TNH: np.ndarray, position_T: np.ndarray) -> np.ndarray:
        heads, groups = self.shape.num_attention_heads, self.shape.num_key_value_heads
        q_TGRH = q_TNH.reshape(len(q_TNH), groups, heads // groups, -1)
        score_GRTS = np.einsum("tgrh,sgh->grts", q_TGRH, self.keys) * self.shape.head_dim**-0.5
        seen_TS = np.arange(len(self.keys))[None] <= position_T[:, None]
        score_GRTS = np.where(seen_TS, score_GRTS, -np.inf)
        weight_GRTS = np.exp(score_GRTS - score_GRTS.max(-1, keepdims=True))
        weight_GRTS /= weight_GRTS.sum(-1, keepdims=True)
        return np.einsum("grts,sgh->tgrh", weight_GRTS, self.values).reshape(q_TNH.shape)


@functools.partial(jax.jit, static_argnums=0)
def _fuse(graph, params: dict, aux_BTM) -> jax.Array:
    return model.bind(graph, params).fuse(aux_BTM)


@functools.partial(jax.jit, static_argnums=0)
def _before(graph, params: dict, embed_BTD, state_BTD, position_BT) -> dict:
    draft = model.bind(graph, params)
    x_BTC = draft.inputs(embed_BTD, state_BTD)
    k, v = draft.key_value(x_BTC, position_BT)
    return {
        "input_layernorm": draft.midlayer.input_layernorm(embed_BTD),
        "hidden_norm": draft.midlayer.hidden_norm(state_BTD),
        "q": draft.query(x_BTC, position_BT),
        "k": k,
        "v": v,
    }


@functools.partial(jax.jit, static_argnums=0)
def _after(graph, params: dict, state_BTD, attended_BTNH) -> dict:
    draft = model.bind(graph, params)
    out_BTD = draft.finish(state_BTD, attended_BTNH)
    logits_BTU, carried_BTD = draft.head(out_BTD)
    return {
        "o": state_BTD + draft.midlayer.o("btnw,nwd->btd", attended_BTNH),
        "mlp": out_BTD,
        "norm": draft.norm(out_BTD),
        "logits": logits_BTU,
        "carried": carried_BTD,
    }


def _numpy(tree: dict) -> dict[str, np.ndarray]:
    return {name: np.asarray(x)[0] for name, x in tree.items()}


def _compare(stage: str, a: np.ndarray, b: np.ndarray) -> tuple[float, bool]:
    """Max |difference|, and whether it is within the tolerance."""
    if stage == "token":
        return float(np.sum(a != b)), bool(np.all(a == b))
    far = np.max(np.abs(a.astype(np.float64) - b), axis=-1)
    rms = np.sqrt(np.mean(np.square(a, dtype=np.float64), axis=-1))
    limit = TOLERANCE * (1 if stage == "logits" else np.maximum(1, rms))
    return float(np.max(far)), bool(np.all(far <= limit))  # NaN is within nothing
