"""The tables that are forwarded to Megatron and SGLang: keys that another section sets, and keys that must not be set.

All other keys are passed on. :mod:`megatron_dppo.launch.library_checks` compares them with the fields that the library
declares.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megatron_dppo.config import speculation
from megatron_dppo.config.errors import closest, expectation, given


class LibraryMissingError(ImportError):
    """The library can't be imported in this environment, so its options are unknown."""


@dataclass(frozen=True)
class LibraryFields:
    """The options of a library's class, as plain data.

    :mod:`megatron_dppo.trainer.megatron_config` and :mod:`megatron_dppo.engine.server_arguments` import the libraries
    and make these objects; this module imports neither.

    Attributes:
        title: class, library and version, for messages.
        types: field -> its type annotation.
        computed: fields that the library sets itself and that must not be set.
    """

    title: str
    types: Mapping[str, Any]
    computed: frozenset[str] = frozenset()


def field_fault(
    fields: LibraryFields, key: str, value: Any, hidden: Collection[str] = ()
) -> str | None:
    """Return the fault of ``key: value`` as the end of a message; None if the library accepts the value.

    ``hidden``: fields that are never suggested for an unknown key.
    """
    if key in fields.computed:
        return f"expected nothing: {fields.title} computes it"
    if key not in fields.types:
        similar_fields = closest(key, fields.types.keys() - fields.computed - {*hidden}, count=3)
        hint = ""
        if similar_fields:
            hint = f"; did you mean {' or '.join(similar_fields)}?"
        return f"not a field of {fields.title}{hint}"
    try:
        read_value(fields.types[key], value)
    except ValueError as error:
        return f"{error}, as {fields.title} declares"
    return None


def read_value(annotation: Any, value: Any) -> Any:
    """Convert ``value``, as YAML gave it, to the type of ``annotation``.

    For a tuple, YAML gives a list. For an enumeration, YAML gives the name of a member. Raises ValueError with the
    expected type as its text.
    """
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        if isinstance(value, str) and value in annotation.__members__:
            return annotation[value]
        raise ValueError(f"expected {expectation(annotation)}")
    adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    # Validate as JSON: pydantic's strict mode accepts a list for a tuple in JSON only.
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise ValueError(f"expected {expectation(annotation)}") from error


class OptionFact(Flag):
    """A flag says one thing that the project knows of a library's option, or which of its programs reads the option."""

    KNOWN = auto()
    """The option's effect on a run was tested, read in the library's source, or seen in the options that SGLang chose
    for an H100 (``tests/gpu_evidence``). An option of SGLang with this flag changes neither the layout of weights nor
    the recorded data."""
    COUNTED = auto()
    """A formula of the planner reads the option."""
    NUMBER = auto()
    """The planner, or the placement of servers on devices, calculates with the option."""
    SIZE = auto()
    """The option depends on the number of a server's GPUs, or on their memory. A rehearsal chooses its own."""
    ON_CPU = auto()
    """The option has the same meaning on CPU and GPU. A rehearsal on CPUs leaves out all other options of SGLang."""
    GPU_ONLY = auto()
    """The option chooses GPU kernels or GPU memory. A rehearsal on CPUs leaves it out."""


_KNOWN, _COUNTED, _NUMBER = OptionFact.KNOWN, OptionFact.COUNTED, OptionFact.NUMBER
_SIZE, _ON_CPU, _GPU_ONLY = OptionFact.SIZE, OptionFact.ON_CPU, OptionFact.GPU_ONLY

_CHECKPOINT = "model.hf_checkpoint's config.json"

MEGATRON_OWNED: Mapping[str, str] = {
    "tensor_model_parallel_size": "parallel.tensor",
    "context_parallel_size": "parallel.context",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "virtual_pipeline_model_parallel_size": "parallel.virtual_pipeline",
    "num_layers_in_first_pipeline_stage": "parallel.first_stage_layers",
    "num_layers_in_last_pipeline_stage": "parallel.last_stage_layers",
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
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_gate",
            "moe_router_score_function",
            "layernorm_zero_centered_gamma",
            "attention_output_gate",
            "softmax_type",
            "softmax_scale",
            "window_size",
            "window_attn_skip_freq",
            "glu_linear_offset",
            "activation_func_clamp_value",
            "experimental_attention_variant",
            "linear_attention_freq",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        ),
        _CHECKPOINT,
    ),
}
"""Field of TransformerConfig -> the key of this package that sets it."""

MEGATRON_FIXED: Mapping[str, str] = {
    "calculate_per_token_loss": "the summed loss is divided once, by a global count",
    "variable_seq_lengths": "packed micro-batches differ in length",
    **dict.fromkeys(
        (
            "hybrid_context_parallel",
            "hierarchical_context_parallel_sizes",
            "max_seqlen_per_dp_cp_rank",
        ),
        "parallel.context is one size for every sequence: Transformer Engine takes packed sequences only over one "
        "group, and Megatron-Core's rotary embedding does not follow groups that change",
    ),
    "mtp_num_layers": "multi-token prediction is not trained: its loss needs labels, and logits of every token",
    "defer_embedding_wgrad_compute": "the output layer's weight gradient is summed where its logits are computed",
    "hidden_dropout": "with dropout pi would differ between two passes over the same tokens",
    "attention_dropout": "with dropout pi would differ between two passes over the same tokens",
    **dict.fromkeys(
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "moe_z_loss_coeff"),
        "Megatron multiplies auxiliary losses by the tokens of a micro-batch and expects that gradients are divided "
        "later: this trainer divides the policy loss by a global count, and does not divide gradients",
    ),
}
"""Field of TransformerConfig that must not be set -> the reason."""

_OTHER_MODEL = (
    "the trainer computes what config.json says, and the engine would compute something else"
)
_VARIABLE_LENGTHS = "packed micro-batches differ in length, and a captured graph takes one length"
_PLAIN_WEIGHTS = (
    "weights are read as plain tensors: gathered, hashed, parked, written to checkpoints"
)
_STAGE_LAYERS = (
    "parallel.first_stage_layers and parallel.last_stage_layers divide layers among stages"
)
_OTHER_SCHEDULE = (
    "the schedule calls the forward step with an argument that this trainer's does not have"
)
MEGATRON_UNUSABLE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "moe_router_force_load_balancing",
            "moe_expert_capacity_factor",
            "moe_token_dropping",
            "moe_pad_expert_input_to_capacity",
            "moe_input_jitter_eps",
            "moe_apply_probs_on_input",
            "moe_layer_freq",
            "moe_latent_size",
            "moe_router_topk_limited_devices",
            "moe_router_num_groups",
            "moe_router_group_topk",
            "moe_router_topk_scaling_factor",
            "moe_router_enable_expert_bias",
            "rotary_interleaved",
            "no_rope_freq",
            "mrope_section",
            "qk_l2_norm",
            "multi_latent_attention",
            "apply_residual_connection_post_layernorm",
            "heterogeneous_block_specs",
            "is_hybrid_model",
        ),
        _OTHER_MODEL,
    ),
    **dict.fromkeys(("fp8_param", "fp4_param"), _PLAIN_WEIGHTS),
    **dict.fromkeys(
        ("cuda_graph_impl", "enable_cuda_graph", "external_cuda_graph"), _VARIABLE_LENGTHS
    ),
    **dict.fromkeys(
        (
            "overlap_moe_expert_parallel_comm",
            "delay_wgrad_compute",
            "ep_overlap_early_attn_memory_release",
        ),
        _OTHER_SCHEDULE,
    ),
    **dict.fromkeys(
        (
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        ),
        _STAGE_LAYERS,
    ),
    "tp_comm_overlap": "it needs buffers that the training program must create in Transformer Engine; this trainer "
    "does not create them",
    "moe_use_legacy_grouped_gemm": "weights are mapped for Transformer Engine's grouped experts",
    "qk_clip": "a call after each step clips the weights, and this trainer does not make this call",
    "use_ring_exchange_p2p": "torch has no ring exchange; only a build of NVIDIA has it",
}
"""Field of TransformerConfig that must be off -> the reason."""

MEGATRON_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "moe_expert_capacity_factor": (None,),
    "moe_layer_freq": (1,),
    "moe_router_num_groups": (None, 1),
    "moe_router_topk_scaling_factor": (None, 1.0),
    "cuda_graph_impl": ("none",),
}
"""Field of MEGATRON_UNUSABLE -> the values that turn it off, if they differ from ``_USUALLY_OFF``."""

MEGATRON_OPTIONS: Mapping[str, OptionFact] = {
    "attention_backend": _KNOWN | _GPU_ONLY,
    "attention_softmax_in_fp32": _KNOWN,
    "barrier_with_L1_time": _KNOWN,
    "batch_p2p_comm": _KNOWN,
    "batch_p2p_sync": _KNOWN,
    "bias_activation_fusion": _KNOWN | _GPU_ONLY,
    "bias_dropout_fusion": _KNOWN | _GPU_ONLY,
    "masked_softmax_fusion": _KNOWN | _GPU_ONLY,
    "apply_rope_fusion": _KNOWN | _GPU_ONLY,
    "persist_layer_norm": _KNOWN,
    "memory_efficient_layer_norm": _KNOWN,
    "gradient_accumulation_fusion": _KNOWN | _GPU_ONLY,
    "cp_comm_type": _KNOWN | _COUNTED,
    "deallocate_pipeline_outputs": _KNOWN,
    "deterministic_mode": _KNOWN | _GPU_ONLY,
    "disable_bf16_reduced_precision_matmul": _KNOWN,
    "distribute_saved_activations": _KNOWN,
    "fp8": _KNOWN | _COUNTED | _GPU_ONLY,
    "fp8_recipe": _KNOWN | _COUNTED | _GPU_ONLY,
    "fp8_margin": _KNOWN | _GPU_ONLY,
    "fp8_interval": _KNOWN,
    "fp8_amax_history_len": _KNOWN | _GPU_ONLY,
    "fp8_amax_compute_algo": _KNOWN | _GPU_ONLY,
    "fp8_wgrad": _KNOWN,
    "first_last_layers_bf16": _KNOWN,
    "num_layers_at_start_in_bf16": _KNOWN,
    "num_layers_at_end_in_bf16": _KNOWN,
    "init_method_std": _KNOWN,
    "embedding_init_method_std": _KNOWN,
    "perform_initialization": _KNOWN,
    "use_cpu_initialization": _KNOWN,
    "microbatch_group_size_per_vp_stage": _KNOWN,
    "moe_grouped_gemm": _KNOWN,
    "moe_permute_fusion": _KNOWN | _GPU_ONLY,
    "moe_per_layer_logging": _KNOWN,
    "moe_router_dtype": _KNOWN,
    "moe_router_fusion": _KNOWN | _GPU_ONLY,
    "moe_router_padding_for_quantization": _KNOWN,
    "moe_router_padding_for_fp8": _KNOWN,
    "moe_token_dispatcher_type": _KNOWN,
    "overlap_p2p_comm": _KNOWN,
    "recompute_method": _KNOWN,
    "recompute_modules": _KNOWN | _GPU_ONLY,
    "recompute_num_layers": _KNOWN,
    **dict.fromkeys(
        (
            "fp8_param",
            "fp4",
            "cuda_graph_impl",
            "enable_cuda_graph",
            "external_cuda_graph",
            "cuda_graph_scope",
            "tp_comm_overlap",
            "cpu_offloading",
        ),
        _GPU_ONLY,
    ),
}
"""Field of TransformerConfig -> what is known of it."""

MEGATRON_WITHOUT_REPLAY: Mapping[str, str] = {
    "moe_router_fusion": "the fused router takes no recorded choice"
}
"""Field of TransformerConfig that router replay excludes -> the reason."""

SGLANG_OWNED: Mapping[str, str] = {
    "model_path": "model.hf_checkpoint",
    "tokenizer_path": "model.hf_checkpoint",
    "dtype": "model.dtype",
    "host": "engine.host",
    "port": "engine.port",
    "device": "engine.device",
    "random_seed": "run.seed",
    "quantization": "engine.quantization",
    "enable_return_routed_experts": "rollout.router_replay",
    "enable_fp32_lm_head": "head.dtype",
    "temperature": "rollout.temperature and evaluation.temperature",
    "top_p": "rollout.top_p and evaluation.top_p",
    "top_k": "rollout.top_k",
    "max_new_tokens": "rollout.max_response_tokens",
    "preferred_sampling_params": "rollout.temperature and evaluation.temperature",
    "sampling_defaults": "rollout.temperature and evaluation.temperature",
}
"""Field of ServerArgs, or sampling parameter -> the key of this package that sets it."""

SGLANG_FIXED: Mapping[str, str] = {
    "api_key": "the run makes its own keys",
    "admin_api_key": "the run makes its own keys",
    "weight_version": "the run counts the weights' versions itself",
    **dict.fromkeys(
        ("nnodes", "node_rank", "dist_init_addr"),
        "the placement chooses the hosts of a server; a tp_size above a host's GPUs takes several hosts",
    ),
    **dict.fromkeys(
        ("pp_size", "moe_dp_size"),
        "weight updates are verified only for engines of tensor and expert parallelism and of attention replicas",
    ),
}
"""Field of ServerArgs that must not be set -> the reason."""


_PLAIN_HTTP = "the servers answer /generate over plain HTTP, each by itself"
_EXPERT_PLACES = (
    "weight updates are verified only for experts that lie as tp_size and ep_size place them"
)
_EXCHANGE_KERNELS = (
    "DeepEP and flashinfer have kernels that lay out the experts' weights in their own way"
)
_OLD_CACHE = "keys and values that are kept outside the server outlive a weight update, and the server would reuse them"
SGLANG_OTHER_SHARES = (
    "attn_cp_size",
    "dcp_size",
    "dwdp_size",
    "moe_dense_tp_size",
    "shared_experts_tp_size",
    "enable_shared_experts_attn_tp",
    "enable_dense_mlp_attn_tp",
)
"""Fields of ServerArgs that divide the weights among the ranks of a server in ways that the weight update does not
support."""
SGLANG_UNUSABLE: Mapping[str, str] = {
    "skip_tokenizer_init": "a run reads the text of responses, and a server without a tokenizer returns no text",
    **speculation.UNUSABLE,
    "dllm_algorithm": "a response is sampled token by token, each with its probability",
    "enable_watermark": "tokens would not be drawn from the probabilities that the server reports",
    "watermark_config": "tokens would not be drawn from the probabilities that the server reports",
    **dict.fromkeys(
        (
            "disaggregation_mode",
            "is_embedding",
            "encoder_only",
            "grpc_mode",
            "smg_grpc_mode",
            "ssl_certfile",
            "ssl_keyfile",
        ),
        _PLAIN_HTTP,
    ),
    **dict.fromkeys(
        ("gated_launch_port", "checkpoint_engine_wait_weights_before_ready"),
        "a server would wait for a call that the run does not make",
    ),
    "use_ray": "the run starts, watches and ends the processes of a server itself",
    "delete_ckpt_after_loading": "the trainer, and each server that starts later, reads the same folder",
    **dict.fromkeys(("json_model_override_args", "decrypted_config_file"), _OTHER_MODEL),
    **dict.fromkeys(
        ("modelopt_quant", "quantize_and_serve", "rl_quant_profile"),
        "weight updates are verified only for tensor-parallel engines of unquantised weights",
    ),
    **dict.fromkeys(
        SGLANG_OTHER_SHARES,
        "weight updates are verified only for servers whose tp_size ranks divide MLPs, and whose attention replicas "
        "divide attention",
    ),
    "moe_a2a_backend": _EXCHANGE_KERNELS,
    **dict.fromkeys(
        (
            "enable_eplb",
            "ep_num_redundant_experts",
            "elastic_ep_backend",
            "max_ep_size",
            "enable_two_batch_overlap",
            "enable_elastic_expert_backup",
            "enable_paged_experts",
            "kt_weight_path",
        ),
        _EXPERT_PLACES,
    ),
    **dict.fromkeys(
        ("cpu_offload_gb", "offload_group_size"),
        "weight updates are verified only for weights that lie on the server's devices",
    ),
    "weight_cache_mode": "SGLang refuses to update weights that it shares with a cache of weights",
    **dict.fromkeys(
        (
            "hicache_storage_backend",
            "enable_lmcache",
            "enable_flexkv",
            "enable_unified_cache_external_linker",
        ),
        _OLD_CACHE,
    ),
}
"""Field of ServerArgs that must be off -> the reason."""


SGLANG_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("attn_cp_size", "dcp_size", "dwdp_size"), (None, 0, 1)),
    "offload_group_size": (None, -1, 0),
    "weight_cache_mode": (None, "off"),
    **dict.fromkeys(speculation.THRESHOLDS, (None, 1)),
}
"""Field of SGLANG_UNUSABLE -> the values that turn it off, if they differ from ``_USUALLY_OFF``."""

SGLANG_OPTIONS: Mapping[str, OptionFact] = {
    # Memory and batching.
    "mem_fraction_static": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "max_running_requests": _KNOWN | _COUNTED | _NUMBER,
    "max_queued_requests": _KNOWN,
    "max_total_tokens": _KNOWN,
    "max_prefill_tokens": _KNOWN | _ON_CPU,
    "prefill_max_requests": _KNOWN,
    "chunked_prefill_size": _KNOWN | _COUNTED | _NUMBER | _ON_CPU,
    "context_length": _KNOWN,
    "kv_cache_dtype": _KNOWN | _COUNTED,
    "page_size": _KNOWN,
    "disable_radix_cache": _KNOWN | _ON_CPU,
    "radix_eviction_policy": _KNOWN,
    "schedule_policy": _KNOWN | _ON_CPU,
    "schedule_conservativeness": _KNOWN | _ON_CPU,
    "disable_overlap_schedule": _KNOWN | _ON_CPU,
    "enable_mixed_chunk": _KNOWN | _ON_CPU,
    "num_continuous_decode_steps": _KNOWN,
    "scheduler_recv_interval": _KNOWN,
    "enable_memory_saver": _KNOWN,
    # Devices and processes.
    "tp_size": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "ep_size": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "attn_dp_size": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "dp_size": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "enable_dp_attention": _KNOWN | _COUNTED | _SIZE,
    "enable_dp_lm_head": _KNOWN | _COUNTED | _SIZE,
    "base_gpu_id": _KNOWN | _COUNTED | _NUMBER | _SIZE,
    "gpu_id_step": _KNOWN,
    "numa_node": _KNOWN,
    "nccl_port": _KNOWN,
    "dist_timeout": _KNOWN,
    "watchdog_timeout": _KNOWN | _ON_CPU,
    "soft_watchdog_timeout": _KNOWN,
    "sleep_on_idle": _KNOWN,
    "gc_threshold": _KNOWN,
    "disable_custom_all_reduce": _KNOWN,
    # Kernels.
    "attention_backend": _KNOWN,
    "decode_attention_backend": _KNOWN,
    "prefill_attention_backend": _KNOWN,
    "sampling_backend": _KNOWN,
    "grammar_backend": _KNOWN,
    "moe_runner_backend": _KNOWN,
    "triton_attention_reduce_in_fp32": _KNOWN,
    "triton_attention_num_kv_splits": _KNOWN,
    "triton_attention_split_tile_size": _KNOWN,
    "enable_deterministic_inference": _KNOWN,
    "cuda_graph_config": _KNOWN,
    "cuda_graph_backend_decode": _KNOWN,
    "cuda_graph_backend_prefill": _KNOWN,
    "cuda_graph_max_bs_decode": _KNOWN,
    "cuda_graph_max_bs_prefill": _KNOWN,
    "cuda_graph_bs_decode": _KNOWN,
    "cuda_graph_bs_prefill": _KNOWN,
    "disable_cuda_graph_padding": _KNOWN,
    # Speculation.
    speculation.ALGORITHM: _KNOWN,
    **dict.fromkeys(speculation.NGRAM_OPTIONS, _KNOWN),
    # Adapters.
    "enable_lora": _KNOWN,
    "max_lora_rank": _KNOWN,
    "lora_target_modules": _KNOWN,
    "lora_backend": _KNOWN,
    "max_loras_per_batch": _KNOWN,
    "max_loaded_loras": _KNOWN,
    # Loading.
    "load_format": _KNOWN,
    "model_impl": _KNOWN,
    "trust_remote_code": _KNOWN | _ON_CPU,
    "weight_loader_disable_mmap": _KNOWN,
    "weight_loader_prefetch_checkpoints": _KNOWN,
    "weight_loader_prefetch_num_threads": _KNOWN,
    "weight_loader_drop_cache_after_load": _KNOWN,
    "skip_server_warmup": _KNOWN,
    "served_model_name": _KNOWN,
    # Answers and records.
    "stream_interval": _KNOWN | _ON_CPU,
    "reasoning_parser": _KNOWN,
    "tool_call_parser": _KNOWN,
    "log_level": _KNOWN | _ON_CPU,
    "log_level_http": _KNOWN,
    "log_requests": _KNOWN | _ON_CPU,
    "log_requests_level": _KNOWN,
    "log_requests_format": _KNOWN,
    "decode_log_interval": _KNOWN,
    "crash_dump_folder": _KNOWN,
    "show_time_cost": _KNOWN,
    "enable_metrics": _KNOWN,
    "enable_mfu_metrics": _KNOWN,
    "enable_cache_report": _KNOWN,
    "enable_request_time_stats_logging": _KNOWN,
}
"""Field of ServerArgs -> what is known of it."""

_USUALLY_OFF: tuple[Any, ...] = (None, 0, "", "null", "none", "{}", [], {})
"""Values, besides false, that turn most options off."""


def _is_off(value: Any, neutral_values: Collection[Any] = _USUALLY_OFF) -> bool:
    """Whether ``value`` leaves an option off: one of ``neutral_values``, or false."""
    # Test for bool first: True equals 1 in Python, so a neutral value 1 would match true.
    if isinstance(value, bool):
        return not value
    return value in neutral_values


EXPERT_KERNEL = "triton"
"""SGLang's ``moe_runner_backend`` that keeps the loaded layout of unquantised experts."""


@dataclass(frozen=True)
class ForwardedTable:
    """A section whose keys are a library's options.

    Attributes:
        name: name of the section.
        owned: option -> this package's key that sets it.
        fixed: option -> reason why nothing may set it.
        off: option -> reason why it must be off.
        neutral: option of ``off`` -> values that turn it off, if they differ from ``_USUALLY_OFF``.
        options: option -> what is known of it. If no option has the flag KNOWN, ``untried`` yields no warnings.
    """

    name: str
    owned: Mapping[str, str]
    fixed: Mapping[str, str]
    off: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    options: Mapping[str, OptionFact] = field(default_factory=dict)

    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a line for each key that the user must not set here."""
        for key, value in values.items():
            reason = self.fixed.get(key)
            if key in self.owned:
                reason = f"{self.owned[key]} sets it"
            if reason is not None:
                yield f"{self.name}.{key}: got {given(value)}, expected nothing: {reason}"
        for key, reason in self.off.items():
            if not self.leaves_off(key, values.get(key)):
                yield f"{self.name}.{key}: got {given(values[key])}, expected it off: {reason}"

    def untried(self, values: Mapping[str, Any]) -> Iterator[str]:
        """Yield a warning for each free key whose effect on a run is not known."""
        known_options = self.options_with(OptionFact.KNOWN)
        if not known_options:
            return
        for key, value in self.free(values).items():
            if key not in known_options and key not in self.off and not _is_off(value):
                yield (
                    f"{self.name}.{key}: got {given(value)}, which is passed on, but its effect on a run is not known: "
                    "compare the first steps with a run without it"
                )

    def options_with(self, fact: OptionFact) -> list[str]:
        """Return the options of which ``fact`` is known."""
        return [name for name, facts in self.options.items() if fact in facts]

    def leaves_off(self, key: str, value: Any) -> bool:
        """Whether ``value`` turns the option ``key`` off."""
        return value is None or _is_off(value, self.neutral.get(key, _USUALLY_OFF))

    def free(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the free keys, which are neither owned nor fixed, with their values. The library receives them."""
        return {k: v for k, v in values.items() if k not in self.owned and k not in self.fixed}

    def library_faults(self, values: Mapping[str, Any], fields: LibraryFields) -> Iterator[str]:
        """Yield a line for each free key that the library does not declare, or whose value has another type."""
        hidden_fields = {*self.owned, *self.fixed}
        for key, value in self.free(values).items():
            fault = field_fault(fields, key, value, hidden_fields)
            if fault is not None:
                yield f"{self.name}.{key}: got {given(value)}, {fault}"


class _MegatronTable(ForwardedTable):
    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        yield from super().faults(values)
        if values.get("moe_token_dispatcher_type") == "allgather":
            yield (
                "megatron.moe_token_dispatcher_type: got 'allgather', expected 'alltoall': "
                "packed micro-batches differ in length between ranks"
            )


class _SglangTable(ForwardedTable):
    def faults(self, values: Mapping[str, Any]) -> Iterator[str]:
        yield from super().faults(values)
        if values.get("model_impl") not in (None, "auto", "sglang"):
            yield (
                f"sglang.model_impl: got {given(values['model_impl'])}, expected 'auto' or 'sglang': weight updates "
                "know the parameters of SGLang's own models"
            )
        if values.get("load_balance_method") == "follow_bootstrap_room":
            yield (
                "sglang.load_balance_method: got 'follow_bootstrap_room', expected another method: it sends a request "
                "to the attention replica that disaggregated prefill chose, and a run has no disaggregated prefill"
            )
        yield from speculation.table_faults(values)
        replicas = values.get("dp_size")
        # With enable_dp_attention and without attn_dp_size, dp_size is the number of attention replicas.
        has_older_form = values.get("enable_dp_attention") and not values.get("attn_dp_size")
        if replicas not in (None, 1) and not has_older_form:
            yield (
                f"sglang.dp_size: got {given(replicas)}, expected 1, or sglang.enable_dp_attention: true without "
                "sglang.attn_dp_size: a server has one replica of the experts, and engine.servers starts more servers"
            )


MEGATRON = _MegatronTable(
    "megatron",
    MEGATRON_OWNED,
    MEGATRON_FIXED,
    MEGATRON_UNUSABLE,
    MEGATRON_NEUTRAL,
    MEGATRON_OPTIONS,
)
SGLANG = _SglangTable(
    "sglang", SGLANG_OWNED, SGLANG_FIXED, SGLANG_UNUSABLE, SGLANG_NEUTRAL, SGLANG_OPTIONS
)


_FP8_CAPABILITIES: Mapping[str, tuple[int, int]] = {
    "delayed": (8, 9),
    "tensorwise": (8, 9),
    "blockwise": (9, 0),
    "mxfp8": (10, 0),
}
"""``fp8_recipe`` -> the lowest compute capability that Transformer Engine requires for it."""
_FP4_CAPABILITY = (10, 0)
_DELAYED = "delayed"
"""Megatron-Core's default of ``fp8_recipe``."""


def is_blockwise(table: Mapping[str, Any]) -> bool:
    """Whether the ``megatron:`` table sets FP8 with a scale for each block."""
    return table.get("fp8") is not None and table.get("fp8_recipe") == "blockwise"


def precision_faults(table: Mapping[str, Any], capability: tuple[int, int]) -> Iterator[str]:
    """Report low precision in the ``megatron:`` table that a GPU of this compute ``capability`` does not support."""
    recipe = table.get("fp8_recipe") or _DELAYED
    min_capability = _FP8_CAPABILITIES.get(recipe)
    if table.get("fp8") is not None and min_capability is not None and capability < min_capability:
        yield _capability_fault("fp8_recipe", recipe, min_capability, capability)
    if table.get("fp4") is not None and capability < _FP4_CAPABILITY:
        yield _capability_fault("fp4", table["fp4"], _FP4_CAPABILITY, capability)


def _capability_fault(
    key: str, value: Any, min_capability: tuple[int, int], capability: tuple[int, int]
) -> str:
    return (
        f"megatron.{key}: got {given(value)} on a GPU of compute capability {capability[0]}.{capability[1]}, expected "
        f"{min_capability[0]}.{min_capability[1]} or more"
    )


def recompute_faults(table: Mapping[str, Any], recompute: str) -> Iterator[str]:
    """Report an FP8 recipe that does not work with selective recomputation of a mixture of experts.

    ``recompute``: ``training.recompute``; on a GPU ``selective`` recomputes the experts' activation and the norms.
    """
    recipe = table.get("fp8_recipe") or _DELAYED
    is_delayed = table.get("fp8") is not None and recipe == _DELAYED
    if is_delayed and recompute == "selective" and "recompute_modules" not in table:
        yield (
            "megatron.fp8_recipe: got 'delayed' (Megatron-Core's default) with training.recompute selective, expected "
            "another recipe, such as 'blockwise', or megatron.recompute_modules: a scale of an earlier step can't be "
            "computed again"
        )


def expert_kernel_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Report kernels of the experts, in the ``sglang:`` table, whose weight layout can't be verified."""
    backend = table.get("moe_runner_backend")
    if backend not in (None, EXPERT_KERNEL):
        yield (
            f"sglang.moe_runner_backend: got {given(backend)}, expected {EXPERT_KERNEL!r}: other kernels keep the "
            "experts' weights in a layout of their own (auto chooses such kernels on some GPUs), and the checksums of "
            "this layout differ from the trainer's"
        )


def replay_faults(table: Mapping[str, Any]) -> Iterator[str]:
    """Report keys of the ``megatron:`` table that ``rollout.router_replay`` excludes."""
    for key, reason in MEGATRON_WITHOUT_REPLAY.items():
        if table.get(key, False) not in (False, None, "none"):
            yield (
                f"megatron.{key}: got {given(table[key])} with rollout.router_replay, expected nothing: {reason}"
            )


_PLAIN_SUMS = "gradients are plain sums: the loss was divided by a global count"
_WHOLE_PARAMETERS = "weights are read from parameters that FSDP would divide further"
_GATHERED_LATER = "weights are read between steps, before the forward pass that would gather them"

DDP = ForwardedTable(
    "megatron_ddp",
    {"use_distributed_optimizer": "optimizer.distributed"},
    {
        "average_in_collective": _PLAIN_SUMS,
        "align_param_gather": _GATHERED_LATER,
        "fp8_param_gather": _GATHERED_LATER,
        "reuse_grad_buf_for_mxfp8_param_ag": _GATHERED_LATER,
        "num_distributed_optimizer_instances": "checkpoints know one instance",
        **dict.fromkeys(
            (
                "use_megatron_fsdp",
                "use_custom_fsdp",
                "data_parallel_sharding_strategy",
                "outer_dp_sharding_strategy",
                "suggested_communication_unit_size",
                "preserve_fp32_weights",
                "keep_fp8_transpose_cache",
                "fsdp_double_buffer",
                "fsdp_manual_registration",
            ),
            _WHOLE_PARAMETERS,
        ),
    },
    options={"grad_reduce_in_fp32": _COUNTED},
)
"""Fields of megatron.core's DistributedDataParallelConfig."""

PRECISION_AWARE = "use_precision_aware_optimizer"
OFFLOAD = "optimizer_cpu_offload"
OFFLOAD_FRACTION = "optimizer_offload_fraction"
MOMENT_DTYPES = ("exp_avg_dtype", "exp_avg_sq_dtype")
_ADAM_ONLY = "the optimizer is Adam"
_NO_LOSS_SCALE = "bfloat16 needs no loss scale"
_FP32_MASTERS = "checkpoints hold the fp32 master of each weight"
OPTIMIZER = ForwardedTable(
    "megatron_optimizer",
    {
        "lr": "optimizer.lr",
        "min_lr": "optimizer.min_lr",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": "optimizer.beta2",
        "adam_eps": "optimizer.eps",
        "clip_grad": "optimizer.clip_grad",
        "use_distributed_optimizer": "optimizer.distributed",
        "overlap_param_gather": "megatron_ddp.overlap_param_gather",
        "bf16": "model.dtype",
        "fp16": "model.dtype",
        "params_dtype": "model.dtype",
    },
    {
        "optimizer": _ADAM_ONLY,
        "decoupled_weight_decay": "weight decay is decoupled",
        **dict.fromkeys(("decoupled_lr", "decoupled_min_lr"), "all weights have one rate"),
        **dict.fromkeys(
            (
                "loss_scale",
                "initial_loss_scale",
                "min_loss_scale",
                "loss_scale_window",
                "hysteresis",
            ),
            _NO_LOSS_SCALE,
        ),
        **dict.fromkeys(
            (
                "sgd_momentum",
                "muon_momentum",
                "muon_split_qkv",
                "muon_use_nesterov",
                "muon_scale_mode",
                "muon_fp32_matmul_prec",
                "muon_num_ns_steps",
                "muon_tp_mode",
                "muon_extra_scale_factor",
            ),
            _ADAM_ONLY,
        ),
        **dict.fromkeys(
            ("overlap_param_gather_with_optimizer_step", "reuse_grad_buf_for_mxfp8_param_ag"),
            _GATHERED_LATER,
        ),
        **dict.fromkeys(("store_param_remainders", "main_params_dtype"), _FP32_MASTERS),
        "main_grads_dtype": "megatron_ddp.grad_reduce_in_fp32 sets it",
        "use_torch_optimizer_for_cpu_offload": "Megatron-Core steps offloaded state by torch's Adam in any case",
        "timers": "a Python function, which YAML can't hold",
    },
    options=dict.fromkeys((PRECISION_AWARE, OFFLOAD, OFFLOAD_FRACTION, *MOMENT_DTYPES), _COUNTED),
)
"""Fields of megatron.core's OptimizerConfig."""


def training_faults(
    ddp: Mapping[str, Any], optimizer: Mapping[str, Any], distributed: bool, dtype: str
) -> Iterator[str]:
    """Report faults of the ``megatron_ddp:`` and ``megatron_optimizer:`` tables.

    ``distributed``: whether the optimizer's state is sharded, not replicated. ``dtype``: ``model.dtype``.
    """
    yield from DDP.faults(ddp)
    if ddp.get("overlap_param_gather") and not distributed:
        yield (
            "megatron_ddp.overlap_param_gather: got true, expected optimizer.distributed: true with it: without "
            "it every replica has all weights, and nothing is gathered"
        )
    yield from OPTIMIZER.faults(optimizer)
    yield from _optimizer_memory_faults(optimizer, distributed, dtype)


def offloaded_fraction(optimizer: Mapping[str, Any]) -> float:
    """Return the share of Adam's state that the ``megatron_optimizer:`` table moves to the host."""
    if not optimizer.get(OFFLOAD):
        return 0.0
    return float(optimizer.get(OFFLOAD_FRACTION, 1.0))


def moment_dtypes(optimizer: Mapping[str, Any]) -> list[str]:
    """Return the dtypes of Adam's two moments, as the ``megatron_optimizer:`` table sets them."""
    return [str(optimizer.get(key) or "float32") for key in MOMENT_DTYPES]


def _optimizer_memory_faults(
    optimizer: Mapping[str, Any], distributed: bool, dtype: str
) -> Iterator[str]:
    """Report faults of low-precision and of offloaded state in the ``megatron_optimizer:`` table."""
    for key in (PRECISION_AWARE, OFFLOAD):
        if optimizer.get(key) and not distributed:
            yield (
                f"megatron_optimizer.{key}: got true, expected optimizer.distributed: true with it: only "
                "Megatron-Core's distributed optimizer has this option"
            )
        if optimizer.get(key) and dtype == "float32":
            yield (
                f"megatron_optimizer.{key}: got true with model.dtype float32, expected bfloat16: Megatron-Core can't "
                "divide float32 weights in this way"
            )
    is_offloaded = bool(optimizer.get(OFFLOAD))
    fraction = optimizer.get(OFFLOAD_FRACTION)
    if fraction is not None and not (isinstance(fraction, (int, float)) and 0 < fraction <= 1):
        yield f"megatron_optimizer.{OFFLOAD_FRACTION}: got {given(fraction)}, expected more than 0 and at most 1"
    if fraction is not None and not is_offloaded:
        yield (
            f"megatron_optimizer.{OFFLOAD_FRACTION}: got {given(fraction)}, expected nothing without "
            f"megatron_optimizer.{OFFLOAD}: true"
        )
    for key, moment_dtype in zip(MOMENT_DTYPES, moment_dtypes(optimizer), strict=True):
        if moment_dtype != "bfloat16":
            continue
        if not optimizer.get(PRECISION_AWARE):
            yield (
                f"megatron_optimizer.{key}: got {given(moment_dtype)}, expected megatron_optimizer.{PRECISION_AWARE}: "
                "true with it: Megatron-Core ignores it otherwise"
            )
        elif is_offloaded:
            yield (
                f"megatron_optimizer.{key}: got {given(moment_dtype)} with megatron_optimizer.{OFFLOAD}, expected "
                "'float32': Megatron-Core's moments on the host are fp32"
            )


def adam_faults(optimizer: Mapping[str, Any], *, has_fused_adam: bool) -> Iterator[str]:
    """Report an option of the ``megatron_optimizer:`` table that needs Transformer Engine, if that is not installed.

    ``has_fused_adam``: whether Transformer Engine is installed.
    """
    if optimizer.get(PRECISION_AWARE) and not optimizer.get(OFFLOAD) and not has_fused_adam:
        yield (
            f"megatron_optimizer.{PRECISION_AWARE}: got true, expected Transformer Engine in this environment, or "
            f"megatron_optimizer.{OFFLOAD}: true with it: only Transformer Engine's Adam has such state"
        )


TABLES: Mapping[str, ForwardedTable] = {
    table.name: table for table in (MEGATRON, DDP, OPTIMIZER, SGLANG)
}
"""Section -> its table."""
