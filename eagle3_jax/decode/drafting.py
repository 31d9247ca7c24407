"""How much is drafted a round, in SGLang's three numbers: steps, topk and tokens."""

from typing import NamedTuple

from eagle3_jax.errors import ConfigError


class Drafting(NamedTuple):
    """`steps` levels of candidates, `topk` nodes expanded a level, `tokens` verified: the bonus and the best ones."""

    steps: int
    topk: int
    tokens: int

    @property
    def kind(self) -> str:
        return "chain" if self.topk == 1 else "tree"

    @property
    def name(self) -> str:
        return f"{self.steps}-{self.topk}-{self.tokens}"

    @property
    def candidates(self) -> int:
        """Nodes that are drafted, of which tokens - 1 are verified."""
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def depth(self) -> int:
        """Most drafts that one round can accept."""
        return min(self.steps, self.tokens - 1)

    @property
    def slots(self) -> int:
        """Cache slots from a round's first row on that it writes: the target verifies, the draft extends and drafts."""
        return max(self.tokens, self.depth + 1 + (self.steps - 1) * self.topk)


def drafting(steps: int, topk: int = 1, tokens: int | None = None, prefix: str = "") -> Drafting:
    """The three numbers, checked. `tokens` may be left out for a chain. Raises ConfigError.

    `prefix` stands before the names in the message.
    """
    said = f"{prefix}steps={steps}, {prefix}topk={topk}"
    if steps < 1 or topk < 1:
        raise ConfigError(f"{said}: both must be at least 1")
    if topk == 1:
        if tokens not in (None, steps + 1):
            raise ConfigError(
                f"{said} is a chain, for which SGLang verifies steps+1 = {steps + 1} tokens whatever it is told "
                f"({prefix}tokens={tokens}): give {prefix}tokens={steps + 1} or leave it out"
            )
        return Drafting(steps, 1, steps + 1)
    most = 1 + Drafting(steps, topk, 2).candidates
    if tokens is None:
        raise ConfigError(f"{said} is a tree and wants {prefix}tokens: within 2 .. {most}")
    if not 2 <= tokens <= most:
        raise ConfigError(
            f"{prefix}tokens={tokens} must be within 2 .. {most}: the bonus and at most the topk + (steps-1)*topk^2 "
            f"= {most - 1} candidates of {said}"
        )
    return Drafting(steps, topk, tokens)
