"""The ``megatron:`` and ``sglang:`` tables: which of their keys other sections set, or nothing may.

The other keys are the library's own; :mod:`megatron_dppo.launch.library_checks` compares those with
the fields that the library declares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_dppo.config.expectations import given
from megatron_dppo.config.library_fields import LibraryFields, field_problem

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
        ("nnodes", "node_rank", "dist_init_addr"),
        "the placement says on which hosts a server runs: on several, where tp_size is more than a "
        "host's GPUs",
    ),
    **dict.fromkeys(
        ("dp_size", "pp_size", "ep_size", "moe_dp_size", "quantization"),
        "weight updates are verified for tensor-parallel engines of unquantised weights",
    ),
}
"""Field of ServerArgs that nothing sets -> why."""


EXPERT_KERNEL = "triton"
"""SGLang's ``moe_runner_backend`` that leaves unquantised experts as they are loaded."""


@dataclass(frozen=True)
class ForwardedTable:
    """A section whose keys are a library's options.

    ``owned``: option -> the key of ours that sets it; ``fixed``: option -> why nothing may set it.
    """

    name: str
    owned: Mapping[str, str]
    fixed: Mapping[str, str]

    def problems(self, values: Mapping[str, Any]) -> Iterator[str]:
        """A line for each key that is not the user's to set here."""
        for key, value in values.items():
            reason = f"{self.owned[key]} sets it" if key in self.owned else self.fixed.get(key)
            if reason is not None:
                yield f"{self.name}.{key}: got {given(value)}, expected nothing: {reason}"

    def free(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """What of ``values`` the library itself has to know."""
        return {k: v for k, v in values.items() if k not in self.owned and k not in self.fixed}

    def library_problems(self, values: Mapping[str, Any], fields: LibraryFields) -> Iterator[str]:
        """A line for each free key that the library does not declare, or not with such a value."""
        ours = {*self.owned, *self.fixed}
        for key, value in self.free(values).items():
            problem = field_problem(fields, key, value, ours)
            if problem is not None:
                yield f"{self.name}.{key}: got {given(value)}, {problem}"


MEGATRON = ForwardedTable("megatron", MEGATRON_OWNED, MEGATRON_FIXED)
SGLANG = ForwardedTable("sglang", SGLANG_OWNED, SGLANG_FIXED)


def megatron_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with the ``megatron:`` table, as far as our own sections tell."""
    yield from MEGATRON.problems(table)
    if table.get("moe_token_dispatcher_type") == "allgather":
        yield (
            "megatron.moe_token_dispatcher_type: got 'allgather', expected 'alltoall' or 'flex': "
            "packed micro-batches differ in length between ranks"
        )


def expert_kernel_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """Kernels of the experts, in the ``sglang:`` table, whose layout of the weights can't be verified."""
    found = table.get("moe_runner_backend")
    if found not in (None, EXPERT_KERNEL):
        yield (
            f"sglang.moe_runner_backend: got {given(found)}, expected {EXPERT_KERNEL!r}: other kernels keep the "
            "experts' weights in a layout of their own (auto takes such a one on some GPUs), and their checksums "
            "match no trainer's"
        )


def replay_problems(table: Mapping[str, Any]) -> Iterator[str]:
    """What in the ``megatron:`` table ``rollout.router_replay`` excludes."""
    for key, reason in MEGATRON_WITHOUT_REPLAY.items():
        if table.get(key, False) not in (False, None, "none"):
            yield (
                f"megatron.{key}: got {given(table[key])} with rollout.router_replay, expected "
                f"nothing: {reason}"
            )
