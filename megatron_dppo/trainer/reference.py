"""The policy that training started from, kept to be asked again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.models.gpt.gpt_model import GPTModel
from torch import Tensor
from torch.nn import Parameter

from megatron_dppo.config.lora import PEFT_WEIGHTS
from megatron_dppo.config.schema import PolicyConfig
from megatron_dppo.model.adapters import CHILD
from megatron_dppo.trainer.hf_weights import shared_digest
from megatron_dppo.trainer.lora.policy import AdaptedPolicy
from megatron_dppo.trainer.topology import Topology


class ReferenceWeights:
    """A copy of every parameter that training changes. Make it once the weights are loaded and before they are trained.

    ``with_adapters`` False: but for the adapters, which start as nothing and are left out of a reference's pass.
    """

    def __init__(self, chunks: list[GPTModel], *, with_adapters: bool = False) -> None:
        self._copies: list[tuple[Parameter, Tensor]] = [
            (p, p.data.clone())
            for chunk in chunks
            for name, p in chunk.named_parameters()
            if p.requires_grad and (with_adapters or f".{CHILD}." not in name)
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


def start_digest(config: PolicyConfig, topology: Topology, adapted: AdaptedPolicy | None) -> str:
    """SHA-256 (hex) over the tensors of ``model.hf_checkpoint`` and the bytes of ``lora.start_from``. Collective."""
    model = adapted.base_sha256 if adapted else shared_digest(config.model.hf_checkpoint, topology)
    if config.lora.start_from is None:
        return model
    with (Path(config.lora.start_from) / PEFT_WEIGHTS).open("rb") as content:
        adapters = hashlib.file_digest(content, "sha256").hexdigest()
    return hashlib.sha256(f"{model} {adapters}".encode()).hexdigest()
