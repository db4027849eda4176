"""Tensors whose dtype is not the model's: a router's float32 bias in a bfloat16 model, in checkpoints and updates."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoint_conversion.certificate import load_certificate
from megatron_dppo.checkpoint_conversion.dist_reading import StoredBlocks
from megatron_dppo.checkpoint_conversion.hf_folder import write_hf_checkpoint
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import hf_buckets_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors, own_dtypes
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import IncompleteWeightsError
from megatron_dppo.weights.verification import compare_checksums
from tests.engine_digests import expected_digests
from tests.planted_families import add_router_bias, biased_family, planted_in_each_test
from tests.tiny_models import save_tiny_model
from tests.unit.test_engine_checksums import model_shape

BIAS = "model.layers.{}.mlp.gate.e_score_correction_bias"


family = planted_in_each_test(biased_family)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hf")
    save_tiny_model(folder, "qwen3_moe", dtype=torch.bfloat16)
    add_router_bias(folder)
    return folder


@pytest.fixture
def hf(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hf"))


def test_the_types_are_those_of_the_table(hf: Path) -> None:
    shape = load_model_shape(hf)
    assert shape.dtype == "bfloat16"
    assert own_dtypes(shape) == {BIAS.format(layer): "float32" for layer in (0, 1)}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_checkpoints_of_two_types_convert_there_and_back(hf: Path, tmp_path: Path, stored) -> None:
    tensors = add_router_bias(hf, stored)
    certificate = hf_to_megatron(hf, tmp_path / "megatron")
    dtype = str(stored).removeprefix("torch.")
    bias_dtypes = {} if dtype == "bfloat16" else {BIAS.format(layer): dtype for layer in (0, 1)}
    assert (certificate.dtype, certificate.dtypes) == ("bfloat16", bias_dtypes)
    verify(hf, tmp_path / "megatron")
    with StoredBlocks(tmp_path / "megatron" / "release") as blocks:
        assert blocks.tensors["decoder.layers.mlp.router.expert_bias"].dtype == stored
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
    certificate_back = load_certificate(tmp_path / "back")
    assert (certificate_back.tensors, certificate_back.dtypes) == (certificate.tensors, bias_dtypes)
    assert (tmp_path / "back" / "config.json").read_bytes() == (hf / "config.json").read_bytes()


def test_a_cast_leaves_the_bias_as_it_was(hf: Path, tmp_path: Path) -> None:
    certificate = hf_to_megatron(hf, tmp_path / "megatron", dtype="float32")
    assert (certificate.source_dtype, certificate.dtype) == ("bfloat16", "float32")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bfloat16")
    before, after = (load_file(f / "model.safetensors") for f in (hf, tmp_path / "back"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_another_type_is_named(hf: Path, tmp_path: Path) -> None:
    add_router_bias(hf, torch.float16)
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp.*float16.*float32 or bfloat16"):
        hf_to_megatron(hf, tmp_path / "megatron")


def test_a_trainer_s_tensors_are_written_in_their_types(hf: Path, tmp_path: Path) -> None:
    tensors = load_file(hf / "model.safetensors")
    write_hf_checkpoint(
        tmp_path / "out", load_model_shape(hf), torch.bfloat16, tensors.items(), side_files_from=hf
    )
    out = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: t.dtype for name, t in out.items()} == {n: t.dtype for n, t in tensors.items()}
    assert '"bfloat16"' in (tmp_path / "out" / "config.json").read_text()
    with open_checkpoint(tmp_path / "out") as reader:
        reader.check(load_model_shape(tmp_path / "out"))


def weights(shape: ModelShape) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    dtypes = own_dtypes(shape)
    return {
        name: torch.randn(dims).to(getattr(torch, dtypes.get(name, "bfloat16")))
        for name, dims in hf_tensors(shape).items()
    }


def test_a_bucket_has_one_type() -> None:
    shape = replace(model_shape(), num_layers=2)
    plan = hf_buckets_plan(shape, Layout(pipeline=2), 1000, 2)
    dtypes = own_dtypes(shape)
    for bucket in plan:
        assert {dtypes.get(tensor.name) for tensor in bucket.tensors} == {bucket.dtype}
        item = 2 if bucket.dtype is None else 4
        assert bucket.elements * item <= 1000 or len(bucket.tensors) == 1
    assert sorted(t.name for b in plan for t in b.tensors) == sorted(hf_tensors(shape))
    assert sum(bucket.dtype == "float32" for bucket in plan) == 1


def test_a_stale_or_rounded_bias_is_named() -> None:
    shape = model_shape()
    hf = weights(shape)
    (digests,) = expected_digests(shape, hf)
    name = BIAS.format(0)
    assert digests[name] == tiled_hash(hf[name])
    for wrong in (torch.zeros_like(hf[name]), hf[name].bfloat16().float(), hf[name].bfloat16()):
        found = compare_checksums([digests], [digests | {name: tiled_hash(wrong)}])
        assert [mismatch.tensor for mismatch in found] == [name]


def test_a_bias_in_the_model_s_type_is_refused() -> None:
    shape = model_shape()
    hf = weights(shape)
    with pytest.raises(IncompleteWeightsError, match="e_score_correction_bias"):
        expected_digests(shape, hf | {BIAS.format(0): hf[BIAS.format(0)].bfloat16()})
