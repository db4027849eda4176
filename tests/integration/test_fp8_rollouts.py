"""Block-FP8 weights in the real SGLang server on a CPU: weight updates, and the server's log-probabilities."""

from __future__ import annotations

import json
import shutil
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
from megatron_dppo.diagnostics.doctor.__main__ import main as doctor
from megatron_dppo.diagnostics.doctor.engine_tensors import RankTensors, tensor_faults
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.table import BY_METRIC
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.quantization import SCALE_SUFFIX, is_quantized
from megatron_dppo.model.shard_plan import Slice
from megatron_dppo.weights.canary import canary_prompts
from megatron_dppo.weights.engines import EngineFaultError
from megatron_dppo.weights.server import held_tensors
from megatron_dppo.weights.transaction import WeightUpdateError
from megatron_dppo.weights.verification import ChecksumMismatchError
from tests.integration.runs import TrainingRun, summary_of, write_material
from tests.integration.test_weight_sync import interrupt_update
from tests.integration.weight_server import (
    RUNNER,
    RunningServer,
    Source,
    Weights,
    altered_by_the_sender,
    altered_on_the_way,
    read,
    serve,
    updater,
)
from tests.tiny_models import save_tiny_model

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SIZES: dict[str, Any] = {
    "hidden": 128,
    "head_dim": 32,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "moe_intermediate_size": 256,
    "num_experts": 4,
}
"""Sizes of the model. On one or two ranks, each rank's share is a multiple of the block size 128."""
MATRICES_OF_A_LAYER = 4 + 3 * SIZES["num_experts"]
READS_OF_SCALES = 90
"""All matrices are read once for their scales, before the first message. The next reads are of messages."""


def save_model(folder: Path, seed: int) -> Path:
    return save_tiny_model(folder, seed=seed, dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    server = serve(save_model(tmp_path_factory.mktemp("first"), 0), quantization="fp8")
    yield server
    server.process.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("trained"), 1)


def rounded_experts(experts: Any, hidden: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
    """Compute the experts of transformers' model with rounded activations, token by token."""
    outputs = torch.zeros_like(hidden)
    for token in range(len(hidden)):
        for expert, weight in zip(indices[token].tolist(), weights[token], strict=True):
            gate, up = (experts.gate_up_proj[expert] @ round_activations(hidden[token])).chunk(2)
            inner = round_activations(torch.nn.functional.silu(gate) * up)
            outputs[token] += weight * (experts.down_proj[expert] @ inner)
    return outputs


def fp8_log_probs(
    folder: Path, tokens: Sequence[int], rounds_weights: bool, rounds_activations: bool
) -> list[float]:
    """Return log p(token | tokens before) of ``tokens[1:]``, computed by transformers in fp32."""
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
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])
    return log_probs[:, 0].tolist()


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)


def assert_serves_fp8(server: RunningServer, folder: Path, version: int) -> None:
    """Assert that the engine's log-probabilities are close to the FP8 model's: weights and activations of ``folder``.

    The tolerance is wide: a bfloat16 activation and its fp32 value may be rounded to different FP8 numbers.
    """
    assert server.version() == str(version)
    prompts = canary_prompts(500)
    scores = RUNNER.run(server.weights().score(prompts))
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
    assert gaps["W8A8"] < 0.9 * gaps["plain"]


def test_an_update_brings_quantised_weights(server: RunningServer, trained: Path) -> None:
    """The server starts with other weights. The update is verified, and the new log-probabilities are compared."""
    weights = read(trained)
    updates = updater(server.weights(), Source(trained, weights=weights))
    report = updates.update(1)
    assert report.verified
    # qkv, o, w13 and w2 of both layers have scales beside them.
    assert report.tensors == 21 + 2 * 4
    matrices = [t for name, t in weights.items() if is_quantized(name)]
    assert len(matrices) == 2 * MATRICES_OF_A_LAYER
    scales = sum(4 * t.numel() // 128**2 for t in matrices)
    others = sum(t.nbytes for name, t in weights.items() if not is_quantized(name))
    assert report.bytes == sum(t.numel() for t in matrices) + scales + others
    assert_serves_fp8(server, trained, 1)
    updates.close()


@pytest.mark.parametrize("strategy", ["tensor", "disk"])
def test_other_strategies_send_the_same(
    server: RunningServer, trained: Path, tmp_path: Path, strategy: str
) -> None:
    for version, folder in enumerate((server.folder, trained), 20):
        source = Source(folder, weights=read(folder))
        updates = updater(server.weights(), source, strategy=strategy, directory=str(tmp_path))
        assert updates.update(version).verified
        updates.close()
        assert_serves_fp8(server, folder, version)


V_PROJ = "model.layers.1.self_attn.v_proj.weight" + SCALE_SUFFIX
UP_PROJ = "model.layers.0.mlp.experts.2.up_proj.weight" + SCALE_SUFFIX
O_PROJ = "model.layers.0.self_attn.o_proj.weight"


def doubled(scales: Tensor, stale: Tensor) -> Tensor:
    return 2 * scales


def replaced_by_stale(scales: Tensor, stale: Tensor) -> Tensor:
    return stale


def with_swapped_blocks(values: Tensor, stale: Tensor) -> Tensor:
    return torch.cat([values[:, 128:], values[:, :128]], 1)


@pytest.mark.parametrize(
    ("name", "corrupt", "tensor"),
    [
        (V_PROJ, doubled, "model.layers.1.self_attn.qkv_proj.weight_scale_inv"),
        (UP_PROJ, replaced_by_stale, "model.layers.0.mlp.experts.w13_weight_scale_inv"),
        (O_PROJ, with_swapped_blocks, O_PROJ),
    ],
)
def test_a_corrupted_update_leaves_the_engine_in_quarantine(
    server: RunningServer, trained: Path, name: str, corrupt: Any, tensor: str
) -> None:
    old, new = read(server.folder), read(trained)
    engine = server.weights()
    stale = dict(engine.encode([*old.items()]))
    updates = updater(engine, Source(trained, weights=new), strategy="tensor")

    def alter(part: Slice, values: Tensor) -> Tensor:
        if part.name != name:
            return values
        return corrupt(values, part.of_block(stale[name]))

    with altered_on_the_way(alter), pytest.raises(WeightUpdateError) as failure:
        updates.update(31)
    fault = failure.value.__cause__
    assert isinstance(fault, EngineFaultError)
    cause = fault.faults[server.process.url]
    assert isinstance(cause, ChecksumMismatchError)
    assert {m.tensor for m in cause.mismatches} == {tensor}
    assert updates.committed_version is None
    assert server.version() == "unverified-31"
    updates.attach([engine.url])
    assert updates.update(32).verified
    updates.close()


def as_it_is(part: Slice, values: Tensor, stale: Tensor) -> Tensor:
    return values


def with_a_larger_scale(part: Slice, values: Tensor, stale: Tensor) -> Tensor:
    return 1.5 * values if (part.name, part.block_part.hf_start) == (V_PROJ, 1) else values


def with_exchanged_blocks(part: Slice, values: Tensor, stale: Tensor) -> Tensor:
    return with_swapped_blocks(values, stale) if part.name == O_PROJ else values


def with_a_stale_matrix(part: Slice, values: Tensor, stale: Tensor) -> Tensor:
    return stale if part.name in (UP_PROJ, UP_PROJ.removesuffix(SCALE_SUFFIX)) else values


@pytest.mark.parametrize(
    ("alter", "tensor", "difference"),
    [
        (as_it_is, None, ""),
        (with_a_larger_scale, V_PROJ.removesuffix(SCALE_SUFFIX), "scales of block row 1 times 1.5"),
        (with_exchanged_blocks, O_PROJ, "values of block (0, 1) in the place of (0, 0), "),
        (
            with_a_stale_matrix,
            UP_PROJ.removesuffix(SCALE_SUFFIX),
            "values of all blocks of version 40; scales of all blocks of version 40",
        ),
    ],
)
def test_a_tensor_that_a_wrong_quantiser_sends_is_named(
    server: RunningServer,
    trained: Path,
    tmp_path: Path,
    alter: Any,
    tensor: str | None,
    difference: str,
) -> None:
    """The update is verified, because the checksums cover the tensors that were sent."""
    engine = server.weights()
    stale = dict(engine.encode([*read(server.folder).items()]))
    updates = updater(engine, Source(trained, weights=read(trained)), strategy="tensor")
    with altered_by_the_sender(
        lambda part, values: alter(part, values, part.of_block(stale[part.name]))
    ):
        assert updates.update(41).verified
    updates.close()
    path = tmp_path / "held.json"
    held_tensors.write(path, [RUNNER.run(engine.held_tensors())])
    (held,) = held_tensors.read(path)
    assert held.version == "41"
    shape = load_model_shape(trained)
    own, other = [RankTensors(held, 0, f, shape, torch.bfloat16) for f in (trained, server.folder)]
    faults = tensor_faults(held, 0, own, lambda: {40: other})
    assert [fault.tensor for fault in faults] == ([] if tensor is None else [tensor])
    assert all(fault.difference.startswith(difference) for fault in faults)


def flip_signs(weights: Weights) -> Weights:
    """Return the weights with the sign of one element of every tensor flipped, so that no scale changes."""
    new: Weights = {}
    for name, tensor in weights.items():
        new[name] = tensor.clone()
        new[name].view(-1)[3] *= -1
    return new


@pytest.mark.parametrize("ep_size", [1, 2])
def test_two_engine_ranks(tmp_path: Path, trained: Path, ep_size: int) -> None:
    folder = save_model(tmp_path / "start", 0)
    server = serve(folder, quantization="fp8", atomic_updates=True, tp_size=2, ep_size=ep_size)
    try:
        weights = read(trained)
        updates = updater(server.weights(), Source(trained, weights=weights), changes_only=True)
        assert updates.update(1).tensors == 2 * (21 + 2 * 4)
        assert_serves_fp8(server, trained, 1)
        weights[O_PROJ] = weights[O_PROJ].clone()
        weights[O_PROJ][0, :9] *= 2
        updates.source = Source(trained, weights=weights)
        report = updates.update(2)
        assert report.verified
        assert report.sent_fraction is not None
        assert report.sent_fraction < 0.01
        updates.source = Source(
            trained, weights=flip_signs(weights), between=interrupt_update, reads=READS_OF_SCALES
        )
        with pytest.raises(WeightUpdateError, match="the update was interrupted"):
            updates.update(3)
        assert server.version() == "2"
        updates.close()
        # After a failure, an update sends whole weights. An atomic engine discards those too if the update fails.
        whole = updater(server.weights(), Source(trained, weights=weights))
        whole.is_atomic = True
        whole.update(3)
        whole.source = Source(
            folder, weights=read(folder), between=interrupt_update, reads=READS_OF_SCALES
        )
        with pytest.raises(WeightUpdateError, match="the update was interrupted"):
            whole.update(4)
        assert server.version() == "3"
        whole.close()
    finally:
        server.process.kill()


def test_a_run_with_recorded_routing(tmp_path: Path) -> None:
    """The whole loop on two tensor parallel trainer ranks: each matrix is gathered, quantised and served."""
    config = write_material(tmp_path)
    shutil.rmtree(tmp_path / "model")
    save_model(tmp_path / "model", 1)
    run = TrainingRun(
        config,
        *("model.dtype=bfloat16", "engine.quantization=fp8", "rollout.router_replay=true"),
        *("run.steps=2", "evaluation.every=2", "checkpoint.verify_export=false"),
        "engine.device=cpu",
    )
    with run:
        run.finish()
    summary = summary_of(run.directory)
    assert summary["dtype"] == "fp8"
    assert summary["weight_updates"] == summary["weight_updates_verified"] == 3
    gap = summary["mean_abs_prob_gap"]
    print("mean |pi - mu|", gap)
    assert 0 < gap <= BY_METRIC[names.GAP_ON_POLICY].upper("fp8")
    assert doctor([str(run.directory), "--json", str(tmp_path / "doctor.json")]) == 0
    sides = json.loads((tmp_path / "doctor.json").read_text())["sides"]
    assert {side["axis"] for side in sides} == {"healthy"}
