"""The layers of Transformer Engine and those of torch on one tiny model: the same logits, the same gradients."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.gpu_check import Bench, Row, at_most, part
from megatron_dppo.gpu_check.models import policy_config, random_batch, tiny_model

if TYPE_CHECKING:
    import torch

    from megatron_dppo.data.packing import PackedBatch

LENGTHS = [5, 17, 40, 64]
FP32_LIMIT = 1e-4
"""Of logits of size 1, between kernels of float32."""
BF16_LIMIT = 0.1
"""Relative: two layers in bfloat16, whose routers may choose another expert for a token."""
_NO_FUSION = {
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "bias_activation_fusion": False,
}


@dataclass(frozen=True)
class Passed:
    """float32 logits [T, V] on the CPU, and the gradient of the targets' summed log-probabilities by parameter."""

    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def logit_error(self, other: Passed) -> float:
        """Relative difference of the logits' norms."""
        return float((self.logits - other.logits).norm() / other.logits.norm())

    def gradient_error(self, other: Passed) -> float:
        """Relative difference of all gradients together."""
        pairs = [(self.gradients[name], value) for name, value in other.gradients.items()]
        difference = sum(float((a - b).square().sum()) for a, b in pairs)
        whole = sum(float(b.square().sum()) for _, b in pairs)
        return (difference / whole) ** 0.5


@part("Transformer Engine's layers against torch's and transformers', logits and gradients", 240.0)
def layers(bench: Bench) -> Iterator[Row]:
    """torch's layers in float32 against transformers; then each kind in bfloat16 against those."""
    from megatron_dppo.model.families import load_model_shape

    folder = tiny_model(bench.folder / "model")
    batch = random_batch(load_model_shape(folder).vocab_size, LENGTHS)
    exact = _passed(folder, "float32", batch, torch_layers=True)
    difference = (exact.logits - _of_transformers(folder, batch)).abs().max()
    yield at_most(
        "torch layers, float32: logits against transformers'", float(difference), FP32_LIMIT
    )
    ours = _passed(folder, "bfloat16", batch, torch_layers=True)
    yield from _against("torch layers, bfloat16", ours, exact, BF16_LIMIT, BF16_LIMIT)
    if not bench.gpus or importlib.util.find_spec("transformer_engine") is None:
        why = "it is not installed" if bench.gpus else "it needs a GPU"
        yield Row("Transformer Engine's layers", f"not here: {why}")
        return
    theirs = _passed(folder, "bfloat16", batch, torch_layers=False)
    # As exact as torch's bfloat16 within a factor of two, and nearer to float32 than the limit.
    bounds = (2 * error + 1e-3 for error in (ours.logit_error(exact), ours.gradient_error(exact)))
    yield from _against("Transformer Engine's layers, bfloat16", theirs, exact, *bounds)


def _against(
    label: str, passed: Passed, exact: Passed, logits: float, gradients: float
) -> Iterator[Row]:
    yield at_most(f"{label}: logits against float32", passed.logit_error(exact), logits)
    yield at_most(f"{label}: gradients against float32", passed.gradient_error(exact), gradients)


def _passed(folder: Path, dtype: str, batch: PackedBatch, *, torch_layers: bool) -> Passed:
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer import platform
    from megatron_dppo.trainer.cpu.layer_spec import decoder_spec
    from megatron_dppo.trainer.hugging_face import load_hf
    from megatron_dppo.trainer.megatron_config import transformer_config
    from megatron_dppo.trainer.model import build_chunks
    from megatron_dppo.trainer.step import model_inputs
    from megatron_dppo.trainer.topology import destroy_topology, init_distributed, init_topology
    from megatron_dppo.vocab_parallel import policy_stats

    shape, layout = load_model_shape(folder), Layout()
    config = policy_config(folder, dtype, megatron=_NO_FUSION if torch_layers else {})
    init_distributed(1)
    init_topology(layout)
    platform.seed_everything(0)
    transformer = transformer_config(config, shape, layout)
    chunks = build_chunks(transformer, shape, decoder_spec if torch_layers else None)
    load_hf(chunks, shape, layout, 0, folder)
    placed = batch.to(platform.current().device)
    logits = chunks[0](**model_inputs(placed))[0]
    # a copy: the statistics' backward pass writes the gradient over the logits
    logits_before = logits.detach().clone().float().cpu()
    stats = policy_stats(logits, placed.target_ids, vocab_size=shape.vocab_size)
    stats.log_probs[placed.loss_mask].sum().backward()
    gradients = {
        name: parameter.grad.float().cpu()
        for name, parameter in chunks[0].named_parameters()
        if parameter.grad is not None
    }
    destroy_topology()
    return Passed(logits_before[:, : shape.vocab_size], gradients)


def _of_transformers(folder: Path, batch: PackedBatch) -> torch.Tensor:
    """Logits [T, V] of the same sequences by transformers' own model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    bounds = batch.cu_seqlens.tolist()
    with torch.no_grad():
        rows = [
            model(batch.token_ids[None, first:last]).logits[0] for first, last in pairwise(bounds)
        ]
    return torch.cat(rows)
