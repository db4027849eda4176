"""The sizes of a tiny model that stands for a model of any size in a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass

HEAD_DIM = 16


@dataclass(frozen=True)
class TinySizes:
    """Sizes of the tiny model.

    Attributes:
        layers: number of layers.
        heads: number of query heads.
        groups: number of key-value heads.
        hidden: hidden size.
        ffn: width of a dense MLP.
        experts: number of experts; 0 for a dense model.
        choices: number of experts of a token.
        moe_ffn: width of an expert.
        positions: largest number of positions.
        head_dim: width of a head.
    """

    layers: int
    heads: int
    groups: int
    hidden: int
    ffn: int
    experts: int
    choices: int
    moe_ffn: int
    positions: int
    head_dim: int = HEAD_DIM

    def describe(self) -> str:
        """Describe the sizes in words."""
        experts = ""
        if self.experts:
            experts = f", {self.experts} experts of which a token takes {self.choices}"
        return f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, {self.groups} key-value heads{experts}"
