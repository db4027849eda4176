"""``megatron-dppo bench-mask`` from the command line, on a problem small enough to say nothing about speed."""

import json
import sys

import pytest

from tests.patience import run_patiently

pytestmark = pytest.mark.distributed


def test_two_ranks_write_table_json_and_chart(tmp_path):
    result_file, chart = tmp_path / "mask.json", tmp_path / "mask.png"
    tables = tmp_path / "mask.md"
    run = run_patiently([
            sys.executable, "-m", "megatron_dppo", "bench-mask", "--tp", "2", "--tokens", "24",
            "--vocab", "1001", "--topk", "4", "--dtype", "float32", "--repetitions", "3",
            "--json", str(result_file), "--png", str(chart), "--markdown", str(tables),
        ], 300, cwd=tmp_path)  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads(result_file.read_text())
    rows = {r["name"]: r for r in result["implementations"]}
    ours, peer = rows["policy_stats + entropy + Top-K"], rows["Megatron-Core CE"]
    for row in (ours, peer):
        assert row["max_log_prob_error"] < 2e-6
        assert row["relative_gradient_error"] < 1e-6
        assert row["forward_ms"] > 0
    assert (ours["payload_all_reduces"], ours["header_all_reduces"]) == (1, 1)
    assert peer["payload_all_reduces"] == 3
    # Each of 24 tokens has 2 ranks x (2 values for lse + 1 for entropy) + 1 + 4 values at ids. A value has 4 bytes.
    assert ours["wire_mb"] == pytest.approx(24 * (2 * 3 + 5) * 4 / 1e6)
    masks = {m["name"]: m for m in result["masks"]}
    assert masks["dppo-binary-tv"]["extra_all_reduces"] == 0
    assert masks["dppo-topk-kl"]["extra_all_reduces"] == 0
    assert masks["dppo-topk-kl"]["extra_wire_mb"] == pytest.approx(24 * 4 * 4 / 1e6)
    # pdm-exact sends values at 1,001 ids in place of 4. m2po needs a pass without entropy: 24 x (2 x 2 + 1) values.
    assert masks["pdm-exact"]["extra_wire_mb"] == pytest.approx(24 * 1001 * 4 / 1e6)
    for name in ("m2po", "m2po-areal"):
        assert masks[name]["extra_all_reduces"] == 1
        assert masks[name]["extra_wire_mb"] == pytest.approx(24 * (2 * 2 + 1) * 4 / 1e6)
    assert masks["pg-is + (log r)^2"]["extra_all_reduces"] == 0
    assert "pg-is, 8.3% of rows skipped" in masks
    assert "policy_stats + entropy" in run.stdout
    assert "| Megatron-Core CE |" in tables.read_text()
    assert chart.stat().st_size > 10_000
