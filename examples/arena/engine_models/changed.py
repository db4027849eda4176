"""SGLang's models under the mismatch of ``mismatches.py`` that the variable ARENA_MISMATCH names.

The servers receive and verify the trainer's exact weights. A forward pass computes with a rounded copy of the weights.
For a share of the tokens, the router's logit of the last chosen expert is removed, so the tokens use the next best
expert. The recorded routing has the experts that were used, so a trainer that replays the routing uses them too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.models import qwen3, qwen3_moe
from torch import Tensor, nn

from examples.arena.mismatches import MISMATCHES, Mismatch


class Changed(nn.Module):
    """Base class that adds the mismatch to a model of SGLang."""

    def __init__(self, config: Any, *rest: Any, **more: Any) -> None:
        super().__init__(config, *rest, **more)
        self._mismatch: Mismatch = MISMATCHES[os.environ["ARENA_MISMATCH"]]
        self._rounded: list[tuple[nn.Parameter, Tensor]] | None = None
        generator = torch.Generator().manual_seed(0)
        for name, module in self.named_modules():
            if self._mismatch.flips and name.endswith("mlp.gate"):
                flips = _Flips(self._mismatch.flips, config.num_experts_per_tok, generator)
                module.register_forward_hook(flips)

    def load_weights(self, *arguments: Any, **more: Any) -> Any:
        """Load weights as SGLang does, and discard the rounded copy of the previous weights."""
        self._rounded = None
        return super().load_weights(*arguments, **more)  # type: ignore[misc]

    def forward(self, *arguments: Any, **more: Any) -> Any:
        """Compute as SGLang does, with rounded matrices."""
        with self._rounded_matrices():
            return super().forward(*arguments, **more)

    @contextmanager
    def _rounded_matrices(self) -> Iterator[None]:
        if self._rounded is None:
            self._rounded = self._round()
        exact = [(parameter, parameter.data) for parameter, _ in self._rounded]
        try:
            for parameter, values in self._rounded:
                parameter.data = values
            yield
        finally:
            for parameter, values in exact:
                parameter.data = values

    def _round(self) -> list[tuple[nn.Parameter, Tensor]]:
        rounding = self._mismatch.rounding
        if rounding is None:
            return []
        return [(p, rounding(p.data)) for p in self.parameters() if p.dim() > 1]


class _Flips:
    """A hook on a router: ``share`` of the tokens lose the last of their ``count`` experts."""

    def __init__(self, share: float, count: int, generator: torch.Generator) -> None:
        self._share, self._count, self._generator = share, count, generator

    def __call__(self, _: Any, __: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        last = logits.topk(self._count, -1).indices[:, -1:]
        is_flipped = torch.rand(len(logits), 1, generator=self._generator) < self._share
        dropped = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, last, is_flipped)
        return logits.masked_fill(dropped, float("-inf")), bias


# SGLang finds a model by its class's name.
class Qwen3ForCausalLM(Changed, qwen3.Qwen3ForCausalLM):
    pass


class Qwen3MoeForCausalLM(Changed, qwen3_moe.Qwen3MoeForCausalLM):
    pass


EntryClass = [Qwen3ForCausalLM, Qwen3MoeForCausalLM]
