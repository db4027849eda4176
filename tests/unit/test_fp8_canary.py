"""The trainer's weights rounded to block FP8: each rank's part is rounded as in the whole matrix, and then restored.
Engines that read other scales than were sent are found by their log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megatron_dppo.block_fp8 import dequantize, quantize, round_activations
from megatron_dppo.model.gather_plan import ParameterKey
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, local_parameters
from megatron_dppo.model.quantization import is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.trainer.fp8_weights import rounded_to_fp8
from megatron_dppo.weights.canary import (
    FP8_PROMPTS,
    CanaryError,
    Fp8Noise,
    canary_prompts,
    compare_with_noise,
)
from tests.tiny_models import save_tiny_model
from tests.unit.test_fp8_engine import model_shape, weights

Local = dict[ParameterKey, Tensor]


def local_values(shape: ModelShape, hf: dict[str, Tensor], layout: Layout, rank: int) -> Local:
    values: Local = {}
    for parameter in local_parameters(shape, layout, rank):
        tensor = torch.zeros(parameter.shape, dtype=torch.bfloat16)
        for segment in parameter.segments:
            segment.of_local(tensor).copy_(segment.of_hf(hf[segment.hf_name]))
        values[parameter.chunk, parameter.name] = tensor
    return values


def round_matrices(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: dequantize(*quantize(t), dtype=t.dtype) if is_quantized(name) else t
        for name, t in hf.items()
    }


@pytest.mark.parametrize("head_dim", [128, 64])
@pytest.mark.parametrize("layout", [Layout.smallest(1), Layout.smallest(2, expert=2)])
def test_a_ranks_part_is_rounded_as_the_whole_matrix_is(layout: Layout, head_dim: int) -> None:
    # With heads of 64, a query group has half a block of key rows. All groups of a rank have whole blocks.
    shape = model_shape(head_dim=head_dim, num_attention_heads=8, num_query_groups=4)
    hf = weights(shape)
    for rank in range(layout.world_size):
        values = local_values(shape, hf, layout, rank)
        before = {key: tensor.clone() for key, tensor in values.items()}
        expected = local_values(shape, round_matrices(hf), layout, rank)
        with rounded_to_fp8(values, shape, layout, rank):
            changed = [key for key in values if not torch.equal(values[key], before[key])]
            assert changed
            for key, tensor in values.items():
                assert torch.equal(tensor, expected[key]), key
        for key, tensor in values.items():
            assert torch.equal(tensor, before[key])


def test_parts_of_blocks_keep_their_values() -> None:
    """Each of two expert tensor parallel ranks has 64 rows of gate and up, half a block, so they are not rounded."""
    layout = Layout.smallest(2, expert_tensor=2)
    shape = model_shape(moe_ffn_hidden_size=128)
    values = local_values(shape, weights(shape), layout, 0)
    before = {key: tensor.clone() for key, tensor in values.items()}
    with rounded_to_fp8(values, shape, layout, 0):
        changed = {
            name
            for chunk, name in values
            if not torch.equal(values[chunk, name], before[chunk, name])
        }
    attention = "decoder.layers.0.self_attention."
    assert changed == {f"{attention}linear_qkv.weight", f"{attention}linear_proj.weight"}


def test_a_failure_in_the_block_restores_the_values() -> None:
    layout = Layout.smallest(1)
    shape = model_shape()
    values = local_values(shape, weights(shape), layout, 0)
    before = {key: tensor.clone() for key, tensor in values.items()}

    def fail() -> None:
        with rounded_to_fp8(values, shape, layout, 0):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(torch.equal(values[key], before[key]) for key in values)


def test_other_dtypes_than_bfloat16_are_rounded_and_restored() -> None:
    shape = replace(model_shape(), dtype="float32")
    layout = Layout.smallest(1)
    hf = {name: torch.ones(dims) for name, dims in hf_tensors(shape).items()}
    values = {key: t.float() * 0.3 for key, t in local_values(shape, hf, layout, 0).items()}
    before = {key: tensor.clone() for key, tensor in values.items()}
    with rounded_to_fp8(values, shape, layout, 0):
        name = "decoder.layers.0.self_attention.linear_proj.weight"
        torch.testing.assert_close(values[0, name], torch.full_like(values[0, name], 0.3))
    assert all(torch.equal(values[key], before[key]) for key in values)


Matrix = tuple[str, Tensor]
Misreading = Callable[[str, Tensor], Tensor]
"""Function of a matrix' name and its scales. It returns the scales that a faulty engine reads."""
SIZES: dict[str, Any] = {
    "hidden": 256,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "layers": 4,
    "num_experts": 4,
}


def read_transposed(name: str, scales: Tensor) -> Tensor:
    return scales.T.reshape(scales.shape)


def read_one(name: str, scales: Tensor) -> Tensor:
    return scales.flatten()[0].expand_as(scales)


def read_one_expert_wrong(name: str, scales: Tensor) -> Tensor:
    return 8 * scales if ".1.mlp.experts.2." in name else scales


def read_one_projection_wrong(name: str, scales: Tensor) -> Tensor:
    return 2 * scales if name.endswith(".1.self_attn.o_proj") else scales


def read_all_too_large(name: str, scales: Tensor) -> Tensor:
    return 1.05 * scales


def _as_a_kernel_reads(x: Tensor) -> Tensor:
    return round_activations(x).to(x.dtype)


def _experts_forward(module: Any, hidden: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
    """Compute the experts of a transformers layer with rounded activations."""
    output = torch.zeros_like(hidden)
    for expert in range(module.gate_up_proj.shape[0]):
        tokens, places = torch.where(chosen == expert)
        x = _as_a_kernel_reads(hidden[tokens])
        gate, up = (x @ module.gate_up_proj[expert].T).chunk(2, -1)
        inner = _as_a_kernel_reads(torch.nn.functional.silu(gate) * up)
        weighted = (inner @ module.down_proj[expert].T) * factors[tokens, places, None]
        output.index_add_(0, tokens, weighted.to(output.dtype))
    return output


class Fp8Engine:
    """A transformers model that computes as an FP8 engine: weights and activations are rounded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        self._weights = {name: matrix.clone() for name, matrix in self._matrices()}
        for name, module in self._model.named_modules():
            if name.endswith("_proj"):
                module.register_forward_pre_hook(lambda _, x: (_as_a_kernel_reads(x[0]),))
            elif name.endswith(".experts"):
                module.forward = MethodType(_experts_forward, module)

    def _matrices(self) -> Iterator[Matrix]:
        for name, parameter in self._model.named_parameters():
            if parameter.dim() == 3:
                for expert, matrix in enumerate(parameter.data):
                    yield f"{name.replace('.experts', f'.experts.{expert}')}", matrix
            elif name.endswith("_proj.weight"):
                yield name.removesuffix(".weight"), parameter.data

    @torch.no_grad()
    def score(self, prompts: list[list[int]], misreading: Misreading) -> list[list[float]]:
        for name, matrix in self._matrices():
            quantized = quantize(self._weights[name])
            scales = misreading(name, quantized.scales)
            matrix.copy_(dequantize(quantized.values, scales))
        tokens = torch.tensor(prompts)
        rows = self._model(tokens).logits.float().log_softmax(-1)
        return rows[:, :-1].gather(2, tokens[:, 1:, None])[..., 0].tolist()


def _vary_blocks(folder: Path) -> None:
    """Multiply each block of the matrices by a factor of its own, so that scales differ as in trained models."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(folder / "model.safetensors")
    for name, matrix in tensors.items():
        if is_quantized(name):
            factors = 0.6 * torch.randn(quantize(matrix).scales.shape, generator=generator)
            tensors[name] = dequantize(matrix, factors.exp(), torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def score_model(folder: Path, seed: int, **sizes: int) -> Any:
    """Return an FP8 engine of a random model, the prompts, and the trainer's scores with their noise."""
    from megatron_dppo.trainer.topology import destroy_topology
    from megatron_dppo.trainer.weight_source import TrainerWeights
    from tests.distributed.test_trainer_steps import make_trainer

    save_tiny_model(folder, seed=seed, dtype=torch.bfloat16, **(SIZES | sizes))
    _vary_blocks(folder)
    trainer = make_trainer(str(folder), {}, {"dtype": "bfloat16"})
    source = TrainerWeights(trainer)
    prompts = canary_prompts(500, FP8_PROMPTS)
    twice, scaled = (source.score(prompts, rounding=r) for r in ("fp8_twice", "fp8_scaled"))
    scores = source.score(prompts, rounding="fp8")
    trainer.close()
    destroy_topology()
    torch.distributed.destroy_process_group()
    return Fp8Engine(folder), prompts, scores, Fp8Noise(twice, scaled)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return score_model(tmp_path_factory.mktemp("model"), 0)


def test_right_scales_pass(scored: Any) -> None:
    engine, prompts, scores, noise = scored
    compare_with_noise(scores, engine.score(prompts, lambda name, scales: scales), noise)


@pytest.mark.parametrize(
    "misreading",
    [
        read_transposed,
        read_one,
        read_one_expert_wrong,
        read_one_projection_wrong,
        read_all_too_large,
    ],
)
def test_wrong_scales_are_found(scored: Any, misreading: Misreading) -> None:
    engine, prompts, scores, noise = scored
    with pytest.raises(CanaryError, match="scales"):
        compare_with_noise(scores, engine.score(prompts, misreading), noise)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_five_percent_in_all_scales_are_found_in_each_model(
    tmp_path: Path, seed: int, layers: int
) -> None:
    engine, prompts, scores, noise = score_model(tmp_path, seed, layers=layers)
    compare_with_noise(scores, engine.score(prompts, lambda name, scales: scales), noise)
    with pytest.raises(CanaryError, match="times those that were sent"):
        compare_with_noise(scores, engine.score(prompts, read_all_too_large), noise)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 1.0])
def test_an_error_of_five_percent_in_all_scales_is_found(factor: float) -> None:
    """The effect of the error is 60% of that of a rounding, so that the mean difference hardly grows."""
    generator = torch.Generator().manual_seed(0)
    dims = (4, FP8_PROMPTS, 23)
    scores, rounding, activations, effect = torch.randn(
        dims, generator=generator, dtype=torch.float64
    )
    noise = Fp8Noise((scores + 0.09 * rounding).tolist(), (scores + 0.05 * effect).tolist())
    engine = (scores + 0.06 * activations + factor * 0.05 * effect).tolist()
    if factor == 0:
        compare_with_noise(scores.tolist(), engine, noise)
        return
    with pytest.raises(CanaryError, match="times those that were sent"):
        compare_with_noise(scores.tolist(), engine, noise)
