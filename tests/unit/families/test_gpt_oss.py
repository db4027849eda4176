"""gpt-oss: its configuration, transposed experts of checkpoints, MXFP4, attention with sinks and windows, and faults
that are planted in the engine's tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, eager_attention_forward

from megatron_dppo.checkpoint_conversion.torch_dist import open_checkpoint
from megatron_dppo.config import schema
from megatron_dppo.config.checks import engine_dtype_faults
from megatron_dppo.config.lora import adapters_of, lora_faults
from megatron_dppo.convert.quantized import mxfp4_values
from megatron_dppo.convert.streaming import hf_to_megatron, megatron_to_hf, verify
from megatron_dppo.engine.errors import EngineMismatchError
from megatron_dppo.engine.running_server import check_layout, check_placement
from megatron_dppo.model.adapters import module_groups
from megatron_dppo.model.errors import CheckpointError, ProofError
from megatron_dppo.model.families import load_model_shape, missing_engine_keys, unknown_key_warnings
from megatron_dppo.model.gather_plan import gather_plan
from megatron_dppo.model.layout import Layout, LayoutSizes, model_faults
from megatron_dppo.model.mapping import EngineLayout, Segment, engine_parameters
from megatron_dppo.model.resharding import check_tiling, prove_resharding
from megatron_dppo.model.shape import ModelShape, YarnRopeScaling, active_parameters, shape_of_json
from megatron_dppo.tensor_hash import tiled_hash
from tests.engine_digests import Fault, expected_digests, mismatched_tensors, random_weights
from tests.tiny_models import save_tiny_model, tensors_of
from tests.unit.published_configs import CONFIGS, published, refused_keys, written
from tests.unit.rank_threads import on_ranks
from tests.unit.test_trainer_config import build as build_config

NAME = "gpt-oss-20b"
PUBLISHED = CONFIGS / NAME
EXPERTS = "model.layers.0.mlp.experts."


def tiny() -> ModelShape:
    """The model with two layers and small widths."""
    shape = load_model_shape(PUBLISHED)
    assert shape.window is not None
    return replace(
        shape, num_layers=2, hidden_size=8, num_attention_heads=4, num_query_groups=2, head_dim=8, num_experts=4,
        experts_per_token=2, moe_ffn_hidden_size=4, ffn_hidden_size=4, vocab_size=64,
        window=replace(shape.window, layers=(0,)),
    )  # fmt: skip


# --- the configuration


@pytest.mark.parametrize(("name", "active"), [("gpt-oss-20b", 3.61), ("gpt-oss-120b", 5.13)])
def test_the_published_files_are_read_as_transformers_reads_them(name: str, active: float) -> None:
    shape, config = load_model_shape(CONFIGS / name), AutoConfig.from_pretrained(CONFIGS / name)
    windows = [i for i, kind in enumerate(config.layer_types) if kind == "sliding_attention"]
    assert shape.window is not None
    assert (shape.window.tokens, list(shape.window.layers)) == (config.sliding_window, windows)
    assert (shape.num_experts, shape.experts_per_token) == (
        config.num_local_experts,
        config.num_experts_per_tok,
    )
    assert shape.glu_limit == config.swiglu_limit
    assert shape.rope_theta == config.rope_parameters["rope_theta"]
    assert isinstance(shape.rope_scaling, YarnRopeScaling)
    assert not shape.rope_scaling.truncate
    # The model card states how many parameters (in 10^9) a token passes through.
    assert active_parameters(shape) / 1e9 == pytest.approx(active, abs=0.005)
    assert unknown_key_warnings(CONFIGS / name) == []
    assert missing_engine_keys(CONFIGS / name) == {}
    assert shape_of_json(json.loads(json.dumps(asdict(shape)))) == shape


def test_a_file_that_transformers_saves_is_the_same_model(tmp_path: Path) -> None:
    AutoConfig.from_pretrained(PUBLISHED).save_pretrained(tmp_path)
    assert load_model_shape(tmp_path) == load_model_shape(PUBLISHED)
    assert unknown_key_warnings(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"attention_bias": False}, "attention_bias"),
        ({"swiglu_alpha": 1.5}, "swiglu_alpha"),
        ({"experts_per_token": 8}, "experts_per_token"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"swiglu_limit": -1}, "swiglu_limit"),
        ({"clip_qkv": 8}, "clip_qkv"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "quantization_config"),
    ],
)
def test_other_values_are_refused_by_their_keys(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    assert refused_keys(tmp_path, published(NAME) | changes) == [key]


def test_experts_are_not_divided_and_have_no_adapters() -> None:
    shape = load_model_shape(PUBLISHED)
    faults = model_faults(LayoutSizes(world_size=2, tensor=2), shape)
    assert [fault.key for fault in faults] == ["expert_tensor"]
    assert not model_faults(LayoutSizes(world_size=2, tensor=2, expert=2), shape)
    groups = module_groups(shape)
    assert groups["attention"] == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert "experts" not in groups
    lora = schema.LoraConfig(rank=8, target_modules=["experts"])
    (fault,) = lora_faults(lora, LayoutSizes(world_size=1), shape, has_engines=True)
    assert fault.startswith("lora.target_modules: ")
    adapters = adapters_of(schema.LoraConfig(rank=8), shape)
    assert adapters is not None
    assert adapters.modules == groups["attention"]


def test_sequences_are_not_divided_on_gpus() -> None:
    from megatron_dppo.trainer.platform import _te_layout_faults

    shape = load_model_shape(PUBLISHED)
    assert [f.key for f in _te_layout_faults(LayoutSizes(2, context=2), shape)] == ["context"]
    assert not list(_te_layout_faults(LayoutSizes(2, tensor=2), shape))
    plain = load_model_shape(CONFIGS / "qwen3-30b-a3b")
    assert not list(_te_layout_faults(LayoutSizes(2, context=2), plain))


def test_servers_have_the_type_of_the_file() -> None:
    shape = load_model_shape(PUBLISHED)
    (fault,) = engine_dtype_faults("float32", shape)
    assert fault.startswith("model.dtype: ")
    assert not list(engine_dtype_faults("bfloat16", shape))
    assert not list(engine_dtype_faults("float32", load_model_shape(CONFIGS / "qwen3-30b-a3b")))


def test_a_server_that_would_leave_experts_unread_is_refused() -> None:
    """SGLang's own loader does not read the experts of an update. Only ``launch_server`` places them directly."""
    shape = load_model_shape(PUBLISHED)
    with pytest.raises(EngineMismatchError, match="launch_server"):
        check_placement("http://h", shape, places_directly=False)
    check_placement("http://h", shape, places_directly=True)
    plain = load_model_shape(CONFIGS / "qwen3-30b-a3b")
    check_placement("http://h", plain, places_directly=False)


@pytest.mark.parametrize(("backend", "is_refused"), [("trtllm_mha", True), ("fa3", False)])
def test_sinks_have_the_type_of_the_model(backend: str, is_refused: bool) -> None:
    """SGLang keeps sinks in float32 with the backend trtllm_mha. An update sends them in the model's type."""
    info = {
        "tp_size": 1,
        "ep_size": 1,
        "device": "cuda",
        "dtype": "bfloat16",
        "moe_runner_backend": "triton",
        "attention_backend": backend,
    }
    shape = load_model_shape(PUBLISHED)
    expected = pytest.raises(EngineMismatchError, match=backend) if is_refused else nullcontext()
    with expected:
        check_layout("http://h", info, "bfloat16", shape)


# --- checkpoints


def test_each_experts_matrix_is_read_from_the_transposed_tensor(tmp_path: Path) -> None:
    hf = save_tiny_model(tmp_path / "hf", "gpt_oss")
    stored = tensors_of(hf)
    with open_checkpoint(hf) as reader:
        reader.check(load_model_shape(hf))
        for expert in (0, 5):
            up = stored[f"{EXPERTS}gate_up_proj"][expert].t()
            name = f"{EXPERTS}{expert}.gate_up_proj.weight"
            assert torch.equal(reader.read(name), up)
            assert torch.equal(reader.read(name, 1, 8, 24), up[:, 8:32])
            assert torch.equal(reader.read_rows(name, 7, 9), up[7:16])
            bias = stored[f"{EXPERTS}down_proj_bias"][expert]
            assert torch.equal(reader.read(f"{EXPERTS}{expert}.down_proj.bias"), bias)


def test_gates_are_before_ups_in_the_trainer() -> None:
    plan = {t.name: t for t in gather_plan(tiny(), Layout())}
    pieces = plan[f"{EXPERTS}1.gate_up_proj.weight"].pieces
    whole = torch.arange(8.0)
    assert [p.segment.of_hf(whole).tolist() for p in pieces] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert [p.segment.local_start for p in pieces] == [0, 4]


@pytest.mark.parametrize(
    "segments",
    [
        [(0, 4, 2)],
        [(0, 4, 2), (0, 4, 2)],
        [(0, 4, 2), (1, 3, 2)],
        [(0, 4, 2), (4, 4, 1)],
        [(0, 2, 2), (6, 1, 2), (1, 4, 2)],
    ],
)
def test_steps_that_do_not_cover_a_tensor_are_found(segments: list[tuple[int, int, int]]) -> None:
    blocks = [Segment("w", 0, start, 0, length, step) for start, length, step in segments]
    with pytest.raises(ProofError):
        check_tiling("w", (8, 2), blocks)


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_element_moves_once_into_the_engine(ranks: int) -> None:
    report = prove_resharding(tiny(), Layout.smallest(2, 1, None, 2, 1), EngineLayout(ranks))
    assert sum(report.holds) == report.model_bytes


# --- MXFP4


def test_mxfp4_by_hand() -> None:
    # 0x21 is 0.5 (low bits 1) and 1.0 (high bits 2); 0xF7 is 6.0 and -6.0; 0x98 is -0.0 and -0.5.
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0xF7, 0x98], dtype=torch.uint8)
    blocks[0, 1, 15] = 0x53
    values = mxfp4_values(blocks, torch.tensor([[127, 130]], dtype=torch.uint8))
    assert values.shape == (1, 64)
    assert values[0, :6].tolist() == [0.5, 1.0, 6.0, -6.0, -0.0, -0.5]
    assert math.copysign(1, values[0, 4]) == -1
    # The second block has the factor 2^3, and ends with 1.5 and 3.0.
    assert values[0, 62:].tolist() == [12.0, 24.0]
    assert not values[0, 6:62].any()


def save_quantized_model(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """Save a tiny model with random MXFP4 experts. Return its folder, and the tensors by transformers."""
    hf = save_tiny_model(folder, "gpt_oss", dtype=torch.bfloat16)
    tensors = tensors_of(hf)
    plain = dict(tensors)
    generator = torch.Generator().manual_seed(0)
    for name in list(tensors):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
            scales = torch.randint(118, 124, shape, generator=generator).to(torch.uint8)
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"] = blocks, scales
            plain[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((hf / "config.json").read_text())
    written(hf, config | {"quantization_config": {"quant_method": "mxfp4"}})
    return hf, plain


def test_mxfp4_is_converted_to_what_transformers_makes_of_it(tmp_path: Path) -> None:
    hf, expected = save_quantized_model(tmp_path / "hf")
    hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")
    verify(hf, tmp_path / "m")
    megatron_to_hf(tmp_path / "m", tmp_path / "back")
    tensors = tensors_of(tmp_path / "back")
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    load_model_shape(tmp_path / "back")


def test_mxfp4_needs_a_type_and_its_scales(tmp_path: Path) -> None:
    hf, _ = save_quantized_model(tmp_path / "hf")
    with pytest.raises(CheckpointError, match="--dtype"):
        hf_to_megatron(hf, tmp_path / "m")
    tensors = tensors_of(hf)
    del tensors[f"{EXPERTS}down_proj_scales"]
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_scales"):
        hf_to_megatron(hf, tmp_path / "m", dtype="bfloat16")


# --- arithmetic


def published_rope(**changes: Any) -> dict[str, Any]:
    """Return the published file with other numbers of YaRN."""
    values = published(NAME)
    return values | {"rope_scaling": values["rope_scaling"] | changes}


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("factor", "original"), [(32.0, 4096), (8.0, 256)])
@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 3.0)])
def test_yarn_is_that_of_transformers(
    tmp_path: Path, truncate: bool, factor: float, original: int, fast: float, slow: float
) -> None:
    from megatron_dppo.trainer.model import yarn_frequencies

    numbers = {
        "factor": factor,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": truncate,
        "original_max_position_embeddings": original,
    }
    folder = written(tmp_path, published_rope(**numbers))
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.from_pretrained(folder))
    plain = 1.0 / (150000.0 ** (torch.arange(0, 64, 2, dtype=torch.float) / 64))
    yarn = load_model_shape(folder).rope_scaling
    assert isinstance(yarn, YarnRopeScaling)
    frequencies = yarn_frequencies(plain, 150000.0, yarn)
    torch.testing.assert_close(frequencies, expected, atol=0, rtol=1e-6)
    assert yarn.rotated_factor == pytest.approx(attention_factor, rel=1e-12)


def attention_of_layer(folder: Path, layer: int) -> tuple[Any, GptOssAttention]:
    """Return the trainer's attention core of ``layer``, and transformers' attention with the same sinks."""
    from megatron_dppo.cpu.torch_layers import TorchAttention

    shape, config = load_model_shape(folder), AutoConfig.from_pretrained(folder)
    transformer = build_config(shape, {})
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(tp=one_rank, cp=one_rank)
    scale = transformer.softmax_scale
    core = TorchAttention(transformer, layer + 1, None, "self", scale, pg_collection=groups)
    reference = GptOssAttention(config, layer).eval()
    assert core.softmax_offset is not None
    torch.manual_seed(0)
    core.softmax_offset.data.normal_()
    reference.sinks.data.copy_(core.softmax_offset.data)
    return core, reference


@pytest.fixture
def small_folder(tmp_path: Path) -> Path:
    """A folder with the config.json of a model with small widths, two layers, and a window of three tokens."""
    sizes = {
        "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "sliding_window": 3, "layer_types": published(NAME)["layer_types"][:2],
    }  # fmt: skip
    return written(tmp_path, published(NAME) | sizes)


@pytest.mark.parametrize("layer", [0, 1])
def test_each_layer_has_the_window_sinks_and_scale_of_transformers(
    small_folder: Path, layer: int
) -> None:
    core, reference = attention_of_layer(small_folder, layer)
    q, k, v = (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    packed = SimpleNamespace(cu_seqlens_q=torch.tensor([0, 9], dtype=torch.int32))
    output = core(q, k, v, None, packed_seq_params=packed)
    _, factor = ROPE_INIT_FUNCTIONS["yarn"](reference.config)
    window = reference.sliding_window
    is_visible: Any = (
        sliding_window_causal_mask_function(window) if window else causal_mask_function
    )
    positions = torch.arange(9)
    visible = is_visible(0, 0, positions[:, None], positions)
    mask = torch.zeros(9, 9).masked_fill(~visible, -math.inf)
    query, key, value = (x.transpose(0, 1)[None] for x in (factor * q, factor * k, v))
    expected, _ = eager_attention_forward(reference, query, key, value, mask, reference.scaling)
    torch.testing.assert_close(output, expected[0].flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_context_parallel_ranks_have_the_sinks_of_their_heads(
    small_folder: Path, layer: int
) -> None:
    from megatron_dppo.trainer.context_parallel import own_rows

    core, _ = attention_of_layer(small_folder, layer)
    cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
    inputs = [torch.randn(12, heads, 8) for heads in (4, 2, 2)]
    direction = torch.randn(12, 32)
    packed = SimpleNamespace(cu_seqlens_q=cu_seqlens)
    whole = core(*inputs, None, packed_seq_params=packed)
    whole.backward(direction)
    cores = [attention_of_layer(small_folder, layer)[0] for _ in range(2)]

    def run(group: torch.distributed.ProcessGroup) -> Tensor:
        rows = own_rows(cu_seqlens, 12, 2, group.rank())
        own_core = cores[group.rank()]
        own_core.context_group = group
        packed = SimpleNamespace(cu_seqlens_q=cu_seqlens.clone())
        own_inputs = [x[rows] for x in inputs]
        output = own_core(*own_inputs, None, packed_seq_params=packed)
        torch.testing.assert_close(output, whole[rows])
        output.backward(direction[rows])
        return own_core.softmax_offset.grad

    gradients = on_ranks(2, run)
    torch.testing.assert_close(sum(gradients), core.softmax_offset.grad)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_attention_of_packs_has_sinks_and_windows(window: int | None, has_sinks: bool) -> None:
    from megatron_dppo.cpu.torch_layers import packed_attention_with_sinks
    from megatron_dppo.trainer.padded_batches import padding_plan

    torch.manual_seed(0)
    starts = [0, 5, 6, 13]
    q, k, v = (torch.randn(13, heads, 8, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, requires_grad=True) if has_sinks else None
    plan = padding_plan(torch.tensor(starts, dtype=torch.int32))
    output = packed_attention_with_sinks(q, k, v, plan, 0.3, sinks, window)
    rows = []
    for token in range(13):
        start = max(s for s in starts if s <= token)
        first = start if window is None else max(start, token - window + 1)
        heads = []
        for head in range(4):
            logits = 0.3 * (k[first : token + 1, head // 2] @ q[token, head])
            weights = logits.exp()
            total = weights.sum() + (sinks[head].exp() if sinks is not None else 0)
            heads.append((weights / total) @ v[first : token + 1, head // 2])
        rows.append(torch.stack(heads))
    expected = torch.stack(rows)
    torch.testing.assert_close(output, expected, atol=1e-6, rtol=1e-5)
    inputs = [q, k, v] if sinks is None else [q, k, v, sinks]
    direction = torch.randn_like(expected)
    gradients = (torch.autograd.grad(o, inputs, direction) for o in (output, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_causal", [True, False])
def test_the_engines_attention_has_the_same_sinks(is_causal: bool) -> None:
    from megatron_dppo.families.gpt_oss import cpu_engine

    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 6, 8) for heads in (4, 2, 2))
    sinks = torch.randn(4)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    options: dict[str, Any] = {"is_causal": True} if is_causal else {"attn_mask": mask}

    def attend(**_: Any) -> Tensor:
        return cpu_engine.attend(query, key, value, scale=0.3, enable_gqa=True, **options)

    output = cpu_engine._with_sinks(attend)(sinks=sinks)
    logits = 0.3 * query @ key.repeat_interleave(2, 1).transpose(2, 3)
    weights = logits.exp() * mask
    shares = weights / (weights.sum(-1, keepdim=True) + sinks.exp().view(1, 4, 1, 1))
    torch.testing.assert_close(output, shares @ value.repeat_interleave(2, 1))
    # A layer with sinks must not change the attention of layers without sinks.
    plain = attend()
    expected = (weights / weights.sum(-1, keepdim=True)) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(plain, expected)


# --- planted faults


def engine_experts(hf: Mapping[str, Tensor], layer: int = 0) -> dict[str, Tensor]:
    """The expert tensors of a layer, with SGLang's names, as its loader builds them from a checkpoint's tensors."""
    prefix = f"model.layers.{layer}.mlp.experts."

    def stacked(name: str) -> Tensor:
        return torch.stack([hf[f"{prefix}{expert}.{name}"] for expert in range(4)])

    return {
        f"{prefix}w13_weight": stacked("gate_up_proj.weight"),
        f"{prefix}w13_weight_bias": stacked("gate_up_proj.bias").float(),
        f"{prefix}w2_weight": stacked("down_proj.weight"),
        f"{prefix}w2_weight_bias": stacked("down_proj.bias").float(),
    }


def engine_tensors(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of layer 0 as SGLang's loader builds them in a bfloat16 model on one rank."""
    layer = "model.layers.0."
    tensors = engine_experts(hf)
    for name in (
        "self_attn.sinks",
        "self_attn.o_proj.bias",
        "mlp.router.weight",
        "mlp.router.bias",
    ):
        tensors[layer + name] = hf[layer + name]
    tensors[f"{layer}self_attn.qkv_proj.bias"] = torch.cat(
        [hf[f"{layer}self_attn.{part}_proj.bias"] for part in "qkv"]
    )
    return tensors


def with_expert_of_layer_1(held: Tensor, hf: Mapping[str, Tensor]) -> Tensor:
    other = engine_experts(hf, 1)["model.layers.1.mlp.experts.w13_weight"]
    return torch.cat([held[:3], other[3:]])


SINKS = "model.layers.{}.self_attn.sinks"
FAULTS: dict[str, Fault] = {
    "gates before ups": (
        f"{EXPERTS}w13_weight", lambda held, hf: torch.cat([held[:, ::2], held[:, 1::2]], 1),
    ),
    "ups before gates in the bias": (
        f"{EXPERTS}w13_weight_bias", lambda held, hf: held.view(4, -1, 2).flip(-1).reshape(4, -1),
    ),
    "a matrix that is not transposed": (
        f"{EXPERTS}w2_weight", lambda held, hf: held.transpose(1, 2).contiguous(),
    ),
    "the bias of another expert": (
        f"{EXPERTS}w2_weight_bias", lambda held, hf: held[[0, 2, 1, 3]],
    ),
    "an expert of another layer": (f"{EXPERTS}w13_weight", with_expert_of_layer_1),
    "sinks of the update before": (SINKS.format(0), lambda held, hf: held + 1),
    "sinks of another layer": (SINKS.format(0), lambda held, hf: hf[SINKS.format(1)]),
    "a router without its bias": (
        "model.layers.0.mlp.router.bias", lambda held, hf: torch.zeros_like(held),
    ),
    "an output without its bias": (
        "model.layers.0.self_attn.o_proj.bias", lambda held, hf: torch.zeros_like(held),
    ),
}  # fmt: skip
"""Changes a tensor of the engine, and returns its name. Arguments: the engine's tensors, the Hugging Face tensors."""


def test_the_checksums_are_those_of_what_sglang_builds() -> None:
    hf = random_weights(tiny())
    assert mismatched_tensors(tiny(), hf, engine_tensors(hf)) == []


@pytest.mark.parametrize(("name", "change"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(name: str, change: Any) -> None:
    hf = random_weights(tiny())
    engine = engine_tensors(hf)
    engine[name] = change(engine[name], hf)
    assert mismatched_tensors(tiny(), hf, engine) == [name]


def test_a_second_rank_adds_no_bias_to_a_sum() -> None:
    """Ranks add up the outputs of their parts of an expert, so only one of them may add the bias."""
    parameters = [
        {p.name: p for p in engine_parameters(tiny(), EngineLayout(2), rank)} for rank in (0, 1)
    ]
    biases = [rank[f"{EXPERTS}w2_weight_bias[1]"] for rank in parameters]
    assert [len(p.segments) for p in biases] == [1, 0]
    assert biases[0].shape == biases[1].shape == (8,)
    inputs = parameters[1][f"{EXPERTS}w13_weight_bias[1]"]
    # A rank has whole pairs of a gate row and an up row.
    assert [(s.hf_start, s.length, s.hf_step) for s in inputs.segments] == [(4, 4, 1)]
    sinks = parameters[1]["model.layers.0.self_attn.sinks"]
    assert [(s.hf_start, s.length) for s in sinks.segments] == [(2, 2)]
    hf = random_weights(tiny())
    _, second = expected_digests(tiny(), hf, ranks=2)
    zeros = torch.zeros(4, 8)
    assert second[f"{EXPERTS}w2_weight_bias"] == tiled_hash(zeros)
