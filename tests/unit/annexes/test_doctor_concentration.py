"""The doctor's line about how alike the responses of a group are."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_dppo.data.trajectory import Trajectory
from megatron_dppo.diagnostics.doctor.report import Doctor
from tests.unit.test_concentration import drawn

HALF = torch.full((1, 2), 0.5, dtype=torch.float64)
EQUAL, OPPOSITE = drawn(HALF, [0], 2), drawn(HALF, [1], 2)


def lines_about(group: list[Trajectory]) -> list[str]:
    doctor: Any = SimpleNamespace(
        _batch=group, _config=SimpleNamespace(rollout=SimpleNamespace(group_size=3))
    )
    return Doctor._concentration(doctor)


@pytest.mark.parametrize(
    ("group", "value", "is_normal"),
    [([EQUAL] * 3, "3.000", False), ([EQUAL, EQUAL, OPPOSITE], "0.333", True)],
)
def test_equal_responses_are_above_the_normal_range(group, value, is_normal):
    (line,) = lines_about(group)
    assert value in line
    assert line.endswith("normal") is is_normal


def test_a_batch_without_topk_has_no_line():
    assert lines_about([EQUAL.without("topk_ids")] * 3) == []
