"""``megatron-dppo doctor`` on batches of an engine with block-FP8 weights, which is healthy or has one fault."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from megatron_dppo.block_fp8 import DTYPE, quantize, round_activations
from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.reference import KnownWeights
from megatron_dppo.diagnostics.doctor.report import Doctor
from megatron_dppo.model.quantization import BLOCK, is_quantized
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model
from tests.unit.annexes.test_doctor import Policy, with_sides, with_tensors

Blocks = dict[str, tuple[Tensor, Tensor]]
PROMPTS, TOKENS = 6, 16


def blocks_of(folder: Path) -> Blocks:
    """Return values and scales of the quantised matrices by name."""
    weights = load_file(folder / "model.safetensors")
    return {name: quantize(w) for name, w in weights.items() if is_quantized(name)}


def dequantize(values: Tensor, scales: Tensor) -> Tensor:
    return values.float() * torch.kron(scales, torch.ones(BLOCK, BLOCK))


def engine_of(run: SimpleNamespace, target: Path, blocks: Blocks) -> Policy:
    """Return an engine that computes with ``blocks`` and rounds activations."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors.update({name: dequantize(*pair).contiguous() for name, pair in blocks.items()})

    policy = Policy(with_tensors(run.after, target, change))

    def experts(module: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        outputs = torch.zeros_like(hidden)
        hidden = round_activations(hidden)
        for expert in indices.unique().tolist():
            tokens, choices = torch.where(indices == expert)
            gate, up = (hidden[tokens] @ module.gate_up_proj[expert].T).chunk(2, -1)
            inner = round_activations(torch.nn.functional.silu(gate) * up)
            result = weights[tokens, choices, None] * (inner @ module.down_proj[expert].T)
            outputs.index_add_(0, tokens, result)
        return outputs

    for name, module in policy.model.named_modules():
        if name.endswith(".experts"):
            module.forward = MethodType(experts, module)
        elif is_quantized(f"{name}.weight"):
            module.register_forward_pre_hook(lambda _, inputs: round_activations(inputs[0]))
    return policy


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Version 1 sampled the batch of step 2 and was trained."""
    folder = tmp_path_factory.mktemp("doctor")
    small = save_tiny_model(
        folder / "small", seed=1, layers=1, hidden=256, num_attention_heads=8, head_dim=32,
        num_key_value_heads=8, moe_intermediate_size=256, num_experts=4,
    )  # fmt: skip

    def enlarge(tensors: dict[str, Tensor]) -> None:
        # The final norm removes a common scale of all layers' outputs, so the embedding must be of comparable size.
        tensors["model.embed_tokens.weight"] *= 12

    start = with_tensors(small, folder / "start", enlarge)

    def train(tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(5)
        for tensor in tensors.values():
            tensor.mul_(torch.exp(0.4 * torch.randn(())))

    after = with_tensors(start, folder / "after", train)
    config = small_config(
        folder,
        start,
        model={"dtype": "bfloat16"},
        rollout={"prompts_per_step": PROMPTS, "group_size": 2, "max_response_tokens": TOKENS},
        training={"prompts_per_mini_batch": PROMPTS, "micro_batch_tokens": 256},
        engine={"quantization": "fp8"},
    )
    return SimpleNamespace(folder=folder, start=start, after=after, config=config)


def engine_diagnosis(run: SimpleNamespace, folder: Path, blocks: Blocks) -> Any:
    engine, trainer = engine_of(run, folder / "engine", blocks), Policy(run.after)
    rng = np.random.default_rng(3)
    batch: list[Trajectory] = []
    for problem in range(PROMPTS):
        prompt = rng.integers(3, 500, size=8).tolist()
        for sample, response in enumerate(engine.draw(prompt, [problem, 100 + problem], 1.0, 1.0)):
            t = Trajectory.of_response(prompt, response, problem_id=problem, sample_index=sample)
            sides = engine.log_probs(t, 1.0), trainer.log_probs(t, 1.0), engine.routing(t)
            batch.append(with_sides(t, *sides))
    weights = KnownWeights({0: run.start, 1: run.after}, run.start, folder / "converted")
    diagnoses, _ = Doctor(run.config, batch, weights).diagnose(2)
    return next(d for d in diagnoses if d.side == "engine")


def doubled(blocks: Blocks, run: SimpleNamespace) -> Blocks:
    return {name: (values, 2 * scales) for name, (values, scales) in blocks.items()}


def stale(blocks: Blocks, run: SimpleNamespace) -> Blocks:
    old = blocks_of(run.start)
    return {name: (values, old[name][1]) for name, (values, _) in blocks.items()}


def swapped(blocks: Blocks, run: SimpleNamespace) -> Blocks:
    """Exchange the values of two columns of blocks, but not their scales."""
    return {
        name: (values.view(torch.uint8).roll(BLOCK, 1).view(DTYPE), scales)
        for name, (values, scales) in blocks.items()
    }


def test_a_quantised_engine_is_healthy(run: SimpleNamespace, tmp_path: Path) -> None:
    diagnosis = engine_diagnosis(run, tmp_path, blocks_of(run.after))
    assert diagnosis.axis == "healthy"
    # The gap is that of FP8, not of bfloat16.
    assert diagnosis.gaps["linear layers and experts in block FP8"] < 0.5 * diagnosis.gap


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "cause"),
    [(doubled, "doubled"), (stale, "scales of FP8 weights of version 0"), (swapped, "values of")],
)
def test_a_fault_of_quantisation_is_named(
    run: SimpleNamespace,
    tmp_path: Path,
    fault: Callable[[Blocks, SimpleNamespace], Blocks],
    cause: str,
) -> None:
    diagnosis = engine_diagnosis(run, tmp_path, fault(blocks_of(run.after), run))
    assert diagnosis.axis == "quantisation"
    assert cause in diagnosis.cause.name
