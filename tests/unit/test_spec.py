"""The facts of a run, resolved once: hand-worked values, equal faults, and the file in the run's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_dppo.config import ConfigError, check_config, load_config
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.spec import Roles, RunSpec
from megatron_dppo.spec.placement import TeacherRole
from tests.unit.config_files import DENSE, MOE, minimal, write_checkpoint, write_config
from tests.unit.test_config_checks import REFUSED


@pytest.fixture
def spec_of(tmp_path: Path) -> Any:
    """A function that returns the facts of the minimal configuration with overrides."""

    def resolved(*overrides: str, model: dict[str, Any] = MOE) -> RunSpec:
        path = write_config(tmp_path, minimal(tmp_path, model))
        return RunSpec.of(load_config(path, ["engine.device=cpu", *overrides]))

    return resolved


def test_the_layout_and_what_follows_from_it(spec_of: Any) -> None:
    trainer = spec_of("parallel.world_size=4", "parallel.tensor=2").trainer
    assert (trainer.layout.tensor, trainer.layout.data) == (2, 2)
    # A mixture of experts with tensor parallelism has sequence parallelism: two ranks divide the tokens.
    assert trainer.sequence_parallel
    assert trainer.token_multiple == 2
    # Two context-parallel ranks have four chunks of a sequence.
    context = spec_of("parallel.world_size=2", "parallel.context=2", model=DENSE).trainer
    assert (context.sequence_parallel, context.token_multiple) == (False, 4)
    # bfloat16 weights with several ranks that hold them share the optimizer's state.
    assert context.distributed_optimizer
    assert not spec_of().trainer.distributed_optimizer


def test_a_batch_and_its_longest_sequences(spec_of: Any) -> None:
    rollout = spec_of("data.max_prompt_tokens=100", "evaluation.max_response_tokens=80").rollout
    assert (rollout.responses, rollout.steps) == (8 * 4, 2)
    assert (rollout.longest, rollout.sequence_tokens) == (164, 180)
    episodes = spec_of(
        "data.max_prompt_tokens=100",
        "environment.name=calculator",
        "environment.max_turns=3",
        "environment.max_observation_tokens=10",
    ).rollout
    assert episodes.longest_response == 3 * (64 + 10)


@pytest.mark.parametrize(
    ("overrides", "topk"),
    [
        ((), 0),
        (("algorithm.name=dppo-topk-tv",), 20),
        (("algorithm.name=dppo-topk-tv", "algorithm.options.topk=7"), 7),
        (("algorithm.name=dppo-exact-tv",), 511),
        (("algorithm.name=recomputed-exact-tv",), 0),
        (("rollout.topk_log_probs=3",), 3),
    ],
)
def test_top_k_travels_as_the_algorithm_reads_it(
    spec_of: Any, overrides: tuple[str, ...], topk: int
) -> None:
    assert spec_of(*overrides).rollout.topk == topk


def test_servers_and_their_options(spec_of: Any) -> None:
    spec = spec_of(
        "engine.servers=3", "sglang.tp_size=2", "sglang.ep_size=2", "model.dtype=float32"
    )
    assert spec.servers.started == 3
    assert spec.servers.layout == EngineLayout(2, 2)
    assert spec.servers.options["tp_size"] == 2
    assert spec.servers.options["dtype"] == "float32"
    assert spec.roles == Roles(1, 3, 2, router=True)
    attached = spec_of("engine.urls=[http://h:1]")
    assert (attached.servers.started, attached.servers.urls) == (0, ("http://h:1",))
    assert not attached.roles.router


def test_a_teacher_has_servers_of_its_own(spec_of: Any, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "teacher", DENSE | {"torch_dtype": "float32"})
    teacher = f"{{hf_checkpoint: {folder}, servers: 2, sglang: {{tp_size: 2}}}}"
    spec = spec_of(
        f"distillation.teachers={{big: {teacher}}}",
        "engine.quantization=null",
        "rollout.router_replay=true",
        "data.max_prompt_tokens=100",
    )
    assert spec.roles.teachers == (TeacherRole("big", 2, 2),)
    (big,) = spec.teachers
    assert (big.name, big.model.shape.family, big.model.dtype) == ("big", "qwen3", "float32")
    assert (big.servers.started, big.servers.layout) == (2, EngineLayout(2))
    assert big.servers.options["model_path"] == str(folder)
    # Only the policy's servers record routing.
    assert not big.servers.options["enable_return_routed_experts"]
    assert spec.servers.options["enable_return_routed_experts"]
    assert big.servers.sequence_tokens == 100 + 64
    longer = f"{{hf_checkpoint: {folder}, prompt_template: '{{answer}}', max_prompt_tokens: 300}}"
    assert (
        spec_of(f"distillation.teachers={{big: {longer}}}").teachers[0].servers.sequence_tokens
        == 364
    )
    attached = spec_of(
        f"distillation.teachers={{big: {{hf_checkpoint: {folder}, urls: [http://h:1]}}}}"
    )
    assert attached.roles.teachers == ()
    assert attached.teachers[0].servers.urls == ("http://h:1",)


def test_a_replay_starts_no_server(spec_of: Any, tmp_path: Path) -> None:
    batches = tmp_path / "rollouts"
    batches.mkdir()
    (batches / "step_000001.safetensors").touch()
    spec = spec_of(f"rollout.replay_from={batches}", "engine.servers=2")
    assert spec.rollout.replays
    assert spec.servers.started == 0
    assert spec.roles == Roles(1)


def test_adapters_are_sent_or_merged(spec_of: Any) -> None:
    lora = ("lora.rank=4", "lora.target_modules=[q_proj,k_proj,v_proj]")
    merged = spec_of(*lora).model
    assert merged.adapters is not None
    assert (merged.adapters.rank, merged.sends_adapters) == (4, False)
    sent = spec_of(*lora, "lora.update=adapters", "weight_sync.strategy=disk")
    assert sent.model.sends_adapters
    assert sent.servers.options["max_lora_rank"] == 4
    assert spec_of().model.adapters is None


SEVERAL_FAULTS = [
    ("sglang.tp_size=3", "rollout.stop_token_ids=[600]"),
    ("lora.rank=4", "lora.target_modules=[nothing]"),
    ("algorithm.name=dppo-topk-tv", "rollout.topk_log_probs=19"),
    ("engine.port=65535", "engine.servers=2", "rollout.top_p=0.9"),
]


@pytest.mark.parametrize("overrides", [*(words for words, _ in REFUSED), *SEVERAL_FAULTS])
def test_every_fault_of_the_checks_is_raised_with_its_key(
    tmp_path: Path, overrides: Sequence[str]
) -> None:
    config = load_config(write_config(tmp_path, minimal(tmp_path)), overrides)
    with pytest.raises(ConfigError) as of_checks:
        check_config(config)
    with pytest.raises(ConfigError) as of_spec:
        RunSpec.of(config)
    assert of_spec.value.faults == of_checks.value.faults


def test_the_file_in_the_runs_folder(spec_of: Any, tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.write_spec(spec_of("engine.servers=5"))
        # A resumed run writes its own facts.
        directory.write_spec(spec_of("algorithm.name=dppo-topk-tv"))
    facts = json.loads((tmp_path / "run" / "spec.json").read_text(), parse_constant=pytest.fail)
    assert facts["servers"]["started"] == 1
    assert facts["model"]["shape"]["vocab_size"] == 511
    assert facts["rollout"]["topk"] == 20
    assert facts["algorithm"]["name"] == "dppo-topk-tv"
    assert (facts["algorithm"]["anchor"], facts["algorithm"]["divergence"]) == (
        "rollout",
        "topk_tv",
    )
    assert facts["algorithm"]["numbers"]["topk"] == 20
    assert "ratio_cap" not in facts["algorithm"]["numbers"]
