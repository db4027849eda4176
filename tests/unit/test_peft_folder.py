"""Folders of adapters in PEFT's format: what is written is read, and what is not of the run is refused by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint_conversion.adapters import PeftReader, write_peft
from megatron_dppo.config import ConfigError, load_config
from megatron_dppo.config.lora import PEFT_CONFIG, PEFT_WEIGHTS
from megatron_dppo.launch.library_checks import check_everything
from megatron_dppo.model.adapters import Adapters, adapter_tensors
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.model.families import load_model_shape
from tests.unit.config_files import DENSE, MOE, minimal, write_checkpoint, write_config

PLAIN = Adapters(4, 8.0, ("q_proj", "v_proj"))
SHARED = Adapters(4, 8.0, ("down_proj",), share_experts=True)
A = "model.layers.2.self_attn.v_proj.lora_A"


@pytest.fixture
def shape(tmp_path):
    return load_model_shape(write_checkpoint(tmp_path / "moe", MOE))


def written(folder, adapters, shape):
    tensors = {n: torch.randn(dims) for n, dims in adapter_tensors(adapters, shape).items()}
    write_peft(folder, adapters, shape, tensors.items(), base="base", dtype=torch.float32)
    return tensors


@pytest.mark.parametrize("adapters", [PLAIN, SHARED])
def test_what_is_written_is_read(tmp_path, shape, adapters):
    tensors = written(tmp_path / "out", adapters, shape)
    with PeftReader(tmp_path / "out", adapters, shape) as reader:
        assert all(torch.equal(reader.read(n, tuple(t.shape)), t) for n, t in tensors.items())


def test_names_are_pefts_and_shared_adapters_are_written_for_every_expert(tmp_path, shape):
    tensors = written(tmp_path / "plain", PLAIN, shape)
    stored = load_file(tmp_path / "plain" / PEFT_WEIGHTS)
    assert torch.equal(stored[f"base_model.model.{A}.weight"], tensors[A])
    tensors = written(tmp_path / "shared", SHARED, shape)
    stored = load_file(tmp_path / "shared" / PEFT_WEIGHTS)
    assert len(stored) == 4 * 8 * 2
    one = "model.layers.1.mlp.experts.{}.down_proj.lora_B"
    for expert in range(8):
        name = f"base_model.model.{one.format(expert)}.weight"
        assert torch.equal(stored[name], tensors[one.format("*")])


@pytest.mark.parametrize(
    ("adapters", "words"),
    [
        (Adapters(8, 8.0, ("q_proj", "v_proj")), "r is 4, expected 8; 16 shapes differ"),
        (Adapters(4, 9.0, ("q_proj", "v_proj")), "lora_alpha is 8, expected 9.0"),
        (Adapters(4, 8.0, ("q_proj",)), "target_modules are .*8 tensors are unknown"),
        (Adapters(4, 8.0, ("q_proj", "v_proj", "o_proj")), "8 tensors are missing, first .*o_proj"),
    ],
)
def test_other_adapters_are_refused(tmp_path, shape, adapters, words):
    written(tmp_path / "out", PLAIN, shape)
    with pytest.raises(CheckpointError, match=words):
        PeftReader(tmp_path / "out", adapters, shape)


def test_adapters_of_another_kind_or_family_are_refused(tmp_path, shape):
    written(tmp_path / "out", PLAIN, shape)
    dense = load_model_shape(write_checkpoint(tmp_path / "dense", DENSE))
    with pytest.raises(CheckpointError, match="shapes differ"):
        PeftReader(tmp_path / "out", PLAIN, dense)
    path = tmp_path / "out" / PEFT_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {"use_dora": True}))
    with pytest.raises(CheckpointError, match="use_dora is True, expected False"):
        PeftReader(tmp_path / "out", PLAIN, shape)


def test_experts_that_should_share_must_be_alike(tmp_path, shape):
    written(tmp_path / "out", SHARED, shape)
    stored = load_file(tmp_path / "out" / PEFT_WEIGHTS)
    stored["base_model.model.model.layers.0.mlp.experts.5.down_proj.lora_A.weight"] += 1
    save_file(stored, tmp_path / "out" / PEFT_WEIGHTS)
    with (
        PeftReader(tmp_path / "out", SHARED, shape) as reader,
        pytest.raises(CheckpointError, match=r"experts\.5\.down_proj.* differs"),
    ):
        reader.read("model.layers.0.mlp.experts.*.down_proj.lora_A", (4, 32))


def test_they_are_refused_before_the_start(tmp_path, shape):
    written(tmp_path / "out", PLAIN, shape)
    overrides = ["lora.rank=8", "lora.target_modules=[q_proj,v_proj]"]
    config = load_config(
        write_config(tmp_path, minimal(tmp_path)),
        [*overrides, f"lora.start_from={tmp_path / 'out'}", "reward.name=exact_integer"],
    )
    with pytest.raises(ConfigError, match=r"lora.start_from: .*: its adapters are not those"):
        check_everything(config, "configuration", weights=False)
