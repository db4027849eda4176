"""The parts of the GPU check that build a real trainer, as they run on a machine without a GPU."""

import pytest

from megatron_dppo.diagnostics.gpu_check import discover
from megatron_dppo.diagnostics.gpu_check.runner import run_part


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("layers", 4),
        ("full_layer", 9),
        pytest.param("context", 2, marks=pytest.mark.slow),
        pytest.param("cpu_twin", 16, marks=pytest.mark.slow),
        ("handles", 1),
        ("optimizer_state", 5),
    ],
)
def test_the_part_finds_all_as_it_should_be(name, rows, tmp_path):
    part = next(p for p in discover() if p.name == name)
    result = run_part(part, tmp_path / name, 0, 280.0, lambda row: None)
    assert result.verdict == "good", result.why
    assert len(result.rows) == rows
