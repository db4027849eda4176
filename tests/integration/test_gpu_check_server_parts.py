"""The parts of the GPU check that start a server, as they run on a machine without a GPU."""

import pytest

from megatron_dppo.diagnostics.gpu_check import discover
from megatron_dppo.diagnostics.gpu_check.runner import run_part

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def result_of(name, folder, *overrides):
    part = next(part for part in discover() if part.name == name)
    result = run_part(part, folder / name, 0, 1500.0, lambda row: None, overrides=overrides)
    assert result.verdict == "good", result.why
    return result


def test_a_servers_log_probabilities_are_transformers(tmp_path):
    exact = result_of("generation", tmp_path).rows[-1]
    assert 0 < exact.figures["measured"] < 0.1


@pytest.mark.slow
def test_turns_on_one_device_by_both_strategies(tmp_path):
    rows = result_of("colocated", tmp_path).rows
    assert [row.holds for row in rows] == [True, True, True, None] * 2
    assert all(row.figures["switch"] > 0 for row in rows[3::4])


@pytest.mark.slow
def test_a_slice_is_measured_with_each_variant(tmp_path):
    result = result_of("slice", tmp_path, "optimizer.lr=2e-6")
    assert "optimizer.lr=2e-6" in (tmp_path / "slice" / "log.txt").read_text()
    steps = {row.label: row.figures for row in result.rows if row.label.endswith(": step")}
    variants = [label.removeprefix("2 layers, ").removesuffix(": step") for label in steps]
    assert variants == ["bf16", "R3", "FP8 rollouts", "no mask (pg-is)"]
    for figures in steps.values():
        assert min(figures[name] for name in ("generate", "train", "weight update")) > 0
        assert figures["tokens"] == 16 * 16
    assert steps["2 layers, FP8 rollouts: step"]["gap"] > steps["2 layers, bf16: step"]["gap"]
    # No gigabytes of weights are left.
    assert not list((tmp_path / "slice").rglob("model*.safetensors"))
