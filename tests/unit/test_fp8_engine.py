"""Engines with block-FP8 weights: the tensors that are sent and those of each rank, the models that fit, and the
servers' options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_dppo import EXAMPLES
from megatron_dppo.block_fp8 import DTYPE, quantize
from megatron_dppo.config import ConfigError, check_config, load_config
from megatron_dppo.engine.client import HttpClient
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.options import server_options
from megatron_dppo.engine.running_server import check_layout
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import FAMILIES
from megatron_dppo.model.mapping import engine_parameters, hf_tensors
from megatron_dppo.model.quantization import check_block_widths, is_quantized
from megatron_dppo.model.shape import ModelShape
from megatron_dppo.own_fleet import own_fleet_faults
from megatron_dppo.spec import RunSpec
from megatron_dppo.tensor_hash import tiled_hash
from megatron_dppo.weights.checksums import EngineTensors, ExpectedChecksums, IncompleteWeightsError
from megatron_dppo.weights.engine_weights import EngineWeights
from tests import small_shapes
from tests.messages import mentions
from tests.unit.config_files import MOE, minimal, write_config

ATTENTION = "model.layers.0.self_attn."
EXPERTS = "model.layers.0.mlp.experts."
WIDE = {
    "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
    "moe_intermediate_size": 256, "num_experts": 2,
}  # fmt: skip


def model_shape(**changes: Any) -> ModelShape:
    sizes = {
        "num_layers": 1, "hidden_size": 256, "head_dim": 128, "ffn_hidden_size": 256, "vocab_size": 96,
        "dtype": "bfloat16", "num_experts": 2, "experts_per_token": 1, "moe_ffn_hidden_size": 256,
    }  # fmt: skip
    return replace(small_shapes.MOE, **{**sizes, **changes})


def weights(shape: ModelShape) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(d).to(torch.bfloat16) for name, d in hf_tensors(shape).items()}


def engine_weights(shape: ModelShape, ranks: int = 1, *, quantized: bool = True) -> EngineWeights:
    tensors = EngineTensors(shape, EngineLayout(ranks), "cpu", quantized=quantized)
    client = HttpClient("http://127.0.0.1:1", "user", "admin")
    return EngineWeights(client, tensors, torch.bfloat16, timeout_s=1)


def rows(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2, 0)[rank]


def columns(tensor: Tensor, rank: int) -> Tensor:
    return tensor.chunk(2, 1)[rank]


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_hold_values_and_scales_beside_them(rank: int) -> None:
    shape = model_shape()
    hf = weights(shape)
    engine = engine_weights(shape, 2)
    expected = engine.expected()
    for item in hf.items():
        expected.add(engine.encode([item]))
    got = expected.digests([json.loads(json.dumps(expected.partial()))])[rank]
    plain = EngineTensors(shape, EngineLayout(2), "cpu").sizes[rank]
    added = {"qkv_proj.weight", "o_proj.weight", "experts.w13_weight", "experts.w2_weight"}
    assert {n.removesuffix("_scale_inv") for n in got.keys() - plain.keys()} == {
        name for name in plain if name.endswith(tuple(added))
    }
    encoded = {name: quantize(hf[name]) for name in hf if is_quantized(name)}
    # The scales are divided among the ranks like the values.
    for ending, field in (("", "values"), ("_scale_inv", "scales")):
        part = {name: getattr(pair, field) for name, pair in encoded.items()}
        qkv = torch.cat([rows(part[f"{ATTENTION}{x}_proj.weight"], rank) for x in "qkv"])
        assert got[f"{ATTENTION}qkv_proj.weight{ending}"] == tiled_hash(qkv)
        o_proj = columns(part[f"{ATTENTION}o_proj.weight"], rank)
        assert got[f"{ATTENTION}o_proj.weight{ending}"] == tiled_hash(o_proj)
        w13, w2 = [], []
        for expert in range(2):
            mlp = f"{EXPERTS}{expert}."
            gate_up = [part[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]
            w13.append(torch.cat([rows(matrix, rank) for matrix in gate_up]))
            w2.append(columns(part[f"{mlp}down_proj.weight"], rank))
        assert got[f"{EXPERTS}w13_weight{ending}"] == tiled_hash(torch.stack(w13))
        assert got[f"{EXPERTS}w2_weight{ending}"] == tiled_hash(torch.stack(w2))
    router = "model.layers.0.mlp.gate.weight"
    assert got[router] == tiled_hash(hf[router])


def test_a_bucket_has_values_scales_and_unquantised_tensors() -> None:
    shape = model_shape()
    hf = weights(shape)
    engine = engine_weights(shape)
    names = [f"{ATTENTION}k_proj.weight", "model.norm.weight"]  # the first one is quantised
    bucket = [(name, hf[name]) for name in names]
    encoded = engine.encode(bucket)
    values, scales = quantize(hf[names[0]])
    assert [(name, tensor.dtype) for name, tensor in encoded] == [
        (names[0], torch.float8_e4m3fn),
        (names[0] + "_scale_inv", torch.float32),
        (names[1], torch.bfloat16),
    ]
    assert torch.equal(encoded[0][1].view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(encoded[1][1], scales)
    # The shapes are known before the tensors are gathered.
    planned = engine.sent_shapes([(name, tensor.shape) for name, tensor in bucket])
    assert planned == [(name, tuple(tensor.shape)) for name, tensor in encoded]
    assert [dims for _, dims in planned] == [(256, 256), (2, 2), (256,)]


def test_an_engine_without_quantization_is_sent_the_gathered_tensors_themselves() -> None:
    shape = model_shape()
    engine = engine_weights(shape, quantized=False)
    bucket = list(weights(shape).items())
    assert all(a is b for (_, a), (_, b) in zip(engine.encode(bucket), bucket, strict=True))
    gathered = [(name, tensor.shape) for name, tensor in bucket]
    assert engine.sent_shapes(gathered) == gathered


def test_weights_that_were_not_quantised_are_no_part_of_an_update() -> None:
    shape = model_shape()
    expected = ExpectedChecksums(EngineTensors(shape, quantized=True), torch.bfloat16)
    name = f"{ATTENTION}q_proj.weight"
    with pytest.raises(IncompleteWeightsError, match=r"bfloat16, expected .*float8_e4m3fn"):
        expected.add([(name, weights(shape)[name])])
    values, _ = quantize(weights(shape)[name])
    expected = ExpectedChecksums(EngineTensors(shape, quantized=True), torch.bfloat16)
    expected.add([(name, values)])
    with pytest.raises(IncompleteWeightsError, match="never sent"):
        expected.digests([expected.partial()])


@pytest.mark.parametrize(
    ("changes", "ranks", "name", "share"),
    [
        ({"moe_ffn_hidden_size": 768}, 4, "experts.0.gate_proj.weight", "192 x 2048"),
        ({"hidden_size": 2112}, 1, "self_attn.q_proj.weight", "512 x 2112"),
        ({"head_dim": 64}, 2, "self_attn.k_proj.weight", "64 x 2048"),
    ],
)
def test_shares_that_are_no_multiple_of_a_block_are_refused(
    changes: dict[str, int], ranks: int, name: str, share: str
) -> None:
    shape = model_shape(**{"hidden_size": 2048, **changes})
    with pytest.raises(LayoutError) as refusal:
        check_block_widths(shape, EngineLayout(ranks))
    assert mentions(str(refusal.value), name, share, ranks)
    with pytest.raises(LayoutError):
        EngineTensors(shape, EngineLayout(ranks), quantized=True)
    check_block_widths(model_shape(moe_ffn_hidden_size=768), EngineLayout(2))


def test_only_matrices_of_linear_layers_and_experts_are_quantised() -> None:
    shape = model_shape(family="qwen2_moe", shared_ffn_hidden_size=256, gates_shared_expert=True)
    plain = {name for name in hf_tensors(shape) if not is_quantized(name)}
    layer = "model.layers.0."
    biases = {f"{ATTENTION}{x}_proj.bias" for x in "qkv"}
    norms = {f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"}
    gates = {f"{layer}mlp.gate.weight", f"{layer}mlp.shared_expert_gate.weight"}
    ends = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    assert plain == biases | norms | gates | ends
    # All other parameters of the engine get scales.
    engine = EngineTensors(shape, quantized=True)
    parameters = {p.name.partition("[")[0] for p in engine_parameters(shape, EngineLayout(), 0)}
    with_scales = {name for name in parameters if f"{name}_scale_inv" in engine.sizes[0]}
    assert {name.rpartition(".layers.0.")[2] for name in with_scales} == {
        "self_attn.qkv_proj.weight", "self_attn.o_proj.weight", "mlp.shared_expert.gate_up_proj.weight",
        "mlp.shared_expert.down_proj.weight", "mlp.experts.w13_weight", "mlp.experts.w2_weight",
    }  # fmt: skip
    assert engine.dtype_of(f"{EXPERTS}w2_weight", torch.bfloat16) is DTYPE


def faults(folder: Path, *overrides: str, model: dict[str, Any]) -> list[str]:
    path = write_config(folder, minimal(folder, {**MOE, **model}))
    try:
        check_config(load_config(path, ["engine.quantization=fp8", *overrides]))
    except ConfigError as error:
        return list(error.faults)
    return []


def test_a_configuration_that_servers_can_hold_is_accepted(tmp_path: Path) -> None:
    assert faults(tmp_path, "model.dtype=bfloat16", model=WIDE) == []
    assert faults(tmp_path, "model.dtype=bfloat16", "sglang.tp_size=2", model=WIDE) == []


@pytest.mark.parametrize(
    ("overrides", "model", "words"),
    [
        (["model.dtype=float32"], WIDE, ("model.dtype", "bfloat16")),
        (["model.dtype=bfloat16", "sglang.tp_size=4"], WIDE, ("gate_proj", 64, 4)),
        (["model.dtype=bfloat16"], {**WIDE, "moe_intermediate_size": 96}, ("gate_proj", 96)),
        (
            ["model.dtype=bfloat16", "lora.rank=4", "lora.update=adapters", "lora.target_modules=[o_proj]"],
            WIDE,
            ("lora.update", "merged"),
        ),
    ],
)  # fmt: skip
def test_configurations_that_servers_cannot_hold(
    tmp_path: Path, overrides: list[str], model: dict[str, Any], words: tuple[object, ...]
) -> None:
    all_faults = faults(tmp_path, *overrides, model=model)
    quantization_faults = [fault for fault in all_faults if "engine.quantization" in fault]
    assert any(mentions(fault, *words) for fault in quantization_faults), quantization_faults


@pytest.fixture
def config(tmp_path: Path) -> Any:
    """A function that loads the configuration of a wide mixture of experts with further overrides."""
    path = write_config(tmp_path, minimal(tmp_path, {**MOE, **WIDE}))
    return lambda *overrides: load_config(path, ["engine.device=cpu", *overrides])


def test_a_server_starts_with_arbitrary_weights_in_the_quantised_layout(config: Any) -> None:
    def options(*overrides: str) -> dict[str, Any]:
        servers = RunSpec.of_checked(config("model.dtype=bfloat16", *overrides)).servers
        return server_options(servers, host="h", port=1, seed=1)

    plain, fp8 = options(), options("engine.quantization=fp8")
    added = {name: value for name, value in fp8.items() if plain.get(name) != value}
    assert added.keys() == {"quantization", "load_format", "json_model_override_args"}
    assert (added["quantization"], added["load_format"]) == ("fp8", "dummy")
    scheme = json.loads(added["json_model_override_args"])["quantization_config"]
    assert (scheme["quant_method"], scheme["weight_block_size"]) == ("fp8", [128, 128])
    assert scheme["activation_scheme"] == "dynamic"
    assert plain == {name: value for name, value in fp8.items() if name not in added}


def test_keys_that_the_engine_lacks_stand_beside_the_quantised_layout(
    config: Any, tmp_path: Path
) -> None:
    model = tmp_path / "moonlight"
    model.mkdir()
    published = EXAMPLES / "model_configs" / "moonlight-16b-a3b-instruct" / "config.json"
    values = json.loads(published.read_text())
    del values["moe_layer_freq"]
    (model / "config.json").write_text(json.dumps(values))
    overrides = (f"model.hf_checkpoint={model}", "model.dtype=bfloat16", "engine.quantization=fp8")
    options = server_options(
        RunSpec.of_checked(config(*overrides)).servers, host="h", port=1, seed=1
    )
    changed_keys = json.loads(options["json_model_override_args"])
    assert changed_keys["moe_layer_freq"] == 1
    assert changed_keys.keys() == {"moe_layer_freq", "quantization_config"}


def test_servers_without_a_trainer_are_refused(config: Any) -> None:
    (fault,) = own_fleet_faults(config("engine.quantization=fp8"))
    assert mentions(fault, "engine.quantization", "fp8")


@pytest.mark.parametrize(("actual", "expected"), [("fp8", None), (None, "fp8")])
def test_a_server_of_the_other_kind_is_refused(actual: str | None, expected: str | None) -> None:
    info = {"dtype": "bfloat16", "tp_size": 1, "device": "cpu", "quantization": actual}
    with pytest.raises(EngineMismatchError) as refusal:
        check_layout("http://h", info, "bfloat16", model_shape(), expected)
    assert mentions(str(refusal.value), "quantization", str(actual), str(expected))
    check_layout("http://h", info, "bfloat16", model_shape(), actual)


def test_these_families_have_fp8_servers() -> None:
    assert {name for name, family in FAMILIES.items() if family.has_fp8_engine} == {
        *("llama", "olmoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
    }
