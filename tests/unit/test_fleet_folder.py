"""What the ranks, the supervisor and the user's command tell each other by files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from megatron_dppo.fleet.folder import ROUTER, FleetFolder, Keys, Server, attached_name
from megatron_dppo.launch.run_directory import RunDirectory

HERE = Server("engine0", "http://127.0.0.1:30000", 3, 17)


def test_the_supervisor_reads_a_report_once(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    assert folder.take_report("engine0") is None
    folder.report_lost(HERE)
    assert folder.take_report("engine1") is None
    assert folder.take_report("engine0") == 3
    assert folder.take_report("engine0") is None


def test_a_server_is_published_and_withdrawn_with_what_was_reported_of_it(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    folder.report_lost(HERE)
    assert folder.servers() == [HERE]
    folder.withdraw("engine0")
    assert folder.servers() == []
    assert folder.take_report("engine0") is None


def test_servers_come_in_the_order_of_their_numbers_and_the_router_apart(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    for number in (10, 2, 0):
        folder.publish(Server(f"engine{number}", f"http://127.0.0.1:{number + 1}"))
    folder.attach("http://10.0.0.9:3/")
    assert folder.router() is None
    folder.publish(Server(ROUTER, "http://127.0.0.1:9", 1, 2))
    assert [s.name for s in folder.servers()] == [
        "engine0", "engine2", "engine10", "http-10.0.0.9-3"
    ]  # fmt: skip
    assert folder.router() == Server(ROUTER, "http://127.0.0.1:9", 1, 2)


def test_a_new_supervisor_forgets_what_a_killed_one_left_but_not_attached_servers(
    tmp_path: Path,
) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    folder.publish(Server(ROUTER, "http://127.0.0.1:9"))
    folder.publish_status(3, {"engine0": "serves"})
    folder.report_lost(HERE)
    elsewhere = folder.attach("https://other:1")
    with RunDirectory(tmp_path) as directory:
        assert directory.fleet.servers() == [elsewhere]
        assert directory.fleet.router() is None
        assert directory.fleet.take_report("engine0") is None
        assert directory.fleet.status() == {}
        folder.publish(HERE)
    assert folder.servers() == [elsewhere]


def test_keys_of_started_servers_are_handed_down_and_others_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, value)] = Keys("a", "b").to_variables().items()
    monkeypatch.setenv(name, value)
    folder = FleetFolder(tmp_path, Keys.handed_down())
    assert name not in os.environ  # the ranks' own children don't get them
    monkeypatch.setenv("MEGATRON_DPPO_API_KEY", "c")
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY", raising=False)
    assert folder.keys(HERE) == Keys("a", "b")
    assert folder.keys(Server("x", "http://x:1", origin="command")) == Keys("c", None)


def test_what_can_be_attached_and_detached(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    with pytest.raises(ValueError, match=r"expected http://host:port"):
        folder.attach("other:1")
    with pytest.raises(ValueError, match="belongs to the fleet already"):
        folder.attach("http://127.0.0.1:30000/")
    folder.attach("http://other:1/a/")
    with pytest.raises(ValueError, match="belongs to the fleet already"):
        folder.attach("http://other:1/a")
    with pytest.raises(ValueError, match="no attached server"):
        folder.detach(HERE.url)
    assert folder.detach("http://other:1/a").name == "http-other-1-a"
    assert folder.servers() == [HERE]


def test_the_configurations_servers_follow_the_configuration(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    folder.sync_configured(["http://a:1", "http://b:1/"])
    folder.attach("http://c:1")
    folder.sync_configured(["http://b:1", "http://d:1"])
    assert [(s.url, s.origin) for s in folder.servers()] == [
        ("http://b:1", "config"), ("http://c:1", "command"), ("http://d:1", "config")
    ]  # fmt: skip


def test_names_of_attached_servers_are_names_of_files() -> None:
    assert attached_name("https://[::1]:30000/fleet/a/") == "https-1-30000-fleet-a"


def test_the_status_is_what_was_said_last(tmp_path: Path) -> None:
    folder = FleetFolder(tmp_path)
    assert folder.status() == {}
    folder.publish_status(3, {"engine0": "serves"})
    assert folder.status() == {"version": 3, "servers": {"engine0": "serves"}}


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", "[" * 100_000, '{"name": "x"}', '{"name": 1, "url": "http://x:1"}',
     '{"name": "x", "url": "http://x:1", "more": 1}', "\xff"],
)  # fmt: skip
def test_a_damaged_file_of_a_server_is_set_aside_and_the_others_stay(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    damaged = tmp_path / "engine" / "servers" / "x.json"
    damaged.write_bytes(text.encode("latin-1"))
    assert folder.servers() == folder.servers() == [HERE]
    assert not damaged.exists()
    assert damaged.with_name("x.json.damaged").exists()
    assert [r.message for r in caplog.records] == [
        f"{damaged} is damaged; it is now x.json.damaged, and counts as missing"
    ]


@pytest.mark.parametrize("text", ["{", '{"incarnation": "3"}', "{}"])
def test_a_damaged_report_is_no_report(tmp_path: Path, text: str) -> None:
    folder = FleetFolder(tmp_path)
    report = tmp_path / "engine" / "lost" / "engine0.json"
    report.write_text(text)
    assert folder.take_report("engine0") is None
    assert not report.exists()


def test_under_a_wide_umask_the_folder_is_still_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "engine" / "servers").mkdir(parents=True)
    (tmp_path / "engine").chmod(0o775)
    (tmp_path / "engine" / "servers").chmod(0o2775)
    before = os.umask(0o002)
    try:
        folder = FleetFolder(tmp_path)
        folder.publish(HERE)
        folder.publish_status(1, {})
        folder.report_lost(HERE)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "engine").rglob("*")}
    assert modes == {"servers": 0o700, "lost": 0o700, "engine0.json": 0o600, "status.json": 0o600}
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("mode", "problem"),
    [(0o664, "others may write it (-rw-rw-r--)"), (0o646, "others may write it (-rw-r--rw-)")],
)
def test_a_file_that_others_may_write_is_refused_by_name_and_stays(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, problem: str
) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    planted = folder.path / "servers" / "x.json"
    planted.write_text('{"name": "x", "url": "http://10.0.0.66:1", "origin": "command"}')
    planted.chmod(mode)
    assert folder.servers() == folder.servers() == [HERE]
    assert [r.message for r in caplog.records] == [
        f"refused: {planted}: {problem}, expected the owner alone"
    ]
    planted.chmod(0o644)
    assert len(folder.servers()) == 2


def test_a_file_of_another_user_or_behind_a_link_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish(HERE)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text('{"name": "x", "url": "http://10.0.0.66:1"}')
    (folder.path / "servers" / "x.json").symlink_to(elsewhere)
    assert folder.servers() == [HERE]
    assert "x.json: expected a file, not a symbolic link" in caplog.text
    own = os.geteuid()
    monkeypatch.setattr("megatron_dppo.system.files.os.geteuid", lambda: own + 1)
    assert folder.servers() == []
    assert f"engine0.json: belongs to user {own}, expected this run's, {own + 1}" in caplog.text
    with pytest.raises(PermissionError, match=f"engine: belongs to user {own}"):
        FleetFolder(tmp_path)
