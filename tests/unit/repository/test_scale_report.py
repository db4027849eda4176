"""The report at the recipes' sizes: its published page is current, and its figures equal those computed by hand."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from benchmark_rows import Quantity, read_rows, write_rows  # noqa: E402

from tests.messages import mentioning  # noqa: E402
from tests.patience import run_patiently  # noqa: E402
from tools.scale.page import page  # noqa: E402
from tools.scale.published import published_runs  # noqa: E402
from tools.scale.sizes import FULLEST, sizes  # noqa: E402


@pytest.fixture(scope="module")
def report() -> str:
    return page(sizes(), [])


def cells(report: str, quantity: str) -> dict[str, str]:
    """Size -> cell of the row ``quantity``."""
    lines = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("|")]
    heads = [line for line in lines if line[-1] == "how" and FULLEST in line]
    row = next(line for line in lines if line[0] == quantity)
    return dict(zip([h for h in heads[0] if h], row[1:], strict=True))


def test_the_published_page_is_the_reports():
    printed = run_patiently([sys.executable, "tools/scale_report.py"], cwd=ROOT, check=True)
    fresh = printed.stdout == (ROOT / "docs" / "evidence" / "scale.md").read_text()
    assert fresh, "run: python tools/scale_report.py --write"


def test_the_fullest_step_is_worked_by_hand(report):
    # 256 prompts x 16 responses of 16,384 tokens; prompts of 256 tokens are recorded too, the last token is not
    assert 256 * 16 * 16_384 == 67_108_864
    assert cells(report, "response tokens a step")[FULLEST] == "67.1 M"
    routing = 256 * 16 * (256 + 16_384 - 1) * 48 * 8
    assert cells(report, "routing a step, in memory")[FULLEST] == f"{routing / 1e9:.1f} GB"
    topk = 67_108_864 * 20 * 8
    assert cells(report, "Top-K a step, in memory")[FULLEST] == f"{topk / 1e9:.1f} GB"


def test_weight_updates_and_checkpoints_are_worked_by_hand(report):
    parameters = 30.5321e9
    assert cells(report, "bytes to each engine GPU")["30B-A3B"] == f"{2 * parameters / 1e9:.1f} GB"
    assert cells(report, "lower bound")["30B-A3B"] == f"{2 * parameters / 50e9:.1f} s"  # 400 Gbit/s
    nodes = 2  # two of the four nodes serve and don't train
    assert (
        cells(report, "between nodes, at least")["30B-A3B"]
        == f"{2 * parameters * nodes / 1e9:.1f} GB"
    )
    assert cells(report, "bytes a rank")["30B-A3B"] == f"{14 * parameters / 16 / 1e9:.1f} GB"


def test_what_a_size_lacks_is_a_dash(report):
    assert cells(report, "routing a step, in memory")["8B"] == "-"
    assert cells(report, "on the wire over in memory")["30B-A3B"] == "-"


def test_rows_come_back_as_they_were_written_and_are_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tools/bench_x.py", "--size", "a b"])
    row = Quantity("host memory a node", 21.25, "GiB", "two processes, scaled by 8 / 2")
    write_rows(tmp_path / "new" / "x.json", "data plane", [row])
    (found,) = read_rows(tmp_path / "new")
    assert (found.benchmark, found.rows) == ("data plane", (row,))
    assert found.command == "python tools/bench_x.py --size 'a b'"
    text = page([], [found])
    assert "|  | two processes, scaled by 8 / 2 |" in text
    assert "| host memory a node | 21.25 GiB |" in text
    further = Quantity("seconds", 3, "s", "four processes")
    several = replace(found, rows=(row, further))
    assert (
        "|  | host memory a node | seconds |\n| --- | --- | --- |\n"
        "| two processes, scaled by 8 / 2 | 21.25 GiB |  |\n| four processes |  | 3 s |\n"
        in page([], [several])
    )
    assert read_rows(tmp_path / "nothing") == []


def test_another_form_is_refused_by_name(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps({"rows": [{"quantity": "a"}]}))
    with pytest.raises(ValueError, match=mentioning("x.json", "benchmark", "command")):
        read_rows(tmp_path)


def test_published_runs_are_cited_and_the_planner_is_near_those_that_train_by_reinforcement():
    """The planner's shares of the peak and of the memory's rate were fitted to the runs that train by reinforcement."""
    runs = published_runs()
    assert len(runs) >= 10
    assert all(run.source.startswith("https://") for run in runs)
    steps = [run for run in runs if run.unit == "s"]
    near = [run for run in steps if 0.8 <= run.ratio <= 1.2]
    assert len(near) >= len(steps) - 2
    assert sorted(run.ratio for run in steps)[len(steps) // 2] == pytest.approx(1, abs=0.05)
    # Megatron-Core's count for a token of a sequence of 4,096: 23.1 GFLOP.
    pretraining = next(run for run in runs if "AutoModel" in run.name)
    flops = 3 * 6.083e9 + 3.5 * 393_216 * 4096
    seconds = pretraining.plan.seconds.trainer
    assert pretraining.ours * 1e12 == pytest.approx(flops * 512 * 4096 / 8 / seconds, rel=0.02)
