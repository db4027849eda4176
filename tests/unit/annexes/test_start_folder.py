"""Commands that show a saved run whose configuration has relative paths, from another folder than the run's start."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.diagnostics import report, watch
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.run_state import state_text
from megatron_dppo.metrics import table
from megatron_dppo.metrics.records import RECORDS_FILE, SUMMARY_FILE
from tests.metric_tables import restored_metrics
from tests.unit.config_files import minimal

MODULE = """
from megatron_dppo.metrics.row import Line, Metric

def measure(inputs, decisions):
    return inputs.log_probs

ROW = Metric("policy/{name}", "own", measure=measure, line=Line("Own {name}", "own"))
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """A finished run, as a relative path from the current folder, which is not the folder of the run's start.

    An own metric is a module in the folder of the start. Its name is that of the test.
    """
    start, elsewhere = tmp_path / "start", tmp_path / "elsewhere"
    for folder in (start, elsewhere):
        folder.mkdir()
    name = request.node.name
    (start / f"own_{name}.py").write_text(MODULE.replace("{name}", name))
    monkeypatch.chdir(start)
    with RunDirectory("run") as directory:
        changes = {
            "run": {"directory": "run", "steps": 2},
            "tracking": {"metrics": [f"own_{name}:ROW"]},
            "checkpoint": {"export_hf": False},
        }
        config = TrainConfig.model_validate(minimal(tmp_path) | changes)
        directory.config.write_text(resolved_yaml(config))
        rows = [{"step": step, f"policy/{name}": 0.1, "reward/mean": 0.5} for step in (1, 2)]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (directory.path / RECORDS_FILE).write_text(lines)
        (directory.path / SUMMARY_FILE).write_text(json.dumps({"steps": 2}))
    monkeypatch.chdir(elsewhere)
    with restored_metrics():
        yield Path("../start/run")


def test_report(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []
    monkeypatch.setattr(
        report, "finish", lambda axes, title, *rest, **options: titles.append(title)
    )
    report.main([str(run)])
    assert titles[-1] == "Own test_report"
    assert (run / "report.png").is_file()


def test_watch(run: Path) -> None:
    state = watch.RunView(run).state({})
    assert state["state"] == "ended: done"
    assert table.METRICS["policy/test_watch"].meaning == "own"


def test_the_state_of_a_finished_run(run: Path) -> None:
    assert state_text(run) == "ended: done"
