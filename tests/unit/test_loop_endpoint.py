"""What the ranks and the supervisor tell each other of the engine by files."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.loop.endpoint import Endpoint, read_endpoint, report_lost


def test_the_supervisor_reads_a_report_once(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        assert directory.take_lost_report() is None
        report_lost(tmp_path, Endpoint("http://a", 3))
        assert [path.name for path in (tmp_path / "engine").iterdir()] == ["lost.json"]
        assert directory.take_lost_report() == 3
        assert directory.take_lost_report() is None


def test_a_report_goes_with_the_endpoint_it_is_about(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.publish_keys({"api_key": "a", "admin_api_key": "b"})
        directory.publish_endpoint({"url": "http://a", "incarnation": 1, "pid": 1})
        found = read_endpoint(tmp_path)
        assert found == Endpoint("http://a", 1, "a", "b")
        report_lost(tmp_path, found)
        directory.withdraw_endpoint()
        assert read_endpoint(tmp_path) is None
        assert directory.take_lost_report() is None


def test_a_killed_runs_report_does_not_reach_the_next(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    report_lost(tmp_path, Endpoint("http://a", 1))
    with RunDirectory(tmp_path) as directory:
        assert directory.take_lost_report() is None
