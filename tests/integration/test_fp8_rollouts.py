"""Block-FP8 weights in the real SGLang server on a CPU: updates into it, and its log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from megatron_dppo.block_fp8 import dequantize, quantize, round_activations
from megatron_dppo.engine.weights import EngineWeights
from megatron_dppo.model.quantization import SCALE, is_quantized
from megatron_dppo.weight_sync.canary import canary_prompts
from megatron_dppo.weight_sync.engines import Bucket, EngineFaultError
from megatron_dppo.weight_sync.transaction import WeightUpdateError
from megatron_dppo.weight_sync.verification import ChecksumMismatchError
from tests.integration.weight_server import (
    RUNNER,
    Served,
    Source,
    Weights,
    read,
    serve,
    updater,
)
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SIZES = {
    "hidden": 128,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
    "num_experts": 4,
}
"""Sizes whose share on one or two ranks is a multiple of 128."""
MATRICES_OF_A_LAYER = 4 + 3 * SIZES["num_experts"]


def save_model(folder: Path, seed: int) -> Path:
    return save_tiny_model(folder, seed=seed, dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    server = serve(save_model(tmp_path_factory.mktemp("first"), 0), quantization="fp8")
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("trained"), 1)


class Bf16Source(Source):
    dtype_name = "bfloat16"


def rounded_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """The experts of transformers' model with rounded activations, one token after the other."""
    outputs = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for expert, weight in zip(indices[token].tolist(), weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ round_activations(hidden[token])).chunk(2)
            inner = round_activations(torch.nn.functional.silu(gate) * up)
            outputs[token] += weight * (experts.down_proj[expert] @ inner)
    return outputs


def fp8_log_probs(
    folder: Path,
    tokens: Sequence[int],
    rounds_weights: bool,
    rounds_activations: bool,
) -> list[float]:
    """log p(token | tokens before) of ``tokens[1:]`` by transformers in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters() if rounds_weights else ():
            if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                for expert in weight:
                    expert.copy_(dequantize(*quantize(expert)))
            elif is_quantized(name):
                weight.copy_(dequantize(*quantize(weight)))
        for name, module in model.named_modules():
            if rounds_activations and name.endswith(".experts"):
                module.forward = MethodType(rounded_experts, module)
            elif rounds_activations and is_quantized(f"{name}.weight"):
                module.register_forward_pre_hook(lambda _, inputs: round_activations(inputs[0]))
        logits = model(torch.tensor([list(tokens)])).logits[0, :-1]
    chosen = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return chosen[:, 0].tolist()


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def assert_serves_fp8(served: Served, folder: Path, version: int) -> None:
    """The engine's log-probabilities are those of ``folder``, with weights and activations in FP8.

    In bfloat16 another activation than in fp32 may be rounded to another FP8 number, so the two don't agree closely.
    """
    assert served.version() == str(version)
    prompts = canary_prompts(500)
    scores = RUNNER.run(served.weights().score(prompts))
    gaps = {}
    for name, rounding in (
        ("W8A8", (True, True)),
        ("W8A16", (True, False)),
        ("plain", (False, False)),
    ):
        expected = [fp8_log_probs(folder, prompt, *rounding) for prompt in prompts]
        gaps[name] = mean_difference(list(chain(*scores)), list(chain(*expected)))
    print("mean differences", gaps)
    assert gaps["W8A8"] < 0.1
    assert gaps["W8A8"] < 0.8 * gaps["plain"]


def test_an_update_brings_quantised_weights(served: Served, trained: Path) -> None:
    """The start weights are arbitrary; each strategy brings a checkpoint's, verified and scored."""
    weights = read(trained)
    updates = updater(served.weights(), Bf16Source(weights))
    report = updates.update(1)
    assert report.verified
    # qkv, o, w13 and w2 of both layers have scales beside them.
    assert report.tensors == 21 + 2 * 4
    matrices = [t for name, t in weights.items() if is_quantized(name)]
    assert len(matrices) == 2 * MATRICES_OF_A_LAYER
    scales = sum(4 * t.numel() // 128**2 for t in matrices)
    others = sum(t.nbytes for name, t in weights.items() if not is_quantized(name))
    assert report.bytes == sum(t.numel() for t in matrices) + scales + others
    assert_serves_fp8(served, trained, 1)
    updates.close()


@pytest.mark.parametrize("strategy", ["tensor", "disk"])
def test_other_strategies_send_the_same(
    served: Served, trained: Path, tmp_path: Path, strategy: str
) -> None:
    for version, folder in enumerate((served.folder, trained), 20):
        source = Bf16Source(read(folder))
        updates = updater(served.weights(), source, strategy=strategy, directory=str(tmp_path))
        assert updates.update(version).verified
        updates.close()
        assert_serves_fp8(served, folder, version)


def double_a_scale(sent: Weights, stale: Weights) -> Weights:
    name = "model.layers.1.self_attn.v_proj.weight" + SCALE
    return {**sent, name: 2 * sent[name]}


def keep_a_stale_scale(sent: Weights, stale: Weights) -> Weights:
    name = "model.layers.0.mlp.experts.2.up_proj.weight" + SCALE
    return {**sent, name: stale[name]}


def swap_two_blocks(sent: Weights, stale: Weights) -> Weights:
    name = "model.layers.0.self_attn.o_proj.weight"
    values = sent[name]
    return {**sent, name: torch.cat([values[:, 128:], values[:, :128]], 1)}


class Corrupting(EngineWeights):
    """Puts a corrupted bucket on the wire."""

    corrupt: Any
    stale: Weights

    def pieces(self, bucket: Bucket) -> list[Tensor]:
        sent = dict(bucket)
        reference = {**sent, **{name: self.stale[name] for name in sent if name in self.stale}}
        present = {n: t for n, t in self.corrupt(_Lenient(sent), reference).items() if n in sent}
        return super().pieces([(name, present[name]) for name in sent])


class _Lenient(dict[str, Tensor]):
    """A bucket: a tensor of another bucket reads as a matrix of zeros."""

    def __missing__(self, name: str) -> Tensor:
        return torch.zeros(256, 256)


@pytest.mark.parametrize(
    ("corrupt", "tensor"),
    [
        (double_a_scale, "model.layers.1.self_attn.qkv_proj.weight_scale_inv"),
        (keep_a_stale_scale, "model.layers.0.mlp.experts.w13_weight_scale_inv"),
        (swap_two_blocks, "model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_a_corrupted_update_leaves_the_engine_in_quarantine(
    served: Served, trained: Path, corrupt: Any, tensor: str
) -> None:
    old, new = read(served.folder), read(trained)
    engine = served.weights(Corrupting)
    engine.corrupt, engine.stale = corrupt, dict(engine.encode(old.items()))
    updates = updater(engine, Bf16Source(new))
    with pytest.raises(WeightUpdateError) as failure:
        updates.update(31)
    fault = failure.value.__cause__
    assert isinstance(fault, EngineFaultError)
    cause = fault.faults[served.process.url]
    assert isinstance(cause, ChecksumMismatchError)
    assert {m.tensor for m in cause.mismatches} == {tensor}
    assert updates.committed_version is None
    assert served.version() == "unverified-31"
    engine.corrupt = lambda sent, stale: sent
    updates.attach([engine.url])
    assert updates.update(32).verified
    updates.close()


def test_two_engine_ranks(tmp_path: Path, trained: Path) -> None:
    served = serve(save_model(tmp_path / "start", 0), quantization="fp8", tp_size=2)
    try:
        updates = updater(served.weights(), Bf16Source(read(trained)))
        assert updates.update(1).tensors == 2 * (21 + 2 * 4)
        assert_serves_fp8(served, trained, 1)
        updates.close()
    finally:
        served.process.kill()
