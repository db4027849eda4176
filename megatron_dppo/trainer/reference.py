"""The policy that training started from, kept to be asked again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.model.adapters import CHILD


class ReferenceWeights:
    """A copy of every parameter that training changes, but for the adapters, which are left out of a reference's pass.

    Make it once the weights are loaded and before they are trained.
    """

    def __init__(self, chunks: list[GPTModel]) -> None:
        self._copies: list[tuple[Parameter, Tensor]] = [
            (p, p.data.clone())
            for chunk in chunks
            for name, p in chunk.named_parameters()
            if p.requires_grad and f".{CHILD}." not in name
        ]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model computes with the copies."""
        present = [p.data for p, _ in self._copies]
        for p, copy in self._copies:
            p.data = copy
        try:
            yield
        finally:
            for (p, _), data in zip(self._copies, present, strict=True):
                p.data = data
