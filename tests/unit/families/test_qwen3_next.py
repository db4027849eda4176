"""Models with delta nets (Qwen3-Next): their config.json, their active parameters, their layouts, their tensors in the
engine, and their arithmetic on packed sequences."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextGatedDeltaNet,
    l2norm,
    torch_recurrent_gated_delta_rule,
)

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.config.checks import engine_split_faults
from megatron_dppo.families.shared.delta_net import cpu_engine as engine_delta_net
from megatron_dppo.families.shared.delta_net.trainer import (
    PackedDeltaNet,
    delta_net_spec,
    packed_convolution,
    packed_delta_rule,
)
from megatron_dppo.model.engine_layout import EngineLayout, check_engine_layout
from megatron_dppo.model.errors import LayoutError
from megatron_dppo.model.families import (
    FAMILIES,
    load_model_shape,
    missing_engine_keys,
    unknown_key_warnings,
)
from megatron_dppo.model.layout import Layout, LayoutSizes, model_faults
from megatron_dppo.model.mapping import (
    carried_names,
    engine_parameters,
    hf_tensors,
    local_parameters,
)
from megatron_dppo.model.resharding import prove_resharding
from megatron_dppo.model.shape import ModelShape, active_parameters, shape_of_json
from tests.engine_digests import Fault, expected_digests, mismatched_tensors, random_weights
from tests.unit.published_configs import CONFIGS, published, refused_keys
from tests.unit.test_trainer_config import build as build_config

NAME = "qwen3-next-80b-a3b-instruct"
NEXT = CONFIGS / NAME


def tiny_shape(name: Path = NEXT) -> ModelShape:
    """Return the shape of the model with four layers and small widths."""
    shape = load_model_shape(name)
    assert shape.delta is not None
    delta = replace(shape.delta, key_heads=2, value_heads=4, key_size=4, value_size=6)
    return replace(
        shape, num_layers=4, hidden_size=8, num_attention_heads=4, head_dim=8, num_experts=4,
        experts_per_token=2, moe_ffn_hidden_size=4, shared_ffn_hidden_size=4, vocab_size=64, delta=delta,
    )  # fmt: skip


def test_a_published_config_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    shape, config = load_model_shape(NEXT), AutoConfig.from_pretrained(NEXT)
    layers = {"linear_attention": [], "full_attention": []}
    for layer, kind in enumerate(config.layer_types):
        layers[kind].append(layer)
    assert list(shape.delta_layers) == layers["linear_attention"]
    assert shape.attention_layers == len(layers["full_attention"])
    assert shape.delta is not None
    assert (shape.delta.key_heads, shape.delta.value_heads) == (
        config.linear_num_key_heads,
        config.linear_num_value_heads,
    )
    assert shape.rotary_fraction == config.rope_parameters["partial_rotary_factor"]
    assert unknown_key_warnings(NEXT) == []
    assert missing_engine_keys(NEXT) == {}
    # A file that transformers 5 saves lacks keys that SGLang reads.
    config.save_pretrained(tmp_path)
    assert load_model_shape(tmp_path) == shape
    assert unknown_key_warnings(tmp_path) == []
    assert missing_engine_keys(tmp_path)["full_attention_interval"] == 4


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"layer_types": ["full_attention"] * 48}, "layer_types"),
        ({"full_attention_interval": 3, "layer_types": ["linear_attention"] * 48}, "layer_types"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step"),
        ({"mlp_only_layers": [1]}, "mlp_only_layers"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type"),
        ({"linear_num_value_heads": 24}, "linear_num_value_heads"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling"),
    ],
)
def test_what_would_be_trained_otherwise_is_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    assert key in refused_keys(tmp_path, published(NAME) | changes)


def test_checkpoints_carry_the_layer_that_predicts_further_tokens() -> None:
    names = ["mtp.fc.weight", "mtp.layers.0.mlp.experts.0.up_proj.weight", "model.norm.weight", "x"]
    assert carried_names(tiny_shape(), names) == names[:2]


def test_a_shape_survives_json() -> None:
    shape = load_model_shape(NEXT)
    values = json.loads(json.dumps(shape, default=vars))
    assert shape_of_json(values) == shape


def test_active_parameters_are_those_of_the_tensors() -> None:
    """They are the matrices and convolutions that multiply a token. Of the experts, only the chosen ones count."""
    shape = load_model_shape(NEXT)
    embedding = FAMILIES[shape.family].embedding.sources[0].name
    expected = 0
    for tensor, dims in hf_tensors(shape).items():
        if len(dims) > 1 and tensor != embedding:
            size = torch.Size(dims).numel()
            if ".experts." in tensor:
                size = size * shape.experts_per_token // shape.num_experts
            expected += size
    assert active_parameters(shape) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"world_size": 2, "context": 2}, "context"),
        # Megatron-Core does not divide the gate if a rank has only a part of a key-value head.
        ({"world_size": 4, "tensor": 4}, "tensor"),
    ],
)
def test_a_layout_that_megatron_cannot_train_is_refused_by_its_key(
    sizes: dict[str, Any], key: str
) -> None:
    shape = load_model_shape(NEXT)
    faults = model_faults(LayoutSizes(**sizes), shape)
    assert key in {fault.key for fault in faults}
    assert not model_faults(LayoutSizes(world_size=8, tensor=2, expert=8, expert_tensor=1), shape)


def test_servers_divide_the_heads_of_delta_nets() -> None:
    shape = load_model_shape(NEXT)
    assert shape.delta is not None
    assert list(engine_split_faults({"tp_size": 8}, shape)) == []
    odd = replace(shape, delta=replace(shape.delta, key_heads=4))
    (fault,) = engine_split_faults({"tp_size": 8}, odd)
    assert fault.startswith("sglang.tp_size: ")
    with pytest.raises(LayoutError):
        check_engine_layout(odd, EngineLayout(8))


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_element_moves_once_into_the_engine(ranks: int) -> None:
    layout = Layout.smallest(2, 1, None, 2, 1)
    report = prove_resharding(tiny_shape(), layout, EngineLayout(ranks))
    assert sum(report.holds) == report.model_bytes


# --- planted faults


def weights(shape: ModelShape) -> dict[str, Tensor]:
    return random_weights(shape, float32_ends=("linear_attn.norm.weight",))


def engine_tensors(hf: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors of layers 0 (a delta net) and 3 (attention), as SGLang's loader builds them in bfloat16."""
    delta, attention = "model.layers.0.linear_attn.", "model.layers.3."
    tensors = {
        f"{delta}{name}": hf[f"{delta}{name}"]
        for name in (
            "in_proj_qkvz.weight",
            "in_proj_ba.weight",
            "conv1d.weight",
            "dt_bias",
            "A_log",
        )
    }
    tensors[f"{delta}A_log"] = tensors[f"{delta}A_log"].float()
    tensors[f"{delta}norm.weight"] = hf[f"{delta}norm.weight"].bfloat16()
    parts = [hf[f"{attention}self_attn.{part}_proj.weight"] for part in "qkv"]
    tensors[f"{attention}qkv_proj.weight"] = torch.cat(parts)
    norms = {
        f"{attention}q_norm": f"{attention}self_attn.q_norm",
        "model.layers.0.input_layernorm": "model.layers.0.input_layernorm",
        "model.norm": "model.norm",
    }
    for engine_name, hf_name in norms.items():
        tensors[f"{engine_name}.weight"] = hf[f"{hf_name}.weight"]
        tensors[f"{engine_name}.gemma_weight"] = hf[f"{hf_name}.weight"].clone().add_(1.0)
    return tensors


def with_values_and_gates_swapped(held: Tensor, hf: Mapping[str, Tensor]) -> Tensor:
    """Swap the values and the gates of each key head."""
    heads = held.view(2, 2 * 4 + 2 * 12, -1)
    q_and_k, values, gates = heads.split([8, 12, 12], 1)
    return torch.cat([q_and_k, gates, values], 1).reshape_as(held)


def with_the_gate_first(held: Tensor, hf: Mapping[str, Tensor]) -> Tensor:
    rows = len(hf["model.layers.3.self_attn.q_proj.weight"])
    queries = held[:rows].view(4, 2, 8, -1).flip(1).reshape(rows, -1)
    return torch.cat([queries, held[rows:]])


DELTA = "model.layers.0.linear_attn."
FAULTS: dict[str, Fault] = {
    "1 + weight of the update before": (
        "model.layers.0.input_layernorm.gemma_weight", lambda held, hf: torch.ones_like(held),
    ),
    "a norm without its 1": (
        "model.norm.gemma_weight", lambda held, hf: hf["model.norm.weight"],
    ),
    "values and gates swapped": (f"{DELTA}in_proj_qkvz.weight", with_values_and_gates_swapped),
    "two numbers of a head swapped": (
        f"{DELTA}in_proj_ba.weight",
        lambda held, hf: held.view(2, 2, 2, -1).flip(1).reshape_as(held),
    ),
    "a rounded decay": (f"{DELTA}A_log", lambda held, hf: held.bfloat16()),
    "the gate before the query": ("model.layers.3.qkv_proj.weight", with_the_gate_first),
}  # fmt: skip


def test_the_checksums_are_those_of_what_sglang_builds() -> None:
    hf = weights(tiny_shape())
    assert mismatched_tensors(tiny_shape(), hf, engine_tensors(hf)) == []
    (digests,) = expected_digests(tiny_shape(), hf)
    assert not [name for name in digests if ".self_attn." in name]


@pytest.mark.parametrize(("name", "change"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_named(name: str, change: Any) -> None:
    hf = weights(tiny_shape())
    engine = engine_tensors(hf)
    engine[name] = change(engine[name], hf)
    assert mismatched_tensors(tiny_shape(), hf, engine) == [name]


# --- arithmetic

LENGTHS = (5, 1, 70, 3)
BOUNDS = torch.tensor([0, 5, 6, 76, 79], dtype=torch.int32)


def inputs() -> tuple[Tensor, ...]:
    """Return query, key (both normalised), value, g (the log of the decay) and beta of a pack, in float32."""
    torch.manual_seed(1)
    tokens, heads = sum(LENGTHS), 2
    query, key = (
        torch.nn.functional.normalize(torch.randn(tokens, heads, 4), dim=-1) for _ in "qk"
    )
    value = torch.randn(tokens, heads, 6)
    return query, key, value, -torch.rand(tokens, heads), torch.rand(tokens, heads)


def test_the_state_of_a_delta_net_begins_anew_at_every_sequence() -> None:
    """The engine's rule, token by token on each sequence alone, gives the same outputs."""
    q, k, v, g, beta = inputs()
    found = packed_delta_rule(q, k, v, g, beta, BOUNDS)
    start = 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        arguments = [*(x[rows] for x in (q, k, v, g, beta)), torch.zeros(2, 6, 4)]
        expected, _ = engine_delta_net.delta_rule(*arguments)
        torch.testing.assert_close(found[rows], expected, atol=1e-5, rtol=1e-5)
        start += length


def test_a_sequence_of_a_pack_has_no_gradient_from_the_others() -> None:
    tensors = [x.requires_grad_() for x in inputs()]
    packed_delta_rule(*[*tensors, BOUNDS])[6:76].square().sum().backward()
    for tensor in tensors:
        assert tensor.grad is not None
        assert tensor.grad[6:76].abs().sum() > 0
        assert tensor.grad[:6].abs().sum() == tensor.grad[76:].abs().sum() == 0


class LocalLinear(torch.nn.Linear):
    """The part of a linear of one tensor-parallel rank: of its outputs, or of its inputs. It has no communication."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        tp_group: Any,
        input_is_parallel: bool = False,
        **_: Any,
    ) -> None:
        ranks = tp_group.size()
        if input_is_parallel:
            super().__init__(input_size // ranks, output_size, bias=False)
        else:
            super().__init__(input_size, output_size // ranks, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return super().forward(x), None


def delta_net_of_rank(
    shape: ModelShape, hf: dict[str, Tensor], rank: int, ranks: int
) -> PackedDeltaNet:
    """Return the first layer's delta net of a tensor-parallel rank, with weights by the rules of conversion."""
    run = build_config(shape, {"world_size": ranks, "tensor": ranks})
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: rank)
    net = PackedDeltaNet(
        replace(run, perform_initialization=False),
        delta_net_spec(LocalLinear, LocalLinear).submodules,
        layer_number=1,
        pg_collection=SimpleNamespace(tp=group),
    )
    parameters = dict(net.named_parameters())
    prefix = "decoder.layers.0.self_attention."
    layout = Layout.of(LayoutSizes(world_size=ranks, tensor=ranks))
    for entry in local_parameters(shape, layout, rank):
        parameter = parameters.get(entry.name.removeprefix(prefix))
        if parameter is None or not entry.name.startswith(prefix):
            continue
        del parameters[entry.name.removeprefix(prefix)]
        for segment in entry.segments:
            segment.of_local(parameter.data).copy_(segment.of_hf(hf[segment.hf_name]))
    assert not parameters
    return net


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_of_a_delta_net_add_up_to_transformers(ranks: int) -> None:
    """Every value head has a rate, a gate and values of its own, and uses the query and key of its own key head."""
    torch.manual_seed(4)
    shape = tiny_shape()
    delta = shape.delta
    assert delta is not None
    config = Qwen3NextConfig(
        hidden_size=shape.hidden_size, rms_norm_eps=shape.norm_eps, linear_num_key_heads=delta.key_heads,
        linear_num_value_heads=delta.value_heads, linear_key_head_dim=delta.key_size,
        linear_value_head_dim=delta.value_size, linear_conv_kernel_dim=delta.kernel_size,
    )  # fmt: skip
    reference = Qwen3NextGatedDeltaNet(config, 0)
    hf = {}
    for name, parameter in reference.named_parameters():
        torch.nn.init.normal_(parameter)
        hf[f"model.layers.0.linear_attn.{name}"] = parameter.detach()
    x = torch.randn(sum(LENGTHS), shape.hidden_size)
    expected = torch.cat([reference(part[None])[0] for part in x.split(LENGTHS)])
    packed = SimpleNamespace(cu_seqlens_q=BOUNDS)
    outputs = []
    for rank in range(ranks):
        net = delta_net_of_rank(shape, hf, rank, ranks)
        output, _ = net(x[:, None], packed_seq_params=packed)
        outputs.append(output[:, 0])
    torch.testing.assert_close(sum(outputs), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [1e-4, 1e-3, 1.0])
def test_the_norm_of_a_small_key_is_that_of_transformers(size: float) -> None:
    """Epsilon is added to the square of the norm."""
    torch.manual_seed(5)
    x: Any = size * torch.randn(3, 2 * 4)
    net: Any = SimpleNamespace(key_head_dim=4, num_key_heads=2, num_value_heads=4)
    found = PackedDeltaNet._key_heads(net, x)
    expected = l2norm(x.view(3, 2, 4)).repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(engine_delta_net._unit(x.view(3, 2, 4)), expected[:, ::2])


def test_the_convolution_sees_no_token_of_another_sequence() -> None:
    torch.manual_seed(2)
    x, weight = torch.randn(sum(LENGTHS), 6), torch.randn(6, 1, 4)
    found = packed_convolution(x, weight, BOUNDS)
    start = 0
    for length in LENGTHS:
        padded = torch.nn.functional.pad(x[start : start + length].T[None], (3, 0))
        sums = torch.nn.functional.conv1d(padded, weight, groups=6)[0].T
        expected = torch.nn.functional.silu(sums)
        torch.testing.assert_close(found[start : start + length], expected)
        start += length


def test_the_engine_splits_products_by_key_head_as_transformers_does() -> None:
    torch.manual_seed(6)
    sizes: Any = SimpleNamespace(num_k_heads=2, num_v_heads=4, head_k_dim=3, head_v_dim=5)
    qkvz, ba = torch.randn(7, 2 * 2 * 3 + 2 * 4 * 5), torch.randn(7, 2 * 4)
    found = engine_delta_net.split_by_head(qkvz, ba, 2, 4, 3, 5)
    q, k, v, z, b, a = (
        part[0]
        for part in Qwen3NextGatedDeltaNet.fix_query_key_value_ordering(sizes, qkvz[None], ba[None])
    )
    mixed = torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], 1)
    for own, expected in zip(found, (mixed, z, b, a), strict=True):
        assert torch.equal(own, expected)
    # Products by section are the same parts side by side.
    by_section = torch.cat([mixed, z.flatten(1)], 1), torch.cat([b, a], 1)
    for own, expected in zip(
        engine_delta_net.split_by_section(*by_section, 2, 4, 3, 5), found, strict=True
    ):
        assert torch.equal(own, expected)


def test_the_engines_value_heads_have_the_key_heads_of_transformers() -> None:
    """Value heads 0 and 1 have key head 0, and value heads 2 and 3 have key head 1."""
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, 7, *sizes) for sizes in ((2, 4), (2, 4), (4, 6)))
    log_decay, beta = -torch.rand(1, 7, 4), torch.rand(1, 7, 4)
    output, state = engine_delta_net.delta_rule(
        q[0], k[0], v[0], log_decay[0], beta[0], torch.zeros(4, 6, 4)
    )
    repeated = (x.repeat_interleave(2, 2) for x in (q, k))
    expected, expected_state = torch_recurrent_gated_delta_rule(
        *repeated, v, log_decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    torch.testing.assert_close(output, expected[0])
    torch.testing.assert_close(state, expected_state[0].transpose(1, 2))


def test_the_engine_decodes_as_it_reads_prompts() -> None:
    """A prompt in two chunks and then tokens one by one have the results of all tokens at once."""
    torch.manual_seed(3)
    tokens, slot = 9, torch.tensor([1])
    x, weight = torch.randn(6, tokens), torch.randn(6, 4)
    q, k, v = (
        torch.randn(1, tokens, 1, 4),
        torch.randn(1, tokens, 1, 4),
        torch.randn(1, tokens, 2, 6),
    )
    a, b, rates, bias = torch.randn(tokens, 2), torch.randn(tokens, 2), torch.rand(2), torch.rand(2)

    def run_engine(steps: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        conv_states, states = torch.zeros(2, 6, 3), torch.zeros(2, 2, 6, 4)
        convolved, outputs = [], []
        for start, end in steps:
            if end - start == 1:
                convolved.append(
                    engine_delta_net.convolve_next(
                        x[:, start:end].T, conv_states, weight, conv_state_indices=slot
                    ).T
                )
                outputs.append(
                    engine_delta_net.decode(
                        None, q[:, start:end], k[:, start:end], v[:, start:end], a[start:end], b[start:end],
                        A_log=rates, dt_bias=bias, ssm_states=states, cache_indices=slot,
                        query_start_loc=None,
                    )
                )  # fmt: skip
                continue
            bounds = torch.tensor([0, end - start])
            convolved.append(
                engine_delta_net.convolve_prompts(
                    x[:, start:end], weight, None, conv_states=conv_states, cache_indices=slot,
                    has_initial_state=torch.tensor([start > 0]), query_start_loc=bounds,
                )
            )  # fmt: skip
            g, beta = engine_delta_net.gating(rates, a[start:end], b[start:end], bias)
            output, _, _ = engine_delta_net.extend(
                None, q[:, start:end], k[:, start:end], v[:, start:end], g, beta,
                ssm_states=states, cache_indices=slot, query_start_loc=bounds,
            )  # fmt: skip
            outputs.append(output)
        return torch.cat(convolved, 1), torch.cat(outputs, 1)

    at_once, in_steps = run_engine([(0, 9)]), run_engine([(0, 4), (4, 7), (7, 8), (8, 9)])
    for expected, found in zip(at_once, in_steps, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_engine_keeps_states_and_names_without_its_attention_block() -> None:
    parameters = {p.name: p for p in engine_parameters(tiny_shape(), EngineLayout(2), 1)}
    assert parameters["model.layers.0.linear_attn.conv1d.weight"].shape == (2 * 4 + 12, 1, 4)
    assert parameters["model.layers.0.linear_attn.in_proj_qkvz.weight"].shape == (32, 8)
    assert parameters["model.layers.0.linear_attn.A_log"].dtype == "float32"
    # SGLang makes this norm in the dtype of config.json, even if its weight in the checkpoint has another dtype.
    assert parameters["model.layers.0.linear_attn.norm.weight"].dtype == "bfloat16"
    as_float32 = engine_parameters(replace(tiny_shape(), dtype="float32"), EngineLayout(1), 0)
    types = {p.name: p.dtype for p in as_float32}
    assert types["model.layers.0.linear_attn.norm.weight"] == "float32"
    assert parameters["model.layers.3.qkv_proj.weight"].shape == (2 * 2 * 8 + 2 * 8, 8)
