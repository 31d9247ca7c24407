"""The draft in plain PyTorch, float32, under the engines' names, built from a draft directory alone.

Written from what SGLang's draft class computes, not from the Flax module: the two share the table of tensor
shapes and no arithmetic, so that they only agree where both are right.
"""

import math
from pathlib import Path

import numpy as np

from bridge import convert, fields, weight_map
from eagle3_jax import tensors
from eagle3_jax.errors import UserError, WeightError


class Reference:
    """One sequence at a time, with a growing key/value cache.

    `prefill` takes n rows of (token after the row, aux states of the row); `draft` takes the token proposed
    last and goes on from the state that the row before carried over. Both return the named stages of their
    rows as numpy arrays [n, width].
    """

    def __init__(self, directory: str | Path):
        torch = _torch()
        config = convert.read_config(directory)
        where = f"{directory}/{convert.CONFIG}"
        self.shape = fields.draft_shape(config, where)
        self.weights = _weights(directory, weight_map.their_shapes(self.shape))
        self.target_ids = torch.arange(self.shape.draft_vocab_size) + self.weights[weight_map.D2T].long()
        self.frequencies, self.factor = _frequencies(config, self.shape.head_dim)
        self.reset()

    def reset(self) -> None:
        """Forget the sequence."""
        torch = _torch()
        self.keys = torch.empty(0, self.shape.num_key_value_heads, self.shape.head_dim)
        self.values, self.carried = self.keys, None

    def prefill(self, ids: np.ndarray, aux: np.ndarray) -> dict[str, np.ndarray]:
        """ids int [n], aux float32 [n, num_aux * hidden]: rows 0 .. n-1."""
        torch = _torch()
        self.reset()
        hidden = torch.from_numpy(np.asarray(aux, np.float32))
        # The engine tells the fused input from a carried state by its width alone.
        if hidden.shape[-1] != self.shape.hidden_size:
            if self.shape.norm_before_fc:
                hidden = self._norm(hidden, "input_norm")
            if self.shape.fc_norm:
                chunks = hidden.chunk(self.shape.num_aux_hidden_states, dim=-1)
                hidden = torch.cat([self._norm(x, f"fc_norm.{i}") for i, x in enumerate(chunks)], dim=-1)
            hidden = self._linear(hidden, "fc")
        return self._rows(ids, hidden, {"fc": hidden})

    def draft(self, token: int) -> dict[str, np.ndarray]:
        """The row after the last one, fed with its own proposal and the state carried over."""
        return self._rows(np.array([token]), self.carried[-1:], {})

    def proposal(self, logits: np.ndarray) -> int:
        """Target id of the most likely draft token of one row."""
        return int(self.target_ids[int(np.argmax(logits))])

    def _rows(self, ids, hidden, stages: dict) -> dict[str, np.ndarray]:
        torch, shape, layer = _torch(), self.shape, "midlayer"
        position = torch.arange(len(self.keys), len(self.keys) + len(ids))
        stages["embedding"] = torch.nn.functional.embedding(
            torch.from_numpy(ids).long(), self.weights[weight_map.EMBEDDING]
        )
        stages["input_layernorm"] = self._norm(stages["embedding"], f"{layer}.input_layernorm")
        stages["hidden_norm"] = self._norm(hidden, f"{layer}.hidden_norm")
        both = torch.cat([stages["input_layernorm"], stages["hidden_norm"]], dim=-1)
        q, k, v = (
            self._linear(both, f"{layer}.self_attn.{name}_proj").unflatten(-1, (-1, shape.head_dim))
            for name in "qkv"
        )
        q, k = self._rotate(q, position), self._rotate(k, position)
        stages |= {"q": q.flatten(1), "k": k.flatten(1), "v": v.flatten(1)}
        self.keys, self.values = torch.cat([self.keys, k]), torch.cat([self.values, v])
        stages["attention"] = self._attend(q, position)
        residual = stages["hidden_norm"] if shape.norm_before_residual else hidden
        middle = residual + self._linear(stages["attention"], f"{layer}.self_attn.o_proj")
        x = self._norm(middle, f"{layer}.post_attention_layernorm")
        gate, up = (self._linear(x, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
        gated = torch.nn.functional.silu(gate) * up
        out = middle + self._linear(gated, f"{layer}.mlp.down_proj")
        normed = self._norm(out, "norm")
        self.carried = normed if shape.norm_output else out
        stages |= {
            "o": middle,
            "mlp": out,
            "norm": normed,
            "logits": self._linear(normed, "lm_head"),
            "carried": self.carried,
        }
        return {name: x.numpy() for name, x in stages.items()}

    def _attend(self, q, position):
        torch = _torch()
        group = self.shape.num_attention_heads // self.shape.num_key_value_heads
        keys = self.keys.repeat_interleave(group, dim=1)
        values = self.values.repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q, keys) / math.sqrt(self.shape.head_dim)
        future = torch.arange(len(keys))[None, :] > position[:, None]
        weights = torch.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        return torch.einsum("hts,shd->thd", weights, values).flatten(1)

    def _linear(self, x, name: str):
        return _torch().nn.functional.linear(x, self.weights[f"{name}.weight"])

    def _norm(self, x, name: str):
        return _torch().nn.functional.rms_norm(
            x, x.shape[-1:], self.weights[f"{name}.weight"], self.shape.rms_norm_eps
        )

    def _rotate(self, x, position):
        torch = _torch()
        angle = torch.outer(position.float(), self.frequencies)[:, None, :]
        cos, sin = angle.cos().repeat(1, 1, 2) * self.factor, angle.sin().repeat(1, 1, 2) * self.factor
        half = x.shape[-1] // 2
        return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def _torch():
    """PyTorch, imported when first computed with: the rest of the bridge works without it."""
    try:
        import torch
    except ImportError:
        raise UserError("PyTorch is missing: pip install 'eagle3-jax[bridge]'") from None
    return torch


def _weights(directory, wanted: dict[str, tuple[int, ...]]) -> dict:
    torch, found, out = _torch(), tensors.open_tensors(directory), {}
    for name, shape in wanted.items():
        if name not in found:
            raise WeightError(f"{directory}: no tensor {name!r}; `bridge check` lists everything")
        if found[name].shape != shape:
            raise WeightError(f"{directory}: {name!r} is {list(found[name].shape)}, {list(shape)} wanted")
        x = found[name][...]
        out[name] = torch.from_numpy(x if name in (weight_map.D2T, weight_map.T2D) else x.astype(np.float32))
    return out


def _frequencies(config: dict, head_dim: int):
    """Inverse frequencies [head_dim / 2] in float32 and the factor on cos and sin."""
    torch = _torch()
    known = fields.rope_of(config, "rope_parameters") or fields.rope_of(config, "rope_theta")
    theta, scaling = known or (10_000.0, None)
    inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if scaling is None:
        return inverse.float(), 1.0
    if scaling["rope_type"] == "linear":
        return (inverse / scaling["factor"]).float(), 1.0
    if scaling["rope_type"] == "yarn":
        return _yarn(inverse, theta, scaling, head_dim)
    return _llama3(inverse, scaling), 1.0


def _llama3(inverse, scaling: dict):
    torch, original = _torch(), scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength, slow = 2 * math.pi / inverse, inverse / scaling["factor"]
    smooth = (original / wavelength - low) / (high - low)
    out = torch.where(wavelength > original / low, slow, inverse)
    medium = (wavelength <= original / low) & (wavelength >= original / high)
    return torch.where(medium, (1 - smooth) * slow + smooth * inverse, out).float()


def _yarn(inverse, theta: float, scaling: dict, head_dim: int):
    torch, factor, original = _torch(), scaling["factor"], scaling["original_max_position_embeddings"]

    def turns_to_dim(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(turns_to_dim(scaling.get("beta_fast") or 32)), 0)
    last = min(math.ceil(turns_to_dim(scaling.get("beta_slow") or 1)), head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float64)
    interpolated = ((index - first) / max(last - first, 0.001)).clamp(0, 1)
    mixed = inverse / factor * interpolated + inverse * (1 - interpolated)
    return mixed.float(), scaling.get("attention_factor") or 0.1 * math.log(factor) + 1.0
