"""The ``megatron:`` and ``sglang:`` tables against the libraries' own fields, and against our own
sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from megatron_dppo.config.expectations import closest, given
from megatron_dppo.config.library_fields import (
    LibraryFields,
    LibraryMissingError,
    server_args_fields,
    transformer_config_fields,
    value_problem,
)

_CHECKPOINT = "model.hf_checkpoint's config.json"

MEGATRON_OWNED: Mapping[str, str] = {
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "expert_model_parallel_size": "parallel.expert",
    "expert_tensor_parallel_size": "parallel.expert_tensor",
    "sequence_parallel": "parallel.sequence",
    "params_dtype": "model.dtype",
    "pipeline_dtype": "model.dtype",
    "autocast_dtype": "model.dtype",
    "enable_autocast": "model.dtype",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
    "recompute_granularity": "training.recompute",
    "moe_enable_routing_replay": "rollout.router_replay",
    **dict.fromkeys(
        (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_query_groups",
            "kv_channels",
            "normalization",
            "layernorm_epsilon",
            "qk_layernorm",
            "add_qkv_bias",
            "add_bias_linear",
            "gated_linear_unit",
            "activation_func",
            "num_moe_experts",
            "moe_router_topk",
            "moe_ffn_hidden_size",
            "moe_router_pre_softmax",
            "moe_router_score_function",
        ),
        _CHECKPOINT,
    ),
}
"""Field of TransformerConfig -> the key that sets it."""

MEGATRON_FIXED: Mapping[str, str] = {
    "calculate_per_token_loss": "the summed loss is divided once, by a global count",
    "variable_seq_lengths": "packed micro-batches differ in length",
    "context_parallel_size": "context parallelism is not supported",
    "hidden_dropout": "with dropout pi would differ between two passes over the same tokens",
    "attention_dropout": "with dropout pi would differ between two passes over the same tokens",
    **dict.fromkeys(
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        "Megatron scales auxiliary losses by the tokens of a micro-batch and expects a division "
        "that the policy loss, divided by a global count already, does not make",
    ),
}
"""Field of TransformerConfig that nothing sets -> why."""

_GRAPH = "a captured graph would go on with the routing that it was captured with"
MEGATRON_WITHOUT_REPLAY: Mapping[str, str] = {
    "moe_router_fusion": "the fused router takes no recorded choice",
    "overlap_moe_expert_parallel_comm": "two micro-batches would be in one layer at a time",
    "cuda_graph_impl": _GRAPH,
    "enable_cuda_graph": _GRAPH,
    "external_cuda_graph": _GRAPH,
}
"""Field of TransformerConfig that router replay can't have -> why."""

SGLANG_OWNED: Mapping[str, str] = {
    "model_path": "model.hf_checkpoint",
    "tokenizer_path": "model.hf_checkpoint",
    "dtype": "model.dtype",
    "host": "engine.host",
    "port": "engine.port",
    "device": "engine.device",
    "random_seed": "run.seed",
    "enable_return_routed_experts": "rollout.router_replay",
    "temperature": "rollout.temperature and evaluation.temperature",
    "top_p": "rollout.top_p and evaluation.top_p",
    "top_k": "rollout.top_k",
    "max_new_tokens": "rollout.max_response_tokens",
    "preferred_sampling_params": "rollout.temperature and evaluation.temperature",
    "sampling_defaults": "rollout.temperature and evaluation.temperature",
}
"""Field of ServerArgs, or sampling parameter -> the key that sets it."""

SGLANG_FIXED: Mapping[str, str] = {
    "api_key": "the run makes its own keys",
    "admin_api_key": "the run makes its own keys",
    "weight_version": "the run counts the weights' versions itself",
    **dict.fromkeys(
        ("dp_size", "pp_size", "ep_size", "moe_dp_size", "quantization"),
        "weight updates are verified for tensor-parallel engines of unquantised weights",
    ),
}
"""Field of ServerArgs that nothing sets -> why."""


def megatron_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the ``megatron:`` table."""
    yield from _problems(
        "megatron", table, transformer_config_fields, (MEGATRON_OWNED, MEGATRON_FIXED)
    )
    if table.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "megatron.moe_token_dispatcher_type: got 'allgather', expected 'alltoall' or 'flex': "
            "packed micro-batches differ in length between ranks"
        )


def replay_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """What in the ``megatron:`` table ``rollout.router_replay`` excludes."""
    for key, reason in MEGATRON_WITHOUT_REPLAY.items():
        if table.get(key, False) not in (False, None, "none"):
            yield (
                f"megatron.{key}: got {given(table[key])} with rollout.router_replay, expected "
                f"nothing: {reason}"
            )


def sglang_problems(table: Mapping[str, Any], *, required: bool) -> Iterator[str]:
    """What is wrong with the ``sglang:`` table. Not ``required``: no server starts here, so the
    library may lack."""
    return _problems("sglang", table, server_args_fields, (SGLANG_OWNED, SGLANG_FIXED), required)


def _problems(
    name: str,
    table: Mapping[str, Any],
    read_fields: Callable[[], LibraryFields],
    ours: tuple[Mapping[str, str], Mapping[str, str]],
    required: bool = True,
) -> Iterator[str]:
    owned, fixed = ours
    free = {key: value for key, value in table.items() if key not in owned and key not in fixed}
    for key in table:
        if key in owned:
            yield f"{name}.{key}: got {given(table[key])}, expected nothing: {owned[key]} sets it"
        elif key in fixed:
            yield f"{name}.{key}: got {given(table[key])}, expected nothing: {fixed[key]}"
    if not free:
        return
    try:
        fields = read_fields()
    except LibraryMissingError as error:
        if required:
            yield f"{name}: can't be checked: {error}"
        return
    for key, value in free.items():
        problem = _field_problem(fields, key, value, {*owned, *fixed})
        if problem is not None:
            yield f"{name}.{key}: got {given(value)}, {problem}"


def _field_problem(fields: LibraryFields, key: str, value: Any, ours: set[str]) -> str | None:
    if key in fields.computed:
        return f"expected nothing: {fields.title} computes it"
    if key not in fields.annotations:
        usable = fields.annotations.keys() - fields.computed - ours
        near = closest(key, usable, count=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        return f"not a field of {fields.title}{hint}"
    expected = value_problem(fields.annotations[key], value)
    return f"expected {expected}, as {fields.title} declares" if expected else None
