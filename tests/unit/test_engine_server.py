"""The options and the environment of an engine server, and the checks of servers that the run did not start. No server
is started here."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from pathlib import Path

import pytest
from smg.router_args import RouterArgs

from megatron_dppo.config.loading import merged
from megatron_dppo.config.machine import engine_device
from megatron_dppo.config.schema import EngineConfig, TrainConfig
from megatron_dppo.engine.errors import EngineStartError
from megatron_dppo.engine.launch_server import host_flags, redact_keys, refuse_other_layouts
from megatron_dppo.engine.options import (
    ServerHosts,
    bind_cores,
    server_environment,
    server_options,
    write_options,
)
from megatron_dppo.engine.process import EngineProcess
from megatron_dppo.engine.running_server import SGLANG_VERSION, compare_server
from megatron_dppo.fleet.http_router import http_router_options
from megatron_dppo.spec import RunSpec, ServersSpec
from megatron_dppo.system.ports import free_port
from tests.patience import run_patiently
from tests.small_config import small_config
from tests.tiny_models import save_tiny_model

MODEL = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


DENSE = {
    **{name: value for name, value in MODEL.items() if "expert" not in name and "moe" not in name},
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
}


def run_config(folder: Path, **sections) -> TrainConfig:
    (folder / "config.json").write_text(json.dumps(MODEL))
    sizes = {
        "data": {"max_prompt_tokens": 100},
        "rollout": {"max_response_tokens": 28},
        "engine": {"device": "cpu"},
    }
    return small_config(folder, folder, **merged(sizes, sections))


def spec_of(folder: Path, **changed_sections) -> RunSpec:
    return RunSpec.of_checked(run_config(folder, **changed_sections))


def servers_of(folder: Path, **changed_sections) -> ServersSpec:
    return spec_of(folder, **changed_sections).servers


def differences(spec: RunSpec, info: dict, model_info: dict) -> list[str]:
    return compare_server(spec.model, spec.servers, info, model_info)


def test_options_of_a_cpu_server(tmp_path):
    options = server_options(servers_of(tmp_path), host="127.0.0.1", port=31000, seed=5)
    assert options["model_path"] == str(tmp_path)
    assert (options["host"], options["port"]) == ("127.0.0.1", 31000)
    assert (options["device"], options["attention_backend"]) == ("cpu", "torch_native")
    assert (options["random_seed"], options["dtype"]) == (5, "float32")
    assert options["weight_version"] == "0"
    assert options["enable_return_routed_experts"] is False
    assert options["sleep_on_idle"] is True
    assert "speculative_ngram_capacity" not in options
    drafting = servers_of(tmp_path, sglang={"speculative_algorithm": "NGRAM"})
    options = server_options(drafting, host="127.0.0.1", port=31000, seed=5)
    assert options["speculative_ngram_capacity"] == 200_000
    assert not {"api_key", "admin_api_key"} & set(options)


def test_options_of_a_gpu_server_leave_its_memory_and_kernels_to_sglang(tmp_path):
    servers = servers_of(tmp_path, engine={"device": "cuda"}, rollout={"router_replay": True})
    options = server_options(servers, host="h", port=1, seed=1)
    assert options["device"] == "cuda"
    assert options["enable_return_routed_experts"] is True
    assert not {"attention_backend", "max_total_tokens", "sleep_on_idle"} & set(options)
    assert "SGLANG_PLATFORM" not in server_environment(EngineConfig(), servers)


def test_experts_on_a_gpu_get_the_kernel_that_leaves_their_layout(tmp_path):
    def kernel(**changed_sections) -> object:
        servers = servers_of(tmp_path, **changed_sections)
        return server_options(servers, host="h", port=1, seed=1).get("moe_runner_backend")

    assert kernel(engine={"device": "cpu"}) is None
    assert kernel(engine={"device": "cuda"}) == "triton"
    config = run_config(tmp_path, engine={"device": "cuda"})
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    servers = RunSpec.of_checked(config).servers
    assert "moe_runner_backend" not in server_options(servers, host="h", port=1, seed=1)


def test_a_server_on_the_trainers_gpus_can_let_go_of_its_memory(tmp_path):
    def options(device, placement) -> dict:
        servers = servers_of(tmp_path, engine={"device": device, "placement": placement})
        return server_options(servers, host="h", port=1, seed=1)

    assert options("cuda", "colocated")["enable_memory_saver"] is True
    for plain_options in (options("cuda", "separate"), options("cpu", "colocated")):
        assert "enable_memory_saver" not in plain_options


@pytest.mark.parametrize(
    "names", [{"attn_dp_size": 4}, {"enable_dp_attention": True, "dp_size": 4}]
)
def test_attention_replicas_have_sglangs_current_name_and_a_cache_each(tmp_path, names):
    plain = server_options(servers_of(tmp_path), host="h", port=1, seed=1)
    servers = servers_of(tmp_path, sglang={"tp_size": 4, **names})
    options = server_options(servers, host="h", port=1, seed=1)
    assert options["attn_dp_size"] == 4
    assert not {"enable_dp_attention", "dp_size"} & set(options)
    assert 4 * options["max_total_tokens"] == plain["max_total_tokens"]
    assert (
        server_environment(EngineConfig(), servers)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 3
    )


def test_a_server_that_is_sent_adapters_has_room_for_them(tmp_path):
    def options(device, **lora) -> dict:
        servers = servers_of(tmp_path, engine={"device": device}, lora=lora)
        all_options = server_options(servers, host="h", port=1, seed=1)
        return {name: value for name, value in all_options.items() if "lora" in name}

    lora = {"rank": 4, "target_modules": ["o_proj", "q_proj"], "update": "adapters"}
    expected = {
        "enable_lora": True,
        "max_lora_rank": 4,
        "lora_target_modules": ["q_proj", "o_proj"],
        "max_loras_per_batch": 2,
    }
    assert options("cuda", **lora) == expected
    assert options("cpu", **lora) == {**expected, "lora_backend": "torch_native"}
    assert options("cpu", rank=4) == {}


def test_a_server_takes_the_devices_that_it_is_given(tmp_path):
    def base_gpu_id(device: str) -> object:
        servers = servers_of(tmp_path, engine={"device": device})
        return server_options(servers, host="h", port=1, seed=1, first_device=4).get("base_gpu_id")

    assert base_gpu_id("cuda") == 4
    assert base_gpu_id("cpu") is None


def test_each_host_of_a_server_over_several_finds_itself(tmp_path):
    servers = servers_of(tmp_path, sglang={"tp_size": 4})
    hosts = ServerHosts({"n3": "10.0.0.3", "n2": "10.0.0.2"}, port=21004)
    options = server_options(servers, host="10.0.0.3", port=21003, seed=1, hosts=hosts)
    assert (options["nnodes"], options["dist_init_addr"]) == (2, "10.0.0.3:21004")
    assert "nnodes" not in server_options(servers, host="h", port=1, seed=1)
    environment = server_environment(EngineConfig(), servers, hosts)
    first, second = ({**environment, "SLURMD_NODENAME": name} for name in ("n3", "n2"))
    assert host_flags(first) == ["--node-rank", "0", "--host", "10.0.0.3"]
    assert host_flags(second) == ["--node-rank", "1", "--host", "10.0.0.2"]
    assert host_flags(server_environment(EngineConfig(), servers)) == []
    assert ServerHosts({"a": "fd00::1"}, 7).options["dist_init_addr"] == "[fd00::1]:7"


def test_the_ranks_of_each_host_share_its_cores(tmp_path, monkeypatch):
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    hosts = ServerHosts({"a": "10.0.0.1", "b": "10.0.0.2"}, port=1)
    env = server_environment(EngineConfig(), servers_of(tmp_path, sglang={"tp_size": 4}), hosts)
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3|0,1|2,3"


def test_the_router_knows_its_options_and_binds_nothing_public():
    router_fields = {field.name for field in dataclasses.fields(RouterArgs)}
    options = http_router_options("127.0.0.1", 1, 2, "power_of_two")
    assert set(options) <= router_fields
    assert (options["host"], options["prometheus_host"]) == ("127.0.0.1", "127.0.0.1")
    assert (options["port"], options["prometheus_port"]) == (1, 2)


def test_the_table_overrides_defaults_and_none_leaves_sglangs(tmp_path):
    table = {
        "max_total_tokens": 4096,
        "sleep_on_idle": False,
        "tp_size": 2,
        "chunked_prefill_size": None,
    }
    options = server_options(servers_of(tmp_path, sglang=table), host="h", port=1, seed=1)
    assert (options["max_total_tokens"], options["sleep_on_idle"], options["tp_size"]) == (
        4096,
        False,
        2,
    )
    assert "chunked_prefill_size" not in options


def test_the_cache_holds_every_request_within_its_budget(tmp_path):
    # A token has 2 (key, value) x 2 layers x 2 heads x 16 x 4 bytes = 512 bytes. All 256 requests of 128 tokens fit.
    assert servers_of(tmp_path).options["max_total_tokens"] == 256 * 128
    # 2^30 / 512 = 2,097,152 tokens are the budget.
    many = servers_of(tmp_path, rollout={"max_concurrent_requests": 100_000})
    assert many.options["max_total_tokens"] == 2_097_152
    # In bf16 a token has half the size. Two sequences of 3,000,028 tokens exceed the budget, but they always fit.
    long = servers_of(tmp_path, data={"max_prompt_tokens": 3_000_000}, model={"dtype": "bfloat16"})
    assert long.options["max_total_tokens"] == max(2 * 3_000_028, 4_194_304)


def test_the_options_file_is_what_sglang_reads(tmp_path):
    path = tmp_path / "server.yaml"
    write_options({"model_path": "m", "sleep_on_idle": True, "gc_threshold": [1, 2]}, path)
    assert json.loads(path.read_text()) == {
        "model-path": "m",
        "sleep-on-idle": True,
        "gc-threshold": [1, 2],
    }


def test_the_environment_hides_the_trainer_and_binds_engine_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    env = server_environment(EngineConfig(), servers_of(tmp_path, sglang={"tp_size": 2}))
    assert "RANK" not in env
    assert env["SGLANG_PLATFORM"] == "torch_cpu"
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert env["SGLANG_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert env["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    assert bind_cores(2) == "0|0"


def test_the_device_is_what_the_run_says_or_what_is_there(tmp_path, monkeypatch):
    config = run_config(tmp_path, engine={"device": None})
    assert servers_of(tmp_path, engine={"device": "cuda"}).device == "cuda"
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert engine_device(config.engine) == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert engine_device(config.engine) == "cpu"


def test_a_port_in_use_is_told_before_anything_starts(tmp_path):
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        engine = engine_of(tmp_path, port)
        with pytest.raises(EngineStartError, match=rf"127.0.0.1:{port}"):
            engine.start()
    assert engine.poll() is None
    assert not engine.log_path.exists()


def engine_of(folder: Path, port: int) -> EngineProcess:
    config = run_config(folder)
    return EngineProcess(
        config,
        RunSpec.of_checked(config).servers,
        port=port,
        log_path=folder / "engine" / "server.log",
        seed=1,
        api_key="a",
        admin_api_key="b",
    )


def test_a_tail_of_a_log_that_is_not_there_is_empty(tmp_path):
    engine = engine_of(tmp_path, free_port("127.0.0.1"))
    assert engine.log_tail() == ""
    engine.log_path.parent.mkdir()
    engine.log_path.write_text("one\ntwo\nthree\n")
    assert engine.log_tail(2) == "two\nthree"
    engine.kill()


def test_keys_are_redacted_only_where_they_are_set():
    options = {"api_key": None, "admin_api_key": "secret", "port": 1}
    assert redact_keys(options) == {"api_key": None, "admin_api_key": "<redacted>", "port": 1}


def test_the_supervisors_half_loads_neither_torch_nor_sglang():
    code = (
        "import sys, megatron_dppo.engine.process;"
        "print([m for m in ('torch', 'sglang', 'aiohttp', 'numpy') if m in sys.modules])"
    )
    shown = run_patiently([sys.executable, "-c", code], check=True)
    assert shown.stdout.strip() == "[]"


def numbers(faults: list[str]) -> list[int]:
    """Return the numbers in the only fault: the server's tokens, the tokens of the longest sequence, and the tokens
    that a server needs for this sequence."""
    [fault] = faults
    return [int(number) for number in re.findall(r"\d+", fault)]


def test_a_server_elsewhere_is_compared_field_by_field(tmp_path):
    info = {
        "version": SGLANG_VERSION,
        "dtype": "float32",
        "quantization": None,
        "enable_return_routed_experts": False,
        "max_total_num_tokens": 130,
    }
    model_info = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    spec = spec_of(tmp_path)
    assert differences(spec, info, model_info) == []
    wrong = info | {"version": "0.5.22", "dtype": "bfloat16", "max_total_num_tokens": 129}
    lines = differences(
        spec_of(tmp_path, rollout={"router_replay": True}),
        wrong,
        model_info | {"model_type": "llama"},
    )
    assert [line.split(": ")[0] for line in lines] == [
        "sglang version",
        "model type",
        "dtype (--dtype)",
        "--enable-return-routed-experts",
        "--max-total-tokens",
    ]
    assert "'bfloat16', expected 'float32'" in lines[2]
    drafting = info | {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 1.0}
    (line,) = differences(spec, drafting, model_info)
    assert line.startswith("--speculative-algorithm: 'NGRAM'")
    ngrams = spec_of(tmp_path, sglang={"speculative_algorithm": "NGRAM"})
    assert differences(ngrams, drafting, model_info) == []
    eager = drafting | {"speculative_accept_threshold_acc": 0.9}
    (line,) = differences(ngrams, eager, model_info)
    assert line.startswith("speculative_accept_threshold_acc: 0.9")
    assert numbers(lines[4:]) == [129, 128, 130]
    assert differences(spec, info | {"max_req_input_len": 124}, model_info) == []
    short_input = differences(spec, info | {"max_req_input_len": 123}, model_info)
    assert numbers(short_input) == [129, 128, 130]
    assert short_input[0].startswith("--context-length: ")
    paged = info | {"page_size": 16, "max_total_num_tokens": 159}
    assert numbers(differences(spec, paged, model_info)) == [159, 128, 160]
    longer = spec_of(tmp_path, evaluation={"max_response_tokens": 29})
    assert numbers(differences(longer, info, model_info)) == [130, 129, 131]


def test_a_server_elsewhere_must_not_have_a_vision_tower(tmp_path):
    config = run_config(tmp_path)
    save_tiny_model(tmp_path, "qwen3_5_moe")
    spec = RunSpec.of_checked(config)
    info = {
        "version": SGLANG_VERSION,
        "dtype": "float32",
        "quantization": None,
        "max_total_num_tokens": 130,
    }
    model_info = {
        "model_type": "qwen3_5_moe",
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    }
    assert differences(spec, info, model_info | {"has_image_understanding": False}) == []
    for answer in ({"has_image_understanding": True}, {}):
        (line,) = differences(spec, info, model_info | answer)
        assert "language_model_only" in line


def test_a_server_elsewhere_must_have_lora_where_it_is_sent_adapters(tmp_path):
    lora = {"rank": 8, "update": "adapters"}
    adapters = spec_of(tmp_path, lora=lora)
    merged = spec_of(tmp_path, lora=lora | {"update": "merged"})
    info = dict.fromkeys(("version", "dtype", "quantization"), None)
    info |= {"max_total_num_tokens": 130, "enable_lora": None, "max_lora_rank": 4}
    model_info = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
    # The first two faults are of the version and the dtype, which are None.
    assert differences(adapters, info, model_info)[2:] == [
        "--enable-lora: None, expected True",
        "--max-lora-rank: 4, expected 8",
    ]
    assert len(differences(merged, info, model_info)) == 2


def test_what_a_starting_server_does_is_told_in_words_not_by_its_warnings(tmp_path):
    engine = engine_of(tmp_path, 31000)
    engine.log_path.parent.mkdir()
    stage_after_line = {
        "Cuda graph is disabled because of using torch native": "importing its libraries",
        "Load weight begin. avail mem=16.27 GB": "loading weights",
        "warnings.warn(": "loading weights",
        "Load weight end. elapsed=0.16 s": "laying out its cache",
        "Capture decode CUDA graph begin. bs=8": "capturing CUDA graphs",
    }
    assert engine._stage() == "importing its libraries"
    for line, stage in stage_after_line.items():
        with engine.log_path.open("a") as log:
            log.write(line + "\n")
        assert engine._stage() == stage


def test_a_deterministic_engine_is_asked_for_and_checked(tmp_path):
    options = server_options(servers_of(tmp_path), host="127.0.0.1", port=31000, seed=5)
    assert "enable_deterministic_inference" not in options
    deterministic = servers_of(tmp_path, engine={"device": "cpu", "deterministic": True})
    options = server_options(deterministic, host="127.0.0.1", port=31000, seed=5)
    assert options["enable_deterministic_inference"] is True
    assert options["chunked_prefill_size"] == -1
    on_gpu = servers_of(tmp_path, engine={"device": "cuda", "deterministic": True})
    assert "chunked_prefill_size" not in server_options(
        on_gpu, host="127.0.0.1", port=31000, seed=5
    )
    assert deterministic.switches == ("enable_deterministic_inference",)
    assert servers_of(tmp_path).switches == ()


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED",
        "SGLANG_ENABLE_EMBED_REPLICATION",
        "SGLANG_SHARED_EXPERT_TP1",
    ],
)
def test_weights_in_a_layout_that_no_update_knows_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    refuse_other_layouts()
    monkeypatch.setenv(name, "1")
    with pytest.raises(SystemExit, match=name):
        refuse_other_layouts()
