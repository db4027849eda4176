"""What the ranks, the supervisor and the user's command tell each other by files."""

from __future__ import annotations

import json
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
    folder.publish_keys(Keys("a", "b"))
    folder.publish_status(3, {"engine0": "serves"})
    folder.report_lost(HERE)
    elsewhere = folder.attach("https://other:1")
    with RunDirectory(tmp_path) as directory:
        assert directory.fleet.servers() == [elsewhere]
        assert directory.fleet.router() is None
        assert directory.fleet.take_report("engine0") is None
        assert directory.fleet.keys(HERE) == Keys()
        assert directory.fleet.status() == {}
        folder.publish(HERE)
    assert folder.servers() == [elsewhere]


def test_keys_of_started_servers_are_the_owners_and_others_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = FleetFolder(tmp_path)
    folder.publish_keys(Keys("a", "b"))
    file = folder.path / "keys.json"
    assert json.loads(file.read_text()) == {"api_key": "a", "admin_api_key": "b"}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
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
