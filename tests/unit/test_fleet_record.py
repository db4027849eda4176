"""The record of a run's servers, in memory and in its file."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_dppo.fleet.endpoint import FleetEndpoint, RecordClient
from megatron_dppo.fleet.record import (
    ROUTER,
    FleetRecord,
    Keys,
    Server,
    attached_name,
    attachment_seal,
)
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.system.files import write_private
from megatron_dppo.system.lease import Lease, LeaseFiles
from tests.messages import mentions

HERE = Server("engine0", "http://127.0.0.1:30000", 3, 17)


@pytest.fixture(autouse=True)
def admin_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "mine")


def attach(record: FleetRecord, url: str) -> Server:
    return record.attach(url, attachment_seal(url))


def test_the_supervisor_reads_a_report_once(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    record.publish(HERE)
    assert record.take_report("engine0") is None
    record.report_lost("engine0", 3)
    assert record.take_report("engine1") is None
    assert record.take_report("engine0") == 3
    assert record.take_report("engine0") is None


def test_a_report_on_an_earlier_start_or_on_nobody_is_dropped(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    record.publish(HERE)
    record.report_lost("engine0", 2)
    record.report_lost("../engine0", 3)
    assert record.take_report("engine0") is None
    assert record.take_report("../engine0") is None


def test_a_server_is_published_and_withdrawn_with_what_was_reported_of_it(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    record.publish(HERE)
    record.report_lost(HERE.name, HERE.incarnation)
    assert record.servers() == [HERE]
    record.withdraw(HERE)
    assert record.servers() == []
    assert record.take_report("engine0") is None


def test_servers_come_in_the_order_of_their_numbers_and_the_router_apart(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    for number in (10, 2, 0):
        record.publish(Server(f"engine{number}", f"http://127.0.0.1:{number + 1}"))
    attach(record, "http://10.0.0.9:3/")
    assert record.router() is None
    record.publish(Server(ROUTER, "http://127.0.0.1:9", 1, 2))
    assert [s.name for s in record.servers()] == [
        "engine0", "engine2", "engine10", "http-10.0.0.9-3"
    ]  # fmt: skip
    assert record.router() == Server(ROUTER, "http://127.0.0.1:9", 1, 2)


def test_a_new_supervisor_forgets_what_a_killed_one_left_but_not_attached_servers(
    tmp_path: Path,
) -> None:
    record = FleetRecord(tmp_path)
    record.publish(HERE)
    record.publish(Server(ROUTER, "http://127.0.0.1:9"))
    record.publish_status(3, {"engine0": "serves"})
    elsewhere = attach(record, "https://other:1")
    with RunDirectory(tmp_path) as directory:
        for record_now in (directory.fleet, FleetRecord(tmp_path)):
            assert (record_now.servers(), record_now.router(), record_now.status()) == (
                [elsewhere],
                None,
                {},
            )
        directory.fleet.publish(HERE)
        assert FleetRecord(tmp_path).servers() == [HERE, elsewhere]
    assert FleetRecord(tmp_path).servers() == [elsewhere]


def test_a_start_that_was_succeeded_leaves_the_file_to_its_successor(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    with lease:
        record = FleetRecord(tmp_path, lease.fence.check)
        record.publish(HERE)
        files = LeaseFiles(tmp_path)
        holder = files.holder()
        assert holder is not None
        files.install(replace(holder, nonce="2" * 16))
        record.withdraw(HERE)
        assert record.servers() == []
        assert FleetRecord(tmp_path).servers() == [HERE]


def test_what_a_command_attached_before_there_was_an_endpoint_is_taken_in(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    elsewhere = attach(FleetRecord(tmp_path), "http://other:1")
    assert record.servers() == []
    with FleetEndpoint(record, "key", "127.0.0.1"):
        assert record.servers() == [elsewhere]
        record.publish(HERE)
    assert FleetRecord(tmp_path).servers() == [HERE, elsewhere]


@pytest.mark.parametrize("seal", ["", "f" * 64, "ü"])
def test_a_server_in_the_file_without_its_seal_gets_no_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, seal: str
) -> None:
    file = tmp_path / "engine" / "fleet.json"
    elsewhere = attach(FleetRecord(tmp_path), "http://other:1")
    attach(FleetRecord(tmp_path), "http://third:1")
    content = json.loads(file.read_text())
    content["servers"][elsewhere.name]["seal"] = seal
    write_private(file, json.dumps(content))
    record = FleetRecord(tmp_path)
    with FleetEndpoint(record, "mine", "127.0.0.1"):
        assert [s.url for s in record.servers()] == ["http://third:1"]
    assert "http://other:1: detached" in caplog.text


def test_a_run_with_another_admin_key_or_none_drops_attached_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variables in ({"MEGATRON_DPPO_ADMIN_API_KEY": "another"}, {}):
        monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "mine")
        attach(FleetRecord(tmp_path), "http://other:1")
        monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY")
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        record = FleetRecord(tmp_path)
        with FleetEndpoint(record, "the endpoint's", "127.0.0.1"):
            assert record.servers() == []


def test_keys_of_started_servers_are_handed_down_and_others_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    [(name, value)] = Keys("a", "b").to_variables().items()
    monkeypatch.setenv(name, value)
    client = RecordClient("http://127.0.0.1:9", Keys.handed_down())
    assert name not in os.environ  # the ranks' own children don't get them
    monkeypatch.setenv("MEGATRON_DPPO_API_KEY", "c")
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY", raising=False)
    assert client.keys(HERE) == Keys("a", "b")
    assert client.keys(Server("x", "http://x:1", origin="command")) == Keys("c", None)


def test_what_can_be_attached_and_detached(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    record.publish(HERE)
    with pytest.raises(ValueError, match="http://host:port"):
        attach(record, "other:1")
    with pytest.raises(ValueError, match="://"):
        attach(record, "http://127.0.0.1:30000/")
    attach(record, "http://other:1/a/")
    with pytest.raises(ValueError, match="://"):
        attach(record, "http://other:1/a")
    with pytest.raises(ValueError, match="://"):
        record.detach(HERE.url)
    assert record.detach("http://other:1/a").name == "http-other-1-a"
    assert record.servers() == [HERE]


def test_the_configurations_servers_follow_the_configuration(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    record.sync_configured(["http://a:1", "http://b:1/"])
    attach(record, "http://c:1")
    record.sync_configured(["http://b:1", "http://d:1"])
    assert [(s.url, s.origin) for s in record.servers()] == [
        ("http://b:1", "config"), ("http://c:1", "command"), ("http://d:1", "config")
    ]  # fmt: skip


def test_names_of_attached_servers() -> None:
    assert attached_name("https://[::1]:30000/fleet/a/") == "https-1-30000-fleet-a"


def test_the_status_is_what_was_said_last(tmp_path: Path) -> None:
    record = FleetRecord(tmp_path)
    assert record.status() == {}
    record.publish_status(3, {"engine0": "serves"})
    assert record.status() == {"version": 3, "servers": {"engine0": "serves"}}


ROW = {"name": "x", "url": "http://x:1"}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "[" * 100_000, "\xff", '{"servers": [1]}', '{"servers": {"x": 1}}',
        '{"status": 3}',
        *(json.dumps({"servers": {"x": row}}) for row in (
            {"name": "x"}, ROW | {"name": 1}, ROW | {"more": 1}, ROW | {"incarnation": "3"})),
    ],
)  # fmt: skip
def test_a_damaged_file_is_set_aside(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    record = FleetRecord(tmp_path)
    damaged = record.path / "fleet.json"
    damaged.write_bytes(text.encode("latin-1"))
    damaged.chmod(0o600)
    assert FleetRecord(tmp_path).servers() == []
    assert not damaged.exists()
    assert damaged.with_name("fleet.json.damaged").exists()
    [line] = [r.message for r in caplog.records]
    assert mentions(line, damaged, "fleet.json.damaged")


def test_under_a_wide_umask_the_folder_is_still_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir(parents=True)
    (tmp_path / "engine").chmod(0o2775)
    before = os.umask(0o002)
    try:
        FleetRecord(tmp_path).publish(HERE)
    finally:
        os.umask(before)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / "engine").rglob("*")}
    assert modes == {"fleet.json": 0o600}
    assert stat.S_IMODE((tmp_path / "engine").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("mode", "fault"),
    [(0o664, "others may write it (-rw-rw-r--)"), (0o646, "others may write it (-rw-r--rw-)")],
)
def test_a_file_that_others_may_write_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, fault: str
) -> None:
    record = FleetRecord(tmp_path)
    planted = record.path / "fleet.json"
    planted.write_text(json.dumps({"servers": {"x": ROW | {"origin": "command"}}}))
    planted.chmod(0o644)
    assert len(FleetRecord(tmp_path).servers()) == 1
    planted.chmod(mode)
    assert FleetRecord(tmp_path).servers() == []
    [line] = [r.message for r in caplog.records]
    assert line.startswith(f"{planted} is refused ({planted}: {fault}, expected only the owner)")
    assert planted.with_name("fleet.json.damaged").exists()


def test_a_file_of_another_user_or_behind_a_link_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = FleetRecord(tmp_path)
    elsewhere = tmp_path / "elsewhere.json"
    elsewhere.write_text(json.dumps({"servers": {"x": ROW}}))
    (record.path / "fleet.json").symlink_to(elsewhere)
    assert FleetRecord(tmp_path).servers() == []
    assert "fleet.json: expected a file, not a symbolic link" in caplog.text
    record.publish(HERE)
    own = os.geteuid()
    monkeypatch.setattr("megatron_dppo.system.files.os.geteuid", lambda: own + 1)
    with pytest.raises(PermissionError, match=f"engine: .* {own}"):
        FleetRecord(tmp_path)
