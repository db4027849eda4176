"""The planner's bytes of a rank against the tensors of the real trainer, layout by layout.

Weights, gradients and optimizer state are counted by storage after a step; activations by the tensors that autograd
saves, at their peak within the step. A random model does not give all experts the same number of tokens, so activations
are compared as the mean over the ranks of a pipeline stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.layouts import cases_of
from tests.ranks import run_ranks
from tests.tiny_models import save_tiny_model

TOKENS, MICRO_BATCHES = 256, 4
STATE_TOLERANCE, ACTIVATION_TOLERANCE = 0.01, 0.10
LAYERS = 4
CASES = cases_of(
    {
        "qwen3_moe": [
            "DP2",
            "DP2 distributed optimizer",
            "DP2 fp32 distributed optimizer",
            "TP2 ETP2",
            "TP2 EP2 distributed optimizer",
            "EP2",
            "EP2 recompute selective",
            "PP2",
            "PP2 recompute full",
            "PP2 VPP2",
            "CP2",
            "CP2 recompute selective",
            "EP2 LoRA",
            "TP2 EP2 LoRA shared router distributed optimizer",
        ],
        "qwen3": ["PP2", "TP2", "CP2 fp32", "TP2 LoRA fp32", "TP2 SP fp32"],
        "olmoe": ["TP2 EP2 fp32", "EP2", "EP2 LoRA"],
        "qwen2_moe": ["TP2 EP2", "EP2 fp32"],
        "qwen3_next": ["TP2 EP2 LoRA fp32"],
    }
)
STATE_ONLY = {
    "qwen3_moe TP2 EP2 LoRA shared router distributed optimizer",
    "qwen3_next TP2 EP2 LoRA fp32",
}
"""Cases whose activations are not compared. The planner does not count what trained routers keep beside frozen layers,
and of delta nets it counts only what their kernels keep on a GPU."""


def measure(folder: str, cases: dict[str, Any]) -> dict[str, dict[str, int]]:
    """Return the bytes of each case on this rank: weights, gradients, optimizer, activations."""
    return {
        name: _measure(str(Path(folder) / family), parallel, {"dtype": "bfloat16", **changes})
        for name, (family, parallel, changes) in cases.items()
    }


def _measure(hf_dir: str, parallel: dict[str, Any], changes: dict[str, Any]) -> dict[str, int]:
    from megatron_dppo.diagnostics.gpu_check import held_memory as memory
    from megatron_dppo.trainer.trainer import Trainer
    from tests.distributed.test_trainer_parity import policy_token_loss, run_config

    trainer = Trainer.read(run_config(hf_dir, {**parallel, "world_size": 2}, changes))
    try:
        multiple = trainer.share.sequence_multiple
        batches = _batches(trainer.topology.dp_rank, trainer.pad_multiple, multiple)
        with memory.saved_for_backward(trainer.held_tensors()["weights"]) as saved:
            trainer.train_mini_batch(batches, policy_token_loss, denominator=100.0)
        held = trainer.held_tensors()
        sizes = {part: memory.storage_bytes(tensors) for part, tensors in held.items()}
        return {**sizes, "activations": saved.peak}  # type: ignore[dict-item]
    finally:
        trainer.close()


def _batches(dp_rank: int, pad_multiple: int, multiple: int) -> list:
    import random

    from megatron_dppo.data.packing import pack
    from megatron_dppo.data.trajectory import Trajectory

    rng = random.Random(dp_rank)

    def sequence(number: int) -> Any:
        length = TOKENS // 4
        tokens = [rng.randrange(512) for _ in range(length)]
        mu = {"rollout_log_probs": [-6.0] * (length - 4)}
        return Trajectory.of_response(
            tokens[:4], tokens[4:], problem_id=number, advantage=1.0, columns=mu
        )

    return [
        pack(
            [sequence(i) for i in range(4)], indices=range(4), trains=[True] * 4, pad_multiple=pad_multiple,
            sequence_multiple=multiple,
        )
        for _ in range(MICRO_BATCHES)
    ]  # fmt: skip


def plan_ranks(
    family: str, parallel: dict[str, Any], changes: dict[str, Any], folder: Path
) -> list:
    """Return the planned (state, activations) of each rank of the case."""
    from megatron_dppo.cluster.planner.activations import activation_bytes
    from megatron_dppo.cluster.planner.facts import trainer_facts
    from megatron_dppo.cluster.planner.trainer_state import state_bytes
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.spec import TrainerSpec
    from tests.distributed.test_trainer_parity import run_config

    config = run_config(
        str(folder / family), {**parallel, "world_size": 2}, {"dtype": "bfloat16", **changes}
    )
    shape = load_model_shape(folder / family)
    spec = TrainerSpec.of(config, shape)
    job = trainer_facts(config, spec, shape, MICRO_BATCHES, TOKENS, gpu=False)
    stages = [job.layout.coordinates(rank).pp for rank in range(2)]
    return [(state_bytes(job, s), activation_bytes(job, s, busiest=1.0)) for s in stages]


@pytest.fixture(scope="module")
def measurements(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_model(folder / "qwen3_moe", "qwen3_moe", layers=LAYERS)
    save_tiny_model(folder / "olmoe", "olmoe", layers=LAYERS)
    save_tiny_model(folder / "qwen2_moe", "qwen2_moe", layers=LAYERS)
    save_tiny_model(folder / "qwen3_next", "qwen3_next", layers=LAYERS)
    save_tiny_model(folder / "qwen3", "qwen3", layers=LAYERS, tied=True)
    return folder, run_ranks("tests.distributed.test_planner_memory:measure", 2, str(folder), CASES)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_planned_is_measured(name: str, measurements: tuple[Path, list[dict]]) -> None:
    folder, ranks = measurements
    expected = plan_ranks(*CASES[name], folder)
    for (state, _), rank in zip(expected, ranks, strict=True):
        for part in ("weights", "gradients", "optimizer"):
            assert getattr(state, part) == pytest.approx(rank[name][part], rel=STATE_TOLERANCE), (
                part
            )
    if name in STATE_ONLY:
        return
    stages = [[r] for r in range(2)] if "pipeline" in CASES[name][1] else [[0, 1]]
    for members in stages:
        measured = sum(ranks[r][name]["activations"] for r in members) / len(members)
        saved = expected[members[0]][1].saved
        print(f"{name}, ranks {members}: measured {measured:,.0f}, planned {saved:,}")
        assert saved == pytest.approx(measured, rel=ACTIVATION_TOLERANCE)


def measure_gate(hidden: int) -> list[int]:
    """Return the bytes that a shared expert keeps for ``TOKENS`` tokens, without a gate and with a gate."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dppo.diagnostics.gpu_check import held_memory as memory
    from megatron_dppo.model.layout import Layout
    from megatron_dppo.trainer.topology import destroy_topology, init_distributed, init_topology

    init_distributed(1)
    init_topology(Layout())
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=4,
        moe_shared_expert_intermediate_size=hidden,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16,
    )
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    peaks = []
    for has_gate in (False, True):
        expert = SharedExpertMLP(
            config, linears, has_gate, ProcessGroupCollection.use_mpu_process_groups()
        )
        states = torch.randn(TOKENS, 1, hidden, dtype=torch.bfloat16, requires_grad=True)
        with memory.saved_for_backward(expert.parameters()) as saved:
            expert(states)
        peaks.append(saved.peak)
    destroy_topology()
    return peaks


@pytest.mark.distributed
def test_the_gate_of_a_shared_expert(tmp_path: Path) -> None:
    from dataclasses import replace

    from megatron_dppo.cluster.planner.activations import layer_bytes
    from megatron_dppo.cluster.planner.facts import trainer_facts
    from megatron_dppo.model.families import load_model_shape
    from megatron_dppo.spec import TrainerSpec
    from tests.distributed.test_trainer_parity import run_config

    save_tiny_model(tmp_path, "qwen2_moe", layers=LAYERS)
    config = run_config(str(tmp_path), {"world_size": 1}, {"dtype": "bfloat16"})
    shape = load_model_shape(tmp_path)
    planned_bytes = []
    for has_gate in (False, True):
        gated_shape = replace(shape, gates_shared_expert=has_gate)
        spec = TrainerSpec.of(config, gated_shape)
        job = trainer_facts(config, spec, gated_shape, 1, TOKENS, gpu=False)
        planned_bytes.append(round(TOKENS * layer_bytes(job).mlp))
    [peaks] = run_ranks("tests.distributed.test_planner_memory:measure_gate", 1, shape.hidden_size)
    assert planned_bytes[1] - planned_bytes[0] == peaks[1] - peaks[0]
