"""Folders with block-FP8 weights: written, read by transformers, and converted to Megatron and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from megatron_dppo.block_fp8 import dequantize, quantize
from megatron_dppo.convert import __main__ as convert
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf
from megatron_dppo.model.families import load_model_shape
from megatron_dppo.model.quantization import SCALE_SUFFIX, is_quantized
from tests.tiny_models import save_tiny_model

SIZES: dict[str, Any] = {
    "layers": 1,
    "hidden": 128,
    "head_dim": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "vocab_size": 300,
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    return save_tiny_model(folder, dtype=torch.bfloat16, **SIZES)


@pytest.fixture(scope="module")
def fp8(plain: Path) -> Path:
    out = plain.parent / "fp8"
    assert convert.main(["hf-to-fp8", "--hf", str(plain), "--out", str(out)]) == 0
    return out


def test_a_folder_holds_what_an_engine_receives(plain: Path, fp8: Path) -> None:
    weights = load_file(plain / "model.safetensors")
    (file,) = fp8.glob("*.safetensors")
    stored = load_file(file)
    for name, weight in weights.items():
        if is_quantized(name):
            values, scales = quantize(weight)
            assert torch.equal(stored.pop(name).view(torch.uint8), values.view(torch.uint8))
            assert torch.equal(stored.pop(name + SCALE_SUFFIX), scales)
        else:
            assert torch.equal(stored.pop(name), weight)
    assert not stored
    config = json.loads((fp8 / "config.json").read_text())
    scheme = config.pop("quantization_config")
    assert (scheme["quant_method"], scheme["weight_block_size"]) == ("fp8", [128, 128])
    assert config == json.loads((plain / "config.json").read_text())
    assert (fp8 / "tokenizer.json").is_file()


def test_transformers_reads_the_same_weights(plain: Path, fp8: Path) -> None:
    scheme = FineGrainedFP8Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        fp8, dtype=torch.float32, quantization_config=scheme
    )
    loaded = model.state_dict()
    weights = load_file(plain / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.weight"
    rounded = {n: dequantize(*quantize(w)) for n, w in weights.items() if is_quantized(n)}
    assert torch.equal(loaded[name].float(), rounded[name])
    experts = "model.layers.0.mlp.experts."
    down = torch.stack([rounded[f"{experts}{e}.down_proj.weight"] for e in range(2)])
    assert torch.equal(loaded[f"{experts}down_proj"].float(), down)


def test_a_quantised_folder_becomes_a_checkpoint_to_train(
    plain: Path, fp8: Path, tmp_path: Path
) -> None:
    hf_to_megatron(fp8, tmp_path / "megatron", dtype="bfloat16")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    (file,) = (tmp_path / "back").glob("*.safetensors")
    back = load_file(file)
    weights = load_file(plain / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, weight in weights.items():
        expected = weight
        if is_quantized(name):
            expected = dequantize(*quantize(weight), dtype=torch.bfloat16)
        assert torch.equal(back[name], expected), name
    assert load_model_shape(tmp_path / "back") == load_model_shape(plain)


def test_a_model_with_other_widths_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = save_tiny_model(tmp_path / "hf", layers=1)
    assert convert.main(["hf-to-fp8", "--hf", str(hf), "--out", str(tmp_path / "out")]) == 2
    assert "128" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tensor_that_differs_from_the_certificate_is_not_quantised(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_to_megatron(plain, tmp_path / "megatron")
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf")
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    command = ["hf-to-fp8", "--hf", str(tmp_path / "hf"), "--out", str(tmp_path / "out")]
    assert convert.main(command) != 0
    assert "SHA-256" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
