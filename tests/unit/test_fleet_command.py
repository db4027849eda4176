"""``megatron-dppo fleet``: what it shows and what it writes."""

from __future__ import annotations

import threading
import time

import pytest

from megatron_dppo.fleet.__main__ import main
from megatron_dppo.fleet.endpoint import FleetEndpoint
from megatron_dppo.fleet.record import ROUTER, FleetRecord, Server


@pytest.fixture(autouse=True)
def admin_key(monkeypatch):
    monkeypatch.setenv("MEGATRON_DPPO_ADMIN_API_KEY", "key")


def test_a_server_is_attached_listed_and_detached(tmp_path, capsys):
    record = FleetRecord(tmp_path)
    record.publish(Server("engine0", "http://127.0.0.1:1", 2, 5))
    record.publish(Server(ROUTER, "http://127.0.0.1:2", 1, 6))
    record.publish_status(7, {"engine0": "serves"})
    assert main([str(tmp_path), "add", "http://other:3/", "--wait", "0"]) == 0
    assert "http-other-3 is attached" in capsys.readouterr().out
    assert main([str(tmp_path), "list"]) == 0
    assert [line.split(maxsplit=3) for line in capsys.readouterr().out.splitlines()] == [
        ["NAME", "URL", "START", "STATE"],
        ["engine0", "http://127.0.0.1:1", "2", "serves"],
        ["http-other-3", "http://other:3", "attached", "not yet seen"],
        ["router", "http://127.0.0.1:2", "1"],
        ["weight", "version", "7"],
    ]
    assert main([str(tmp_path), "remove", "http://other:3"]) == 0
    assert [s.name for s in FleetRecord(tmp_path).servers()] == ["engine0"]


def test_add_says_what_the_trainer_finds(tmp_path, capsys):
    """``add`` waits for the trainer's examination: the trainer has the keys, and it is the trainer that must reach the
    server."""
    record = FleetRecord(tmp_path)
    record.publish_status(None, {})

    def examine() -> None:
        while not record.servers():
            time.sleep(0.01)
        record.publish_status(3, {"http-other-3": "not yet examined"})
        time.sleep(0.3)
        record.publish_status(3, {"http-other-3": "refused: status 401"})

    trainer = threading.Thread(target=examine)
    trainer.start()
    with FleetEndpoint(record, "key", "127.0.0.1"):
        assert main([str(tmp_path), "add", "http://other:3"]) == 1
    trainer.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["http-other-3 is attached", "refused: status 401"]


def test_add_without_a_run_says_so(tmp_path, capsys):
    assert main([str(tmp_path), "add", "http://other:3"]) == 0
    assert "no trainer listens now" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["add", "other:3"], "expected http://host:port"),
        (["add", "http://127.0.0.1:1"], "belongs to the fleet already"),
        (["remove", "http://127.0.0.1:1"], "no attached server"),
    ],
)
def test_what_is_refused(tmp_path, capsys, words, message):
    FleetRecord(tmp_path).publish(Server("engine0", "http://127.0.0.1:1", 1, 5))
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_not_made(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "none"), "list"])
    assert "expected the folder of a run" in capsys.readouterr().err
    assert not (tmp_path / "none").exists()
