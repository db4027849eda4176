"""Checkpoint layouts of other programs: they are read as transformers reads them, or refused with the remedy."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from megatron_dppo.checkpoint_conversion.certificate import load_certificate
from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.convert.quantized import open_weights
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.model.errors import CheckpointError, ModelError, UnsupportedModelError
from megatron_dppo.model.families import load_model_shape
from tests.tiny_models import save_tiny_model, tensors_of

Tensors = dict[str, torch.Tensor]
BLOCK = 32


def model(folder: Path, *changes: Callable[[Tensors], object], **options: Any) -> Path:
    """Save a tiny model whose tensors ``changes`` alter in place, one after the other."""
    hf = save_tiny_model(folder, **options)
    tensors = load_file(hf / "model.safetensors")
    for change in changes:
        change(tensors)
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    return hf


def fuse(tensors: Tensors) -> None:
    """Fuse the experts of each layer as transformers 5 does: gates before ups."""
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        pairs = [
            [tensors.pop(f"{prefix}{e}.{name}_proj.weight") for name in ("gate", "up")]
            for e in range(8)
        ]
        downs = [tensors.pop(f"{prefix}{e}.down_proj.weight") for e in range(8)]
        tensors[prefix + "gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[prefix + "down_proj"] = torch.stack(downs)


def quantize(tensors: Tensors) -> None:
    """Quantize the weights to 8 bits in blocks of ``BLOCK`` x ``BLOCK``, each with its own scale."""
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        grid = (-(-rows // BLOCK), -(-columns // BLOCK))
        tensors[name + "_scale_inv"] = 0.5 + torch.rand(grid, generator=generator)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def declare_fp8(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    scheme = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], **changes}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": scheme}))


def test_experts_in_one_tensor_are_converted_to_the_same_bytes(tmp_path):
    plain = model(tmp_path / "plain", lambda tensors: None)
    fused = model(tmp_path / "fused", fuse)
    certificates = [hf_to_megatron(hf, tmp_path / f"m-{hf.name}") for hf in (plain, fused)]
    assert certificates[0].tensors == certificates[1].tensors
    verify(fused, tmp_path / "m-plain")
    megatron_to_hf(tmp_path / "m-fused", tmp_path / "back")
    expected, exported = tensors_of(plain), tensors_of(tmp_path / "back")
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in expected.items())


def test_an_expert_is_where_transformers_looks_for_it(tmp_path):
    hf = model(tmp_path / "hf", lambda tensors: None)
    loaded = AutoModelForCausalLM.from_pretrained(hf).state_dict()
    model(tmp_path / "fused", fuse)
    fused = tensors_of(tmp_path / "fused")
    for name in ("gate_up_proj", "down_proj"):
        full_name = f"model.layers.1.mlp.experts.{name}"
        assert torch.equal(fused[full_name], loaded[full_name])


def test_a_run_does_not_start_from_experts_in_one_tensor(tmp_path):
    fused = model(tmp_path / "fused", fuse)
    with (
        open_checkpoint(fused) as reader,
        pytest.raises(CheckpointError, match=r"experts\..*_proj .*hf-to-megatron"),
    ):
        reader.check(load_model_shape(fused))


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(32, 64)}),
        lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(8, 65, 64)}),
        lambda t: t.update({"model.layers.0.mlp.experts.gate_up_proj": torch.ones(9, 64, 64)}),
    ],
    ids=["an expert twice", "odd rows", "too many experts"],
)
def test_experts_that_do_not_fit_are_refused(tmp_path, change):
    hf = model(tmp_path / "hf", fuse, change)
    with pytest.raises(CheckpointError, match=r"experts\."):
        hf_to_megatron(hf, tmp_path / "m")


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_8_bit_weights_are_what_transformers_makes_of_them(tmp_path, family):
    hf = model(tmp_path / "hf", quantize, family=family)
    declare_fp8(hf)
    certificate = hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")
    assert certificate.source_dtype == "float32+float8_e4m3fn"
    verify(hf, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    stored, exported = tensors_of(hf), tensors_of(tmp_path / "back")
    for name, tensor in exported.items():
        expected = stored[name]
        if name + "_scale_inv" in stored:
            rule = Fp8Dequantize(None)._dequantize_one
            expected = rule(expected, stored[name + "_scale_inv"], torch.bfloat16)
        assert torch.equal(tensor, expected.to(torch.bfloat16)), name
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["dtype"] == "bfloat16"
    assert load_certificate(tmp_path / "back").dtype == "bfloat16"
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")


@pytest.mark.parametrize(("start", "count"), [(0, 96), (0, 1), (31, 2), (40, 30), (95, 1)])
def test_blocks_that_do_not_divide_a_matrix_are_cut_at_its_end(tmp_path, start, count):
    """The matrix is 96 x 40 in blocks of 64 x 32, so the last block is cut in both directions."""
    weight = torch.randn(96, 40).to(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    tensors = {"w.weight": weight, "w.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    scheme = {"quant_method": "fp8", "weight_block_size": [64, 32]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": scheme}))
    factors = torch.ones(96, 40)
    factors[:64, 32:], factors[64:, :32], factors[64:, 32:] = 2.0, 3.0, 4.0
    expected = weight.float() * factors
    with open_weights(tmp_path) as reader:
        assert torch.equal(reader.read_rows("w.weight", start, count), expected[start:][:count])


def test_one_scale_is_of_the_whole_matrix(tmp_path):
    weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
    for number, scale in enumerate([torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tensors = {"w.weight": weight, "w.weight_scale_inv": scale}
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        with open_weights(folder) as reader:
            assert torch.equal(reader.read_rows("w.weight", 2, 3), weight[2:5].float() * 0.5)


BAD_SCALES: dict[str, tuple[Callable[[Tensors], object], dict[str, object], str]] = {
    "no scale": (lambda t: t.pop("model.layers.0.mlp.up_proj.weight_scale_inv"), {}, r"up_proj\.weight of shape"),
    "another grid": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(2, 3)}), {}, r"\(2, 3\)",
    ),
    "exponents in bytes": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.full((4, 2), 127, dtype=torch.uint8)}),
        {}, r"up_proj\.weight_scale_inv has the type uint8, expected float32",
    ),
    "no block size": (lambda t: None, {"weight_block_size": None}, "weight_block_size"),
    "a wild block size": (lambda t: None, {"weight_block_size": [0, 32]}, "weight_block_size"),
    "NaN": (
        lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.full((4, 2), torch.nan)}), {},
        r"up_proj\.weight\[0, 0\] is nan",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "scheme", "words"), BAD_SCALES.values(), ids=BAD_SCALES)
def test_scales_that_do_not_fit_are_refused(tmp_path, change, scheme, words):
    hf = model(tmp_path / "hf", quantize, change, family="qwen3")
    declare_fp8(hf, **scheme)
    with pytest.raises(CheckpointError, match=words):
        hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")
    assert not (tmp_path / "m").exists()


def test_8_bit_weights_want_a_type_and_are_no_start_of_a_run(tmp_path):
    hf = model(tmp_path / "hf", quantize, family="qwen3")
    declare_fp8(hf)
    with pytest.raises(CheckpointError, match=r"float8_e4m3fn.*--dtype"):
        hf_to_megatron(hf, tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*hf-to-megatron"):
        load_model_shape(hf)
    declare_fp8(hf, quant_method="awq")
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*'awq'"):
        hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")


def cast_all_but_norms(tensors: Tensors) -> None:
    """Make the weights bfloat16, except norms, which stay float32."""
    tensors.update({n: t.bfloat16() for n, t in tensors.items() if "norm" not in n})


def test_several_types_are_cast_to_the_one_that_is_asked_for(tmp_path):
    hf = model(tmp_path / "hf", cast_all_but_norms, family="qwen3")
    with pytest.raises(CheckpointError, match=r"several dtypes.*--dtype"):
        hf_to_megatron(hf, tmp_path / "m")
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        certificate = hf_to_megatron(hf, tmp_path / name, dtype=name)
        assert certificate.source_dtype == "bfloat16+float32"
        verify(hf, tmp_path / name)
        megatron_to_hf(tmp_path / name, tmp_path / f"back-{name}")
        exported = tensors_of(tmp_path / f"back-{name}")
        for tensor_name, tensor in tensors_of(hf).items():
            assert torch.equal(exported[tensor_name], tensor.to(dtype))


def test_a_run_starts_from_several_types(tmp_path):
    hf = model(tmp_path / "hf", cast_all_but_norms, family="qwen3")
    with open_checkpoint(hf) as reader:
        reader.check(load_model_shape(hf))
        assert reader.read("model.norm.weight").dtype == torch.float32


def add_frequencies(tensors: Tensors) -> None:
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"] = torch.ones(8)


def test_rotary_frequencies_are_left_out(tmp_path):
    plain = model(tmp_path / "plain", lambda tensors: None, family="llama")
    hf = model(tmp_path / "hf", add_frequencies, family="llama")
    certificate = hf_to_megatron(hf, tmp_path / "m")
    assert certificate.tensors == hf_to_megatron(plain, tmp_path / "m-plain").tensors
    verify(hf, tmp_path / "m")
    with open_checkpoint(hf) as reader:
        reader.check(load_model_shape(hf))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_weights_that_are_no_numbers_are_named(tmp_path, value):
    def spoil(tensors: Tensors) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][7, 3] = value

    hf = model(tmp_path / "hf", spoil, family="qwen3")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight\[7, 3\]"):
        hf_to_megatron(hf, tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_weights_that_the_asked_type_can_not_hold_are_named(tmp_path):
    def enlarge(tensors: Tensors) -> None:
        tensors["model.norm.weight"][5] = 1e6

    hf = model(tmp_path / "hf", enlarge, family="qwen3")
    with pytest.raises(ModelError, match=r"float16: model\.norm\.weight\[5\]"):
        hf_to_megatron(hf, tmp_path / "m", dtype="float16")
    hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")
    with pytest.raises(ModelError, match=r"float16: model\.norm\.weight\[5\]"):
        megatron_to_hf(tmp_path / "m", tmp_path / "back", dtype="float16")
