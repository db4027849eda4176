"""The doctor compares the tensors of a server with the weights of its version, and names the tensor and the fault."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dppo.block_fp8 import DTYPE, block_checksums
from megatron_dppo.diagnostics.doctor.engine_tensors import (
    RankTensors,
    TensorFault,
    findings_of,
    tensor_faults,
)
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.server.held_tensors import HeldTensors, blocks_of, read, write
from tests.tiny_models import save_tiny_model

RANKS = 2
LAYER = "model.layers.0."
QKV = f"{LAYER}self_attn.qkv_proj.weight"
O_PROJ = f"{LAYER}self_attn.o_proj.weight"
W13 = f"{LAYER}mlp.experts.w13_weight"
ROUTER = f"{LAYER}mlp.gate.weight"
Tensors = dict[str, Tensor]


def save_model(folder: Path, seed: int) -> Path:
    return save_tiny_model(
        folder, seed=seed, dtype=torch.bfloat16, layers=1, hidden=256, head_dim=32,
        num_attention_heads=16, num_key_value_heads=8, moe_intermediate_size=256, num_experts=4,
    )  # fmt: skip


@dataclass(frozen=True)
class Model:
    """A model whose version 1 is on a server of two ranks. Version 0 is known, too."""

    shape: ModelShape
    folders: tuple[Path, Path]

    def tensors(self, version: int, rank: int, *, quantized: bool = True) -> RankTensors:
        layout = HeldTensors("http://h", "1", EngineLayout(RANKS), "cpu", quantized, ())
        return RankTensors(layout, rank, self.folders[version], self.shape, torch.bfloat16)

    def faults(
        self, change: Callable[[Tensors, Tensors], None], *, quantized: bool = True
    ) -> list[TensorFault]:
        """Return the faults that are found after ``change``, a function of rank 1's tensors and of version 0's."""
        own = self.tensors(1, 1, quantized=quantized)
        old = self.tensors(0, 1, quantized=quantized)
        held = {name: tensor.clone() for name, tensor in own.flat_tensors.items()}
        change(held, old.flat_tensors)
        widths = {QKV: 256, O_PROJ: 256, W13: 256, f"{LAYER}mlp.experts.w2_weight": 128}
        shaped: Tensors = {}
        for name, tensor in held.items():
            shaped[name] = tensor.view(-1, widths[name]) if tensor.dtype == DTYPE else tensor
        answer = {name: tiled_hash(tensor) for name, tensor in held.items()}
        answer |= blocks_of(shaped.items())
        server = HeldTensors("http://h", "1", EngineLayout(RANKS), "cpu", quantized, ({}, answer))
        return tensor_faults(server, 1, own, lambda: {0: old})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folders = [save_model(tmp_path_factory.mktemp(f"version-{n}"), n) for n in range(2)]
    return Model(load_model_shape(folders[0]), (folders[0], folders[1]))


def nothing(held: Tensors, old: Tensors) -> None:
    pass


@pytest.mark.parametrize("quantized", [True, False])
def test_a_server_with_the_weights_of_its_version_has_no_fault(
    model: Model, quantized: bool
) -> None:
    assert model.faults(nothing, quantized=quantized) == []


def scale_row(held: Tensors, old: Tensors) -> None:
    # Rank 1 has two rows of blocks of q_proj, and one each of k_proj and v_proj.
    held[f"{QKV}_scale_inv"].view(4, 2)[1] *= 1.5


def stale_expert(held: Tensors, old: Tensors) -> None:
    # Gate and up of each expert have one row of two blocks on the rank: those of expert 2 come fifth and sixth.
    for name, size in ((W13, 128 * 256), (f"{W13}_scale_inv", 2)):
        part = slice(5 * size, 6 * size)
        held[name][part] = old[name][part]


def stale_scales(held: Tensors, old: Tensors) -> None:
    held[f"{O_PROJ}_scale_inv"].copy_(old[f"{O_PROJ}_scale_inv"])


def wild_scales(held: Tensors, old: Tensors) -> None:
    held[f"{O_PROJ}_scale_inv"][::2] *= torch.tensor([2.0, 3.0])


def swapped_blocks(held: Tensors, old: Tensors) -> None:
    values = held[O_PROJ].view(torch.uint8).view(256, 256)
    values[:128] = values[:128].roll(128, 1)


def swapped_experts(held: Tensors, old: Tensors) -> None:
    values = held[W13].view(torch.uint8).view(-1, 128, 2, 128)
    values[[0, 2], :, 0] = values[[2, 0], :, 0]


def stale_router(held: Tensors, old: Tensors) -> None:
    held[ROUTER].copy_(old[ROUTER])


def flipped_bit(held: Tensors, old: Tensors) -> None:
    held[O_PROJ].view(torch.uint8)[200 * 256 + 3] ^= 1


@pytest.mark.parametrize(
    ("change", "of_quantisation", "expected"),
    [
        (scale_row, True, {f"{LAYER}self_attn.q_proj.weight": "scales of block row 1 times 1.5"}),
        (
            stale_expert,
            False,
            {
                f"{LAYER}mlp.experts.2.up_proj.weight": "values of all blocks of version 0; "
                "scales of all blocks of version 0"
            },
        ),
        (stale_scales, True, {O_PROJ: "scales of all blocks of version 0"}),
        (wild_scales, True, {O_PROJ: "scales of block column 0 times 2 to 3"}),
        (
            swapped_blocks,
            True,
            {O_PROJ: "values of block (0, 1) in the place of (0, 0), block (0, 0) in the place of (0, 1)"},
        ),
        (
            swapped_experts,
            True,
            {
                f"{LAYER}mlp.experts.0.gate_proj.weight": "values of block (0, 0) of "
                f"{LAYER}mlp.experts.1.gate_proj.weight in the place of (0, 0)",
                f"{LAYER}mlp.experts.1.gate_proj.weight": "values of block (0, 0) of "
                f"{LAYER}mlp.experts.0.gate_proj.weight in the place of (0, 0)",
            },
        ),
        (stale_router, False, {ROUTER: "is the tensor of version 0"}),
        (flipped_bit, True, {O_PROJ: "values of block (1, 0) differ"}),
    ],
)  # fmt: skip
def test_a_fault_is_named_with_its_tensor_and_its_blocks(
    model: Model,
    change: Callable[[Tensors, Tensors], None],
    of_quantisation: bool,
    expected: dict[str, str],
) -> None:
    faults = model.faults(change)
    assert {fault.tensor: fault.difference for fault in faults} == expected
    assert {fault.is_of_quantisation for fault in faults} == {of_quantisation}
    assert {fault.rank for fault in faults} == {1}


def test_many_tensors_that_differ_alike_are_one_finding(model: Model) -> None:
    def scale_two_tensors(held: Tensors, old: Tensors) -> None:
        held[f"{W13}_scale_inv"] *= 2
        held[f"{O_PROJ}_scale_inv"] *= 3

    lines = findings_of(model.faults(scale_two_tensors))
    assert len(lines) == 2
    assert lines[0].startswith(f"engine: quantisation: {O_PROJ}: scales of all blocks times 3 ")
    assert lines[1].startswith(f"engine: quantisation: 8 tensors, such as {LAYER}mlp.experts.0.")


def test_weights_that_are_not_quantised_are_named_by_their_checksums(model: Model) -> None:
    (fault,) = model.faults(stale_router, quantized=False)
    assert (fault.tensor, fault.is_of_quantisation) == (ROUTER, False)


def exchange_bytes(block: Tensor) -> None:
    block.copy_(block.roll(1, 1))


def exchange_rows(block: Tensor) -> None:
    block[[3, 70]] = block[[70, 3]]


def exchange_words_of_rows(block: Tensor) -> None:
    block.copy_(block.roll(8, 1))


@pytest.mark.parametrize("exchange", [exchange_bytes, exchange_rows, exchange_words_of_rows])
def test_the_checksum_of_a_block_depends_on_its_bytes_and_their_places_alone(
    exchange: Callable[[Tensor], None],
) -> None:
    values = torch.randint(0, 255, (300, 200), dtype=torch.uint8).view(DTYPE)
    checksums = block_checksums(values)
    assert checksums.shape == (3, 2)
    moved = values.clone()
    exchange(moved.view(torch.uint8)[128:256, :128])
    assert ((block_checksums(moved) != checksums).nonzero().tolist()) == [[1, 0]]
    assert block_checksums(values[128:256, :128].contiguous()).item() == checksums[1, 0]


def test_what_servers_hold_is_read_as_it_was_written(tmp_path: Path) -> None:
    tensors = {f"{O_PROJ}_scale_inv": torch.rand(2, 2), O_PROJ: torch.zeros(256, 256, dtype=DTYPE)}
    answer = {O_PROJ: "1234", **blocks_of(tensors.items())}
    server = HeldTensors("http://h", "3", EngineLayout(4, 2, 2, True), "cpu", True, (answer,))
    write(tmp_path / "servers" / "held.json", [server])
    (server_read,) = read(tmp_path / "servers" / "held.json")
    assert server_read == server
    assert server_read.checksums(0) == {O_PROJ: "1234"}
    scales = server_read.blocks(0, f"{O_PROJ}_scale_inv")
    assert scales is not None
    assert torch.equal(scales, tensors[f"{O_PROJ}_scale_inv"].flatten())
    assert server_read.blocks(0, ROUTER) is None
    (tmp_path / "broken.json").write_text('[{"url": 3}]')
    with pytest.raises(ValueError, match=r"broken\.json"):
        read(tmp_path / "broken.json")
