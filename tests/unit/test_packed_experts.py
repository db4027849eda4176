"""Families whose files have all experts of a layer in one tensor. These tensors are read and written by expert."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_model_shape
from tests.planted_families import packing_family, planted_in_each_test
from tests.tiny_models import tensors_of
from tests.unit.test_checkpoint_layouts import fuse, model

MTP = "mtp.layers.0.mlp.experts.gate_up_proj"


family = planted_in_each_test(packing_family)


@pytest.fixture
def plain_model(tmp_path: Path) -> Path:
    return model(tmp_path / "plain", lambda tensors: None)


@pytest.fixture
def packed_model(tmp_path: Path) -> Path:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        fuse(tensors)
        # Conversion copies this tensor without dividing it, though it has the same form.
        tensors[MTP] = torch.randn(8, 64, 64)

    return model(tmp_path / "packed", change)


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def test_each_matrix_of_a_packed_tensor_is_read(packed_model: Path) -> None:
    with open_checkpoint(packed_model) as reader:
        reader.check(load_model_shape(packed_model))
        whole = tensors_of(packed_model)["model.layers.1.mlp.experts.gate_up_proj"]
        for expert in range(8):
            for half, matrix in enumerate(("gate", "up")):
                name = f"model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight"
                rows = whole[expert].chunk(2)[half]
                assert torch.equal(reader.read(name), rows)
                assert torch.equal(reader.read(name, 1, 8, 24), rows[:, 8:32])


@pytest.mark.parametrize("max_shard_bytes", [10**9, 200_000])
def test_conversion_gives_the_packed_tensors_back(
    packed_model: Path, tmp_path: Path, max_shard_bytes: int
) -> None:
    hf_to_megatron(packed_model, tmp_path / "m")
    verify(packed_model, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back", max_shard_bytes=max_shard_bytes)
    expected, found = tensors_of(packed_model), load_shards(tmp_path / "back")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    index = tmp_path / "back" / "model.safetensors.index.json"
    if max_shard_bytes < 10**9:
        assert json.loads(index.read_text())["weight_map"].keys() == expected.keys()
    with open_checkpoint(tmp_path / "back") as reader:
        reader.check(load_model_shape(packed_model))
        assert torch.equal(reader.read(MTP), expected[MTP])


def test_files_with_a_tensor_for_each_matrix_are_read_too(
    plain_model: Path, packed_model: Path, tmp_path: Path
) -> None:
    certificate = hf_to_megatron(plain_model, tmp_path / "m")
    expected = hf_to_megatron(packed_model, tmp_path / "m2").tensors
    assert dict(certificate.tensors) == {k: v for k, v in expected.items() if k != MTP}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model.layers.0.mlp.experts.down_proj": torch.ones(7, 64, 32)}, r"7\.down_proj"),
        ({"model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(32, 64)}, r"1\.up_proj"),
    ],
    ids=["missing", "twice"],
)
def test_experts_that_do_not_fit_are_refused(
    packed_model: Path, change: dict[str, torch.Tensor], named: str
) -> None:
    save_file({**tensors_of(packed_model), **change}, packed_model / "model.safetensors")
    message = rf"layers\.0\.mlp\.experts\.{named}"
    with pytest.raises(CheckpointError, match=message), open_checkpoint(packed_model) as reader:
        reader.check(load_model_shape(packed_model))
