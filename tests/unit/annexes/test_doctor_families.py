"""The doctor's reference for each family: its routers, and its caches, as transformers builds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.reference import Reference
from megatron_dppo.model.families import FAMILIES
from tests.tiny_models import R1_FORM, save_tiny_model

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family, table in FAMILIES.items() if table.expert},
    "R1's form": ("deepseek_v3", R1_FORM),
}
WITH_DELTA_NETS = ("qwen3_next", "qwen3_5_moe")


def make_reference(folder: Path, case: str) -> Reference:
    family, options = CASES[case]
    return Reference(save_tiny_model(folder, family, seed=1, layers=3, **options))


def responses() -> list[Trajectory]:
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 500, length) for length in (9, 13)]
    return [Trajectory.of_response(row[:5], row[5:], problem_id=i) for i, row in enumerate(ids)]


def largest_difference(logits: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(logits, expected, strict=True))


@contextmanager
def record_choices(model: Reference) -> Iterator[list[Tensor]]:
    """Record the experts that each router chooses in a pass, in the order of the layers."""
    chosen: list[Tensor] = []
    hooks = [
        gate.register_forward_hook(lambda _, __, answer: chosen.append(answer[2]))
        for gate in model.gates
    ]
    yield chosen
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("case", CASES)
def test_experts_as_a_router_chose_them_change_nothing_and_others_do(
    tmp_path: Path, case: str
) -> None:
    model = make_reference(tmp_path, case)
    rows = {}
    natural = []
    for trajectory in responses():
        with record_choices(model) as chosen:
            natural += model.sampled_logits([trajectory])
        rows[trajectory.problem_id] = torch.stack(chosen, 1)[:-1]
    with model.routed(lambda trajectory: rows[trajectory.problem_id]):
        assert largest_difference(model.sampled_logits(responses()), natural) < 1e-5
    with model.routed(lambda trajectory: rows[trajectory.problem_id].roll(1, 0)):
        assert largest_difference(model.sampled_logits(responses()), natural) > 1e-3


@pytest.mark.parametrize("case", WITH_DELTA_NETS)
def test_responses_after_a_cache_with_states_of_delta_nets(tmp_path: Path, case: str) -> None:
    model = make_reference(tmp_path, case)
    natural = model.sampled_logits(responses())
    with model.prompts_cached_by(model):
        assert largest_difference(model.sampled_logits(responses()), natural) < 1e-5
    with model.cached_in_bfloat16(prompts=False):
        assert 1e-5 < largest_difference(model.sampled_logits(responses()), natural) < 1e-1
