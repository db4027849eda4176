"""Tensors that checkpoints carry along: certified and copied, neither trained nor sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint_conversion.certificate import load_certificate
from megatron_dppo.checkpoint_conversion.torch_dist import (
    combined_digest,
    open_checkpoint,
    tensor_digests,
)
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, MismatchError
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.gather_plan import gather_plan
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.mapping import hf_tensors
from megatron_dppo.weights.checksums import EngineTensors
from tests.planted_families import add_carried_tensors, carrying_family, planted_in_each_test
from tests.tiny_models import save_tiny_model
from tests.unit.test_conversion_streaming import flip_byte, same_bytes

family = planted_in_each_test(carrying_family)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("hf"), "qwen3_moe", dtype=torch.bfloat16)


@pytest.fixture
def hf(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "hf"))


@pytest.fixture
def carried_tensors(hf: Path) -> dict[str, torch.Tensor]:
    return add_carried_tensors(hf)


def test_they_are_no_part_of_what_is_trained_and_sent(hf: Path, carried_tensors) -> None:
    shape = load_model_shape(hf)
    planned = {tensor.name for tensor in gather_plan(shape, Layout())}
    for names in (hf_tensors(shape).keys(), planned, EngineTensors(shape).parts.keys()):
        assert not names & carried_tensors.keys()
    with open_checkpoint(hf) as reader:
        reader.check(shape)


@pytest.mark.parametrize("dtype", [None, "float32"])
def test_they_are_certified_and_come_back_in_their_own_types(
    hf, carried_tensors, tmp_path, dtype
) -> None:
    certificate = hf_to_megatron(hf, tmp_path / "megatron", dtype=dtype)
    assert list(certificate.tensors)[-3:] == sorted(carried_tensors)
    assert verify(hf, tmp_path / "megatron").keys() == certificate.tensors.keys()
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", dtype="bfloat16")
    assert same_bytes(hf, tmp_path / "back")
    with open_checkpoint(tmp_path / "back") as reader:
        assert all(
            torch.equal(reader.read(name), values) for name, values in carried_tensors.items()
        )
    if dtype is None:
        digests = [tensor_digests(folder) for folder in (hf, tmp_path / "megatron")]
        assert combined_digest(digests[:1]) == combined_digest(digests[1:])
        assert load_certificate(tmp_path / "back").tensors == certificate.tensors


def test_several_files_of_an_export_hold_them_too(hf, carried_tensors, tmp_path) -> None:
    hf_to_megatron(hf, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", max_shard_bytes=50_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert carried_tensors.keys() <= index["weight_map"].keys()
    assert same_bytes(hf, tmp_path / "back")


def flip_last_byte(path: Path) -> None:
    flip_byte(path, path.stat().st_size - 1)


@pytest.mark.parametrize(
    ("damage", "name"), [(flip_last_byte, r"model\.visual\.patch_embed"), (Path.unlink, "eh_proj")]
)
def test_an_altered_or_lost_one_is_named(hf, carried_tensors, tmp_path, damage, name) -> None:
    hf_to_megatron(hf, tmp_path / "megatron")
    damage(tmp_path / "megatron" / "release" / "carried" / "model.safetensors")
    with pytest.raises(MismatchError, match=name):
        verify(hf, tmp_path / "megatron")
    with pytest.raises(MismatchError, match=name):
        megatron_to_hf(tmp_path / "megatron", tmp_path / "back")


def test_a_checkpoint_of_a_run_takes_them_from_its_start_model(
    hf, carried_tensors, tmp_path
) -> None:
    hf_to_megatron(hf, tmp_path / "megatron")
    run = tmp_path / "megatron" / "release"
    for path in (run / "carried").iterdir():
        path.unlink()
    (run / "carried").rmdir()
    megatron_to_hf(run, tmp_path / "back", hf_config=hf)
    assert same_bytes(hf, tmp_path / "back")


def test_without_them_a_checkpoint_is_whole(hf, tmp_path) -> None:
    hf_to_megatron(hf, tmp_path / "megatron")
    assert not (tmp_path / "megatron" / "release" / "carried").exists()
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    assert same_bytes(hf, tmp_path / "back")


def test_other_unknown_tensors_are_still_refused(hf, carried_tensors, tmp_path) -> None:
    path = hf / "model.safetensors"
    save_file({**load_file(path), "model.layers.1.eh_proj.weight": torch.ones(2)}, path)
    with pytest.raises(CheckpointError, match=r"1 unknown, first model\.layers\.1\.eh_proj"):
        hf_to_megatron(hf, tmp_path / "megatron")
