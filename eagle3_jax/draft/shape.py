"""The draft's sizes, resolved once from the configuration and the target."""

import dataclasses

from eagle3_jax.config import RunConfig, check
from eagle3_jax.target.shape import TargetShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftShape:
    """Everything that the draft's arithmetic depends on. Field names are the engines' config names."""

    hidden_size: int  # D, the target's width
    num_aux_hidden_states: int
    intermediate_size: int  # F
    num_attention_heads: int  # N
    num_key_value_heads: int  # G
    head_dim: int  # H
    vocab_size: int  # V, the target's
    draft_vocab_size: int  # U
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: tuple[tuple[str, object], ...] | None = None  # items of the dict, so that the shape hashes
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False  # these two only of drafts that were trained elsewhere
    norm_before_residual: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Axis letter -> size (axes.py)."""
        return dict(
            d=self.hidden_size, m=self.num_aux_hidden_states * self.hidden_size, c=2 * self.hidden_size,
            n=self.num_attention_heads, g=self.num_key_value_heads, h=self.head_dim, f=self.intermediate_size,
            v=self.vocab_size, u=self.draft_vocab_size,
        )  # fmt: skip


def resolve(config: RunConfig, target: TargetShape) -> DraftShape:
    """The draft that `config` describes for `target`. Raises ConfigError."""
    check(config, target)
    draft, scaling = config.draft, target.rope_scaling
    return DraftShape(
        hidden_size=target.hidden_size,
        num_aux_hidden_states=len(aux_layers(config, target)),
        intermediate_size=draft.intermediate_size or target.intermediate_size,
        num_attention_heads=draft.num_attention_heads or target.num_attention_heads,
        num_key_value_heads=draft.num_key_value_heads or target.num_key_value_heads,
        head_dim=draft.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft.vocab_size,
        max_position_embeddings=target.max_position_embeddings,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        rope_scaling=None if scaling is None else tuple(sorted(scaling.items())),
        fc_norm=draft.fc_norm,
        norm_output=draft.norm_output,
    )


def aux_layers(config: RunConfig, target: TargetShape) -> tuple[int, ...]:
    """Layer outputs that feed the draft, explicit."""
    return target.default_aux_layers if config.target.aux_layers is None else config.target.aux_layers
