"""The ``megatron:`` and ``sglang:`` tables are checked against the fields of the installed libraries."""

import dataclasses
import sys
from enum import Enum
from typing import Union, get_args, get_origin

import pytest
import torch
from pydantic import ConfigDict, TypeAdapter

import megatron_dppo.trainer  # noqa: F401  (adapts megatron before it is imported)
from megatron_dppo.config import ConfigError, check_config, load_config
from megatron_dppo.config.forwarded import (
    DDP,
    MEGATRON,
    OPTIMIZER,
    SGLANG,
    OptionFact,
    adam_faults,
    is_blockwise,
    precision_faults,
    read_value,
)
from megatron_dppo.config.machine import set_precision
from megatron_dppo.engine.options import flag_of
from megatron_dppo.engine.server_arguments import _parser, server_args_fields, table_faults
from megatron_dppo.launch import library_checks
from megatron_dppo.launch.library_checks import kernel_faults, library_faults, server_faults
from megatron_dppo.system import gpus
from megatron_dppo.trainer import platform
from megatron_dppo.trainer.megatron_config import library_fields, library_values
from tests.messages import mentioning
from tests.unit.config_files import minimal, refusals, write_config


@pytest.fixture
def problems(tmp_path):
    path = write_config(tmp_path, minimal(tmp_path))

    def faults_of(*overrides):
        config = load_config(path, overrides)
        tables = config.megatron, config.megatron_ddp, config.megatron_optimizer
        faults = [*library_faults(*tables), *server_faults(config)]
        try:
            check_config(config)
        except ConfigError as error:
            return [*error.faults, *faults]
        return faults

    return faults_of


FORWARDED = refusals(
    """
megatron.moe_router_topk=3
    megatron.moe_router_topk: got 3 (int), expected nothing: model.hf_checkpoint's config.json sets it
megatron.tensor_model_parallel_size=2
    megatron.tensor_model_parallel_size: got 2 (int), expected nothing: parallel.tensor sets it
megatron.attention_dropout=0.1
    megatron.attention_dropout: got 0.1 (float), expected nothing: with dropout pi would differ
megatron.moe_grouped_gem=true
    megatron.moe_grouped_gem: got true (bool), not a field of TransformerConfig (megatron-core 0.16.1); did you mean
        moe_grouped_gemm
megatron.moe_grouped_gemm=1
    megatron.moe_grouped_gemm: got 1 (int), expected true or false, as TransformerConfig
megatron.embedding_init_method_std=x
    megatron.embedding_init_method_std: got 'x' (str), expected a number or null
megatron.moe_router_dtype=fp8
    megatron.moe_router_dtype: got 'fp8' (str), expected one of 'fp32', 'fp64' or null
megatron.attention_backend=flush
    megatron.attention_backend: got 'flush' (str), expected one of 'flash', 'fused', 'unfused', 'local', 'auto', as
        TransformerConfig
megatron.attention_backend=1
    megatron.attention_backend: got 1 (int), expected one of 'flash', 'fused',
'megatron.recompute_modules=[core_attn, 1]'
    megatron.recompute_modules: got ['core_attn', 1] (list), expected a list, each item text or null
megatron.quant_recipe=x
    megatron.quant_recipe: got 'x' (str), expected a Python RecipeConfig, which YAML can't hold or null
megatron.init_method=x
    megatron.init_method: got 'x' (str), expected a Python function, which YAML can't hold
megatron_ddp.use_distributed_optimizer=true
    megatron_ddp.use_distributed_optimizer: got true (bool), expected nothing: optimizer.distributed sets it
megatron_ddp.overlap_grad_reduced=true
    megatron_ddp.overlap_grad_reduced: got true (bool), not a field of DistributedDataParallelConfig (megatron-core
        0.16.1); did you mean overlap_grad_reduce
megatron_ddp.align_param_gather=true
    megatron_ddp.align_param_gather: got true (bool), expected nothing: weights are read between steps
megatron_ddp.overlap_param_gather=true
    megatron_ddp.overlap_param_gather: got true, expected optimizer.distributed: true with it
megatron_optimizer.overlap_param_gather=true
    megatron_optimizer.overlap_param_gather: got true (bool), expected nothing: megatron_ddp.overlap_param_gather
        sets it
megatron_optimizer.adam_beta1=0.5
    megatron_optimizer.adam_beta1: got 0.5 (float), expected nothing: optimizer.beta1 sets it
megatron_optimizer.exp_avg_dtype=bfloat16
    megatron_optimizer.exp_avg_dtype: got 'bfloat16' (str), expected megatron_optimizer.use_precision_aware_opt
megatron_optimizer.exp_avg_sq_dtype=float16
    megatron_optimizer.exp_avg_sq_dtype: got 'float16' (str), expected one of 'float32', 'bfloat16'
megatron_optimizer.optimizer_cpu_offload=true
    megatron_optimizer.optimizer_cpu_offload: got true, expected optimizer.distributed: true with it
megatron_optimizer.use_precision_aware_optimizer=true
    megatron_optimizer.use_precision_aware_optimizer: got true, expected optimizer.distributed: true with it
megatron_optimizer.optimizer_offload_fraction=0.5
    megatron_optimizer.optimizer_offload_fraction: got 0.5 (float), expected nothing without
megatron_optimizer.main_params_dtype=bfloat16
    megatron_optimizer.main_params_dtype: got 'bfloat16' (str), expected nothing: checkpoints hold
megatron_optimizer.log_num_zeros_in_grad=many
    megatron_optimizer.log_num_zeros_in_grad: got 'many' (str), expected true or false
sglang.port=3
    sglang.port: got 3 (int), expected nothing: engine.port sets it
sglang.temperature=0.7
    sglang.temperature: got 0.7 (float), expected nothing: rollout.temperature and evaluation.temperature sets it
sglang.api_key=x
    sglang.api_key: got 'x' (str), expected nothing: the run makes its own keys
sglang.mem_fraction=0.5
    sglang.mem_fraction: got 0.5 (float), not a field of ServerArgs (sglang 0.5.23); did you mean
        mem_fraction_static
sglang.tp_size=1.5
    sglang.tp_size: got 1.5 (float), expected a whole number, as ServerArgs
sglang.uses_mamba_radix_cache=true
    sglang.uses_mamba_radix_cache: got true (bool), expected nothing: ServerArgs (sglang 0.5.23) computes it
sglang.custom_sigquit_handler=x
    sglang.custom_sigquit_handler: got 'x' (str), expected nothing: ServerArgs
sglang.attention_backend=flashinfr
    sglang.attention_backend: got 'flashinfr' (str), which SGLang refuses: argument --attention-backend: invalid
        choice: 'flashinfr' (choose from 'triton',
sglang.context_length=12q
    sglang.context_length: got '12q' (str), which SGLang refuses: argument --context-length: Invalid
sglang.log_requests_level=7
    sglang.log_requests_level: got 7 (int), which SGLang refuses: argument --log-requests-level: invalid choice: 7
        (choose from 0, 1, 2, 3)
# SGLang rejects deprecated flags in its file of options.
sglang.disable_cuda_graph=true
    sglang.disable_cuda_graph: got true (bool), which SGLang refuses: Unsupported config option
sglang.attn_tp_size=2
    sglang.attn_tp_size: got 2 (int), not a field of ServerArgs
"""
)


@pytest.mark.parametrize(("overrides", "problem"), FORWARDED)
def test_forwarded_tables(problems, overrides, problem):
    (found,) = problems(*overrides)
    assert found.startswith(problem)


def test_the_sglang_table_of_a_server_elsewhere_needs_no_sglang(problems, monkeypatch):
    server_args_fields.cache_clear()
    monkeypatch.setitem(sys.modules, "sglang.srt.server_args", None)  # the import now fails
    assert problems("sglang.x=1", "engine.urls=[http://engine:30000]") == []
    (found,) = problems("sglang.x=1")
    assert found.startswith("sglang: can't be checked: sglang can't be imported: ")
    assert problems("sglang.port=1") == [
        "sglang.port: got 1 (int), expected nothing: engine.port sets it"
    ]


def test_the_servers_own_interpreter_is_asked(problems, tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\ntouch {tmp_path}/asked\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (found,) = problems("sglang.load_format=dumy", f"engine.python={python}")
    assert found.startswith("sglang.load_format: got 'dumy' (str), which SGLang refuses: ")
    assert found.endswith("; did you mean dummy?")
    assert (tmp_path / "asked").exists()
    python.write_text("#!/bin/sh\necho No module named megatron_dppo >&2\nexit 1\n")
    (found,) = problems("sglang.load_format=dummy", f"engine.python={python}")
    assert found == f"sglang: can't be checked: {python}: No module named megatron_dppo"


@pytest.mark.parametrize(
    "override",
    [
        "sglang.speculative_algorithm=STANDALONE",
        "sglang.speculative_algorithm=NEXTN",
        "sglang.speculative_algorithm=DFLASH",
        "sglang.speculative_adaptive=true",
        "sglang.speculative_use_rejection_sampling=true",
        "sglang.speculative_accept_threshold_single=0.9",
        "sglang.speculative_accept_threshold_acc=0.9",
        "sglang.speculative_token_map=map.pt",
        "sglang.disaggregation_mode=prefill",
        "sglang.disaggregation_mode=decode",
        "sglang.skip_tokenizer_init=true",
        "sglang.is_embedding=true",
        """sglang.json_model_override_args='{"rope_theta": 5}'""",
        "sglang.delete_ckpt_after_loading=true",
        "sglang.hicache_storage_backend=file",
        "sglang.enable_eplb=true",
        "sglang.moe_a2a_backend=deepep",
        "sglang.attn_cp_size=2",
        "sglang.dcp_size=2",
        "sglang.dwdp_size=2",
        "sglang.dp_size=2",
        "sglang.shared_experts_tp_size=1",
        "sglang.enable_dense_mlp_attn_tp=true",
        "sglang.moe_dense_tp_size=1",
        "sglang.ep_num_redundant_experts=1",
        "sglang.cpu_offload_gb=1",
        "sglang.weight_cache_mode=client",
        "sglang.max_ep_size=8",
        "sglang.model_impl=transformers",
        "sglang.load_balance_method=follow_bootstrap_room",
        "megatron.moe_router_force_load_balancing=true",
        "megatron.moe_expert_capacity_factor=0",
        "megatron.moe_expert_capacity_factor=1.25",
        "megatron.moe_input_jitter_eps=0.01",
        "megatron.moe_router_topk_scaling_factor=2.5",
        "megatron.window_size=[128, 0]",
        "megatron.rotary_interleaved=true",
        "megatron.softmax_type=learnable",
        "megatron.glu_linear_offset=1.0",
        "megatron.fp8_param=true",
        "megatron.cuda_graph_impl=local",
        "megatron.overlap_moe_expert_parallel_comm=true",
        "megatron.account_for_loss_in_pipeline_split=true",
        "megatron.tp_comm_overlap=true",
        "megatron.qk_clip=true",
    ],
)
def test_an_option_that_no_run_can_have_is_refused(problems, override):
    (found,) = problems(override)
    assert found.startswith(f"{override.partition('=')[0]}: got ")


def test_options_that_are_given_as_off_are_taken(problems):
    assert not problems(
        "sglang.speculative_algorithm=null",
        "sglang.speculative_accept_threshold_acc=1.0",
        "sglang.speculative_adaptive=false",
        "sglang.disaggregation_mode='null'",
        "sglang.skip_tokenizer_init=false",
        "sglang.json_model_override_args='{}'",
        "sglang.enable_eplb=false",
        "sglang.ep_num_redundant_experts=0",
        "sglang.moe_a2a_backend=none",
        "sglang.attn_dp_size=1",
        "sglang.cpu_offload_gb=0",
        "sglang.offload_group_size=-1",
        "sglang.weight_cache_mode=off",
        "sglang.model_impl=sglang",
        "sglang.load_balance_method=total_tokens",
        "megatron.moe_router_force_load_balancing=false",
        "megatron.moe_expert_capacity_factor=null",
        "megatron.moe_layer_freq=1",
        "megatron.moe_router_topk_scaling_factor=1.0",
        "megatron.cuda_graph_impl=none",
    )


def test_a_dispatcher_of_a_missing_library_is_refused(monkeypatch):
    monkeypatch.setattr(library_checks, "has_megatrons_deep_ep", lambda: False)
    (found,) = kernel_faults({"moe_token_dispatcher_type": "flex"})
    assert found.startswith("megatron.moe_token_dispatcher_type: got 'flex'")
    monkeypatch.setattr(library_checks, "has_megatrons_deep_ep", lambda: True)
    assert not list(kernel_faults({"moe_token_dispatcher_type": "flex"}))
    assert not list(kernel_faults({"moe_token_dispatcher_type": "alltoall"}))


def test_low_precision_is_compared_with_this_machines_gpu(monkeypatch):
    monkeypatch.setattr(library_checks, "has_visible_gpu", lambda: True)
    monkeypatch.setattr(platform, "compute_capability", lambda: (9, 0))
    (found,) = kernel_faults({"fp8": "e4m3", "fp8_recipe": "mxfp8"})
    assert found.startswith("megatron.fp8_recipe: got 'mxfp8'")
    assert not list(kernel_faults({"fp8": "e4m3", "fp8_recipe": "blockwise"}))


def read_library_defaults(table):
    if table.name == "megatron":
        from megatron.core.transformer.transformer_config import TransformerConfig

        return {f.name: f.default for f in dataclasses.fields(TransformerConfig)}
    return vars(_parser().parse_args(["--model-path=any"]))


@pytest.mark.parametrize("table", [MEGATRON, SGLANG], ids=["megatron", "sglang"])
def test_the_lists_fit_the_library(table):
    """Each listed name is a field that can be set, and is in one list only. The library's default of each option in
    ``off`` counts as off."""
    fields = server_args_fields() if table is SGLANG else library_fields(table.name)
    settable = fields.types.keys() - fields.computed
    assert table.off.keys() <= settable
    assert table.options.keys() <= settable
    known_options = table.options_with(OptionFact.KNOWN)
    assert table.neutral.keys() <= table.off.keys()
    assert not {*table.owned, *table.fixed, *table.off}.intersection(known_options)
    library_defaults = read_library_defaults(table)
    off_defaults = {name: library_defaults[name] for name in table.off if name in library_defaults}
    assert not list(table.faults(off_defaults))
    assert not list(table.untried(dict.fromkeys(known_options, 7)))


def test_what_nobody_has_tried_is_passed_on_with_a_warning(problems):
    tables = ((MEGATRON, "flash_decode", True), (SGLANG, "enable_torch_compile", True))
    for table, key, value in tables:
        assert not problems(f"{table.name}.{key}=true")
        (warning,) = table.untried({key: value})
        assert warning.startswith(f"{table.name}.{key}: got true (bool)")
        assert not list(table.untried({key: False}))


def test_a_check_tells_the_warnings_of_both_tables(tmp_path):
    path = write_config(tmp_path, minimal(tmp_path))
    overrides = [
        "megatron.flash_decode=true",
        "sglang.enable_torch_compile=true",
        "sglang.tp_size=1",
    ]
    warnings = library_checks.untried_options(load_config(path, overrides))
    assert [warning.partition(":")[0] for warning in warnings] == [
        "megatron.flash_decode",
        "sglang.enable_torch_compile",
    ]


@pytest.mark.parametrize(
    ("table", "capability", "key"),
    [
        ({"fp8": "e4m3"}, (8, 0), "fp8_recipe"),
        ({"fp8": "e4m3"}, (9, 0), None),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, (8, 9), "fp8_recipe"),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, (9, 0), None),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, (9, 0), "fp8_recipe"),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, (10, 0), None),
        ({"fp8_recipe": "mxfp8"}, (9, 0), None),
        ({"fp4": "e2m1"}, (9, 0), "fp4"),
    ],
)
def test_low_precision_that_a_gpu_does_not_have_is_refused(table, capability, key):
    faults = list(precision_faults(table, capability))
    assert [fault.partition(":")[0] for fault in faults] == ([f"megatron.{key}"] if key else [])


def test_the_variables_of_a_precision_are_set_on_hopper_alone(tmp_path, monkeypatch):
    blockwise = {"fp8": "e4m3", "fp8_recipe": "blockwise"}
    assert is_blockwise(blockwise)
    assert not is_blockwise({"fp8": "e4m3"})
    monkeypatch.setattr(gpus, "DRIVER", tmp_path)
    folder = tmp_path / "gpus" / "0000:18:00.0"
    folder.mkdir(parents=True)
    scales = "NVTE_FP8_BLOCK_SCALING_FP32_SCALES"
    for model, expected in (("NVIDIA H100 80GB HBM3", "1"), ("NVIDIA B200", None)):
        (folder / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t 1\n")
        environment = {}
        set_precision(blockwise, environment)
        assert environment.get(scales) == expected
    (folder / "information").write_text("Model: NVIDIA H200\n")
    environment = {scales: "0"}
    set_precision(blockwise, environment)
    assert environment == {scales: "0"}
    environment = {}
    set_precision({"deterministic_mode": True}, environment)
    assert environment == {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def test_every_option_of_ours_is_one_of_megatrons():
    for table in (DDP, OPTIMIZER):
        assert {*table.owned, *table.fixed} <= set(library_fields(table.name).types)


@pytest.mark.parametrize(
    "overrides",
    [
        ("sglang.ep_size=2",),
        ("sglang.tp_size=2", "sglang.ep_size=0"),
        ("sglang.tp_size=4", "sglang.ep_size=3"),
    ],
)
def test_expert_parallel_servers_divide_their_ranks(problems, overrides):
    assert not problems("sglang.tp_size=2", "sglang.ep_size=2")
    faults = problems(*overrides)
    assert faults
    assert all(fault.startswith("sglang.ep_size: got") for fault in faults)


@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("attn_dp_size", ("sglang.attn_dp_size=2",)),
        ("attn_dp_size", ("sglang.tp_size=4", "sglang.attn_dp_size=3")),
        ("dp_size", ("sglang.tp_size=2", "sglang.enable_dp_attention=true", "sglang.dp_size=3")),
        ("enable_dp_lm_head", ("sglang.tp_size=2", "sglang.enable_dp_lm_head=true")),
        ("tp_size", ("sglang.tp_size=16", "sglang.attn_dp_size=2")),
        (
            "dp_size",
            (
                *("sglang.tp_size=4", "sglang.attn_dp_size=2"),
                *("sglang.enable_dp_attention=true", "sglang.dp_size=2"),
            ),
        ),
        (
            "max_running_requests",
            ("sglang.tp_size=4", "sglang.attn_dp_size=4", "sglang.max_running_requests=3"),
        ),
    ],
)
def test_attention_replicas_divide_a_servers_ranks(problems, key, overrides):
    assert not problems(
        "sglang.tp_size=2", "sglang.attn_dp_size=2", "sglang.enable_dp_lm_head=true"
    )
    # Eight ranks could not divide the model's four attention heads, but the four ranks of each replica can.
    assert not problems("sglang.tp_size=8", "sglang.enable_dp_attention=true", "sglang.dp_size=2")
    (fault,) = problems(*overrides)
    assert fault.startswith(f"sglang.{key}: got")


def test_every_option_is_written_by_a_flag_that_sglang_has():
    fields = server_args_fields()
    flags: dict[str, list[str]] = {}
    for action in _parser()._actions:
        flags.setdefault(action.dest, []).extend(action.option_strings)
    names = fields.types.keys() - fields.computed
    assert [name for name in names if f"--{flag_of(name)}" not in flags[name]] == []
    assert not table_faults({"fp8_gemm_runner_backend": "triton"})


def test_ddp_and_optimizer_tables_become_megatrons_values():
    assert library_values(DDP, {"grad_reduce_in_fp32": False, "bucket_size": 9}) == {
        "grad_reduce_in_fp32": False,
        "bucket_size": 9,
    }
    zero_count = {"log_num_zeros_in_grad": True}
    assert library_values(OPTIMIZER, zero_count) == zero_count
    moment_types = library_values(OPTIMIZER, {"exp_avg_dtype": "bfloat16"})
    assert moment_types == {"exp_avg_dtype": torch.bfloat16}
    with pytest.raises(ValueError, match=mentioning("main_grads_dtype")):
        library_values(OPTIMIZER, {"main_grads_dtype": "bfloat16"})


OFFLOAD_OVERRIDES = (
    *("model.dtype=bfloat16", "optimizer.distributed=true"),
    "megatron_optimizer.optimizer_cpu_offload=true",
)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("model.dtype=float32", "megatron_optimizer.optimizer_cpu_offload"),
        ("megatron_optimizer.optimizer_offload_fraction=0", "megatron_optimizer.optimizer_offload"),
        ("megatron_optimizer.exp_avg_dtype=bfloat16", "megatron_optimizer.exp_avg_dtype"),
    ],
)
def test_state_that_an_offloaded_optimizer_cant_have_is_named(problems, override, key):
    aware_key = "megatron_optimizer.use_precision_aware_optimizer"
    overrides = (*OFFLOAD_OVERRIDES, f"{aware_key}=true")
    assert not problems(*overrides, "megatron_optimizer.optimizer_offload_fraction=0.5")
    faults = problems(*overrides, override)
    assert faults
    assert all(fault.startswith((key, aware_key)) for fault in faults)


def test_bfloat16_moments_need_transformer_engine_unless_they_are_offloaded():
    bfloat16_options = {"use_precision_aware_optimizer": True, "exp_avg_dtype": "bfloat16"}
    assert list(adam_faults(bfloat16_options, has_fused_adam=False))
    assert not list(adam_faults(bfloat16_options, has_fused_adam=True))
    offload_options = {"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}
    assert not list(adam_faults(offload_options, has_fused_adam=False))


def test_forwarded_tables_that_fit(problems):
    assert not problems(
        "optimizer.distributed=true",
        "megatron_ddp.overlap_grad_reduce=true",
        "megatron_ddp.grad_reduce_in_fp32=false",
        "megatron_optimizer.log_num_zeros_in_grad=true",
        "megatron.moe_token_dispatcher_type=alltoall",
        "megatron.moe_input_jitter_eps=0",
        "megatron.recompute_modules=[core_attn]",
        "megatron.attention_backend=flash",
        "megatron.deterministic_mode=true",
        "sglang.mem_fraction_static=0.5",
        "sglang.tp_size=2",
        "sglang.max_total_tokens=8192",
        "sglang.cuda_graph_backend_decode=disabled",
        "sglang.gc_threshold=[1, 2]",
        "sglang.load_format=dummy",
        "sglang.context_length=128k",
        """sglang.cuda_graph_config='{"decode": {"backend": "full"}}'""",
    )


def test_megatron_gets_its_own_types():
    values = library_values(MEGATRON, {"attention_backend": "flash", "init_method_std": 0})
    assert isinstance(values["attention_backend"], Enum)
    assert values["attention_backend"].name == "flash"
    assert values["init_method_std"] == 0
    window = library_fields("megatron").types["window_size"]
    assert read_value(window, [128, 0]) == (128, 0)


def test_an_enumeration_stands_alone_or_beside_text():
    """YAML gives the name of a member. If a field's type is the enumeration alone, ``read_value`` turns the name into
    the member. Otherwise the type must include text, and Megatron turns the name into the member."""
    for annotation in library_fields("megatron").types.values():
        members = get_args(annotation) if get_origin(annotation) is Union else ()
        if any(isinstance(m, type) and issubclass(m, Enum) for m in members):
            assert str in members


@pytest.mark.parametrize("value", [float("inf"), -1e-300, 2**70, "é\n", [1, [None]], {"a": {}}])
def test_values_survive_the_reading(value):
    assert read_value(type(value), value) == value


@pytest.mark.parametrize("table", ["megatron", "sglang"])
def test_every_field_of_the_libraries_can_be_checked(table):
    fields = server_args_fields() if table == "sglang" else library_fields(table)
    for annotation in fields.types.values():
        TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))


def test_the_library_s_defaults_fit_what_it_declares():
    """Null defaults are left out: Megatron has them also for fields whose declared type excludes null."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    for name, annotation in library_fields("megatron").types.items():
        default = getattr(TransformerConfig, name, None)
        if isinstance(default, bool | int | float | str):
            assert read_value(annotation, default) == default


def test_every_key_that_a_section_owns_is_a_field_of_the_library():
    # Requests have these options, not servers.
    sampling = {"temperature", "top_p", "top_k", "max_new_tokens"}
    assert {*MEGATRON.owned, *MEGATRON.fixed} <= library_fields("megatron").types.keys()
    assert {*SGLANG.owned, *SGLANG.fixed} - sampling <= server_args_fields().types.keys()
