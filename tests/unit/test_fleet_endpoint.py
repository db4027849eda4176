"""The record of a run's servers over HTTP: the real endpoint, the real client, the real command."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import stat
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from megatron_dppo.fleet import __main__ as command
from megatron_dppo.fleet import endpoint as endpoint_module
from megatron_dppo.fleet.endpoint import (
    EndpointAddress,
    FleetEndpoint,
    RecordClient,
    RecordLostError,
    admin_key,
    control_host,
    record_of_command,
)
from megatron_dppo.fleet.record import ROUTER, FleetRecord, Keys, Server, attachment_seal
from megatron_dppo.logging import FatalError
from megatron_dppo.system import http_server
from megatron_dppo.system.files import write_private
from megatron_dppo.system.lease import FencedError

KEY = "the admin key"
KEYS = Keys("user", KEY)
HERE = Server("engine0", "http://127.0.0.1:30000", 3, 17)
OTHER = "http://10.0.0.9:3"


@pytest.fixture(autouse=True)
def key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", KEY)


@pytest.fixture
def record(tmp_path: Path) -> FleetRecord:
    return FleetRecord(tmp_path / "run")


@pytest.fixture
def endpoint(record: FleetRecord) -> Iterator[FleetEndpoint]:
    with FleetEndpoint(record, KEY, "127.0.0.1") as running:
        yield running


@pytest.fixture
def remote(endpoint: FleetEndpoint) -> RecordClient:
    return RecordClient(endpoint.url, KEYS)


def test_a_rank_reads_and_tells_what_is_recorded(record: FleetRecord, remote: RecordClient) -> None:
    assert (remote.servers(), remote.router(), remote.status()) == ([], None, {})
    record.publish(HERE)
    record.publish(router := Server(ROUTER, "http://127.0.0.1:9", 1, 2))
    assert (remote.servers(), remote.router()) == ([HERE], router)
    assert remote.keys(HERE) == KEYS
    remote.sync_configured([OTHER])
    attached = Server("http-10.0.0.9-3", OTHER, origin="config")
    assert remote.servers() == record.servers() == [HERE, attached]
    remote.publish_status(4, {"engine0": "serves"})
    assert remote.status() == record.status() == {"version": 4, "servers": {"engine0": "serves"}}
    remote.report_lost(HERE)
    assert record.take_report("engine0") == 3


def test_ranks_of_an_earlier_start_get_no_answer(
    record: FleetRecord, endpoint: FleetEndpoint, remote: RecordClient
) -> None:
    record.publish(HERE)
    first, second = (RecordClient(endpoint.url, KEYS, start) for start in (1, 2))
    record.begin_ranks(1)
    assert first.servers() == [HERE]
    record.begin_ranks(2)
    assert second.servers() == remote.servers() == [HERE]
    for question in (first.servers, first.check_start, lambda: first.report_lost(HERE)):
        with pytest.raises(FencedError):
            question()
    assert record.take_report("engine0") is None


@pytest.mark.parametrize("name", ["../../engine0", "engine1"])
def test_a_report_on_what_is_no_server_is_dropped(
    record: FleetRecord, remote: RecordClient, name: str
) -> None:
    record.publish(HERE)
    remote.report_lost(Server(name, HERE.url, 3))
    assert record.take_report(name) is None


def test_an_attached_server_is_nobodys_to_replace(
    record: FleetRecord, remote: RecordClient
) -> None:
    elsewhere = remote.attach(OTHER, attachment_seal(OTHER))
    remote.report_lost(elsewhere)
    assert record.take_report(elsewhere.name) is None


@pytest.mark.parametrize("key", [None, "", "user", KEY[:-1], f"{KEY}x"])
def test_without_the_admin_key_nothing_is_told_or_changed(
    record: FleetRecord, endpoint: FleetEndpoint, key: str | None
) -> None:
    stranger = RecordClient(endpoint.url, Keys("user", key))
    for action in (stranger.servers, lambda: stranger.attach(OTHER, attachment_seal(OTHER))):
        with pytest.raises(ValueError, match="key"):
            action()
    assert record.servers() == []


def test_the_key_in_the_file_opens_what_commands_ask_and_no_more(
    record: FleetRecord, endpoint: FleetEndpoint
) -> None:
    address = address_of(record)
    assert address is not None
    command = RecordClient(endpoint.url, Keys(admin=Path(address.key_file).read_text()))
    attached = command.attach(OTHER, attachment_seal(OTHER))
    assert command.servers() == record.servers() == [attached]
    assert command.status() == {}
    refused: list[Callable[[], object]] = [
        lambda: command.sync_configured([]),
        lambda: command.allow_starts(False),
        lambda: command.publish_status(1, {}),
        command.starting,
    ]
    for action in refused:
        with pytest.raises(ValueError, match="key"):
            action()
    command.detach(OTHER)
    assert record.servers() == []


def test_the_key_of_commands_attaches_no_server_without_its_seal(
    record: FleetRecord, endpoint: FleetEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_of(record)
    assert address is not None
    client = RecordClient(endpoint.url, Keys(admin=Path(address.key_file).read_text()))
    for seal in ("", attachment_seal("http://10.0.0.9:4"), "ü"):
        with pytest.raises(ValueError, match="MEGATRON_DPPO_ADMIN_API_KEY"):
            client.attach(OTHER, seal)
    seal = attachment_seal(OTHER)
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY")
    with pytest.raises(ValueError, match=r"engine\.urls"):
        client.attach(OTHER, seal)
    assert record.servers() == []


@pytest.mark.usefixtures("endpoint")
def test_the_command_attaches_no_server_without_the_admin_key(
    record: FleetRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY")
    with pytest.raises(FatalError, match="MEGATRON_DPPO_ADMIN_API_KEY"):
        run(record.path.parent, "add", OTHER)
    assert record.servers() == []


def address_of(record: FleetRecord) -> EndpointAddress | None:
    return EndpointAddress.read(record.path / "endpoint.json")


def publish(record: FleetRecord, address: EndpointAddress) -> None:
    write_private(record.path / "endpoint.json", json.dumps(asdict(address)))


def post(url: str, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Return the status and the error of an answer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}", **headers})
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/fleet/publish", b"{}"),
        ("/fleet/__init__", b"{}"),
        ("/fleet/attach", b"{}"),
        ("/fleet/attach", b'{"url": 3}'),
        ("/fleet/attach", b'{"url": "http://../../x:1"}'),
        ("/fleet/attach", b"[]"),
        ("/fleet/attach", b"[" * 100_000),
        ("/fleet/attach", b"\x80\x04\x95pickle"),
        ("/fleet/sync_configured", b'{"urls": 3}'),
        ("/fleet/publish_status", b'{"version": [], "states": {}}'),
    ],
)
def test_what_is_no_question_is_refused(
    record: FleetRecord, endpoint: FleetEndpoint, path: str, body: bytes
) -> None:
    status, _ = post(endpoint.url, path, body)
    assert status == 400
    assert record.servers() == []
    assert record.status() == {}


def test_a_long_question_is_not_read(endpoint: FleetEndpoint) -> None:
    status, error = post(endpoint.url, "/fleet/attach", b"", **{"Content-Length": str(1 << 30)})
    assert status == 400
    assert "Content-Length" in error


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST http://[/ HTTP/1.1\r\n\r\n",
        b"POST /fleet/servers HTTP/1.1\r\nContent-Length: two\r\n\r\n",
        b"POST /fleet/servers HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"GET /fleet/servers HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"x" * 20_000,
    ],
    ids=["url", "length", "chunked", "get", "tls", "long"],
)
def test_what_is_no_request_is_refused_without_a_traceback(
    endpoint: FleetEndpoint, caplog: pytest.LogCaptureFixture, request_bytes: bytes
) -> None:
    address = urlsplit(endpoint.url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").readline()
    assert answer == b"" or answer.split()[1].startswith(b"4"), answer
    assert "Traceback" not in caplog.text


def test_a_connection_that_says_nothing_is_closed(
    record: FleetRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "READ_S", 0.2)
    with FleetEndpoint(record, KEY, "127.0.0.1") as endpoint:
        address = urlsplit(endpoint.url)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            assert connection.recv(1) == b""


def test_it_listens_on_one_address_and_its_files_are_its_owners(
    record: FleetRecord, endpoint: FleetEndpoint
) -> None:
    port = urlsplit(endpoint.url).port
    listeners = psutil.Process().net_connections("tcp")
    addresses = {
        listener.laddr.ip
        for listener in listeners
        if listener.status == psutil.CONN_LISTEN and listener.laddr.port == port
    }
    assert addresses == {"127.0.0.1"}
    address = address_of(record)
    assert address is not None
    assert address.host == socket.gethostname()
    key_file = Path(address.key_file)
    assert key_file.read_text() != KEY
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(key_file.parent.stat().st_mode) == 0o700
    assert not key_file.is_relative_to(record.path.parent)
    files = [p for p in record.path.parent.rglob("*") if p.is_file()]
    assert not any(KEY in p.read_text() for p in files)
    endpoint.stop()
    assert address_of(record) is None
    assert not key_file.parent.exists()


def test_it_leaves_the_file_of_a_start_that_took_over(
    record: FleetRecord, endpoint: FleetEndpoint
) -> None:
    other_address = EndpointAddress("http://10.0.0.2:1", "b", "/tmp/key")
    publish(record, other_address)
    endpoint.stop()
    assert address_of(record) == other_address


def test_where_it_listens() -> None:
    assert control_host(None, "10.0.0.7") == "10.0.0.7"
    assert control_host(None, "0.0.0.0") == "127.0.0.1"
    assert control_host("lo", "10.0.0.7") == "127.0.0.1"


def test_the_key_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "mine")
    assert admin_key() == "mine"
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY")
    assert len(admin_key()) > 30
    assert admin_key() != admin_key()


def test_a_record_that_is_gone_is_an_error_or_a_warning(
    endpoint: FleetEndpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint_module, "_PAUSE_S", 0.0)
    endpoint.stop()
    client = RecordClient(endpoint.url, KEYS)
    with pytest.raises(RecordLostError, match=f"{endpoint.url}/fleet/servers: .*refused"):
        client.servers()
    assert client.router() is None
    client.publish_status(1, {})
    client.report_lost(HERE)
    assert len(caplog.records) == 3


def block_file(record: FleetRecord) -> None:
    """Put a folder in the place of the record's file, so that the file can't be written."""
    file = record.path / "fleet.json"
    file.unlink(missing_ok=True)
    file.mkdir()


def test_a_file_that_cannot_be_written_costs_no_more_than_the_file(
    record: FleetRecord, remote: RecordClient, caplog: pytest.LogCaptureFixture
) -> None:
    block_file(record)
    remote.publish_status(4, {"engine0": "serves"})
    remote.sync_configured([OTHER])
    assert remote.status()["version"] == 4
    assert [s.url for s in remote.servers()] == [OTHER]
    assert "fleet.json is not up to date: " in caplog.text


# --- the command


def run(folder: Path, *words: str) -> None:
    assert command.main([str(folder), *words]) == 0


def test_the_command_needs_no_fresh_view_of_the_folder(
    record: FleetRecord, endpoint: FleetEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On another host the run's folder may look as it did at the start of the run. Here ``stale`` is such a view, which
    has only the file ``endpoint.json``."""
    record.publish(HERE)
    record.publish_status(4, {"engine0": "serves"})
    stale = tmp_path / "stale"
    (stale / "engine").mkdir(parents=True)
    shutil.copy(record.path / "endpoint.json", stale / "engine")
    run(stale, "add", OTHER, "--wait", "0")
    assert [s.url for s in record.servers()] == [HERE.url, OTHER]
    run(stale, "list")
    shown = capsys.readouterr().out
    assert "engine0          http://127.0.0.1:30000  3         serves" in shown
    assert "http-10.0.0.9-3  http://10.0.0.9:3       attached  not yet seen" in shown
    assert "weight version 4" in shown
    run(stale, "remove", OTHER)
    assert record.servers() == [HERE]
    assert [p.name for p in (stale / "engine").iterdir()] == ["endpoint.json"]
    with pytest.raises(FatalError, match="://"):
        run(stale, "remove", OTHER)


def test_the_command_on_another_host_wants_the_key_and_a_way_there(
    record: FleetRecord, endpoint: FleetEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = address_of(record)
    assert address is not None
    directory = record.path.parent
    os.unlink(address.key_file)  # another host can't read the files of the run's host
    monkeypatch.delenv("MEGATRON_DPPO_ADMIN_API_KEY", raising=False)
    with pytest.raises(FatalError, match="key"):
        run(directory, "add", OTHER)
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", KEY)
    run(directory, "add", OTHER)
    assert [s.url for s in record.servers()] == [OTHER]
    publish(record, EndpointAddress(address.url, "far", address.key_file))
    with pytest.raises(FatalError, match="far"):
        run(directory, "list")


def test_the_command_of_a_run_that_was_killed_writes_its_file(
    record: FleetRecord, endpoint: FleetEndpoint
) -> None:
    address = address_of(record)
    assert address is not None
    endpoint.stop()
    publish(record, address)
    assert isinstance(record_of_command(str(record.path.parent)), FleetRecord)
    run(record.path.parent, "add", OTHER)
    assert [s.url for s in FleetRecord(record.path.parent).servers()] == [OTHER]


def test_without_a_run_a_file_that_cannot_be_written_is_an_error(record: FleetRecord) -> None:
    command_record = record_of_command(str(record.path.parent))
    block_file(record)
    with pytest.raises(IsADirectoryError):
        command_record.attach(OTHER, attachment_seal(OTHER))


def test_a_key_file_that_others_may_write_is_refused(
    record: FleetRecord, endpoint: FleetEndpoint
) -> None:
    address = address_of(record)
    assert address is not None
    Path(address.key_file).chmod(0o666)
    with pytest.raises(FatalError, match="key"):
        run(record.path.parent, "list")
