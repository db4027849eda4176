"""The addresses of this project's own listeners, as the kernel reports them."""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import pytest

from megatron_dppo.system.interfaces import InterfaceError, interface_address, interface_of
from megatron_dppo.system.network import is_loopback
from tests.ranks import run_ranks

HERE = "tests.distributed.test_listeners"


def listening() -> set[str]:
    """Return the addresses on which this process listens."""
    found = psutil.Process().net_connections("tcp")
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}


def ranks_worker() -> list[str]:
    """Open every kind of listener of a rank: the rendezvous, a group, a further gloo group. Return the addresses."""
    import torch
    import torch.distributed as dist

    from megatron_dppo.trainer.topology import init_distributed

    init_distributed(2, os.environ.get("INTERFACE"))
    group = dist.new_group(backend="gloo")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1), group=group)
    return sorted(listening())


@pytest.mark.distributed
@pytest.mark.parametrize("interface", [None, "lo", "127.0.0.1"])
def test_ranks_of_one_machine_listen_on_loopback_alone(
    monkeypatch: pytest.MonkeyPatch, interface: str | None
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if interface is not None:
        monkeypatch.setenv("INTERFACE", interface)
    assert run_ranks(f"{HERE}:ranks_worker", 2) == [["127.0.0.1"], ["127.0.0.1"]]


def test_a_store_listens_where_it_is_told() -> None:
    from megatron_dppo.system.network import ListenError, listening_store

    before = listening()
    store = listening_store("localhost", 0, 1, timedelta(seconds=5))
    assert listening() - before <= {"127.0.0.1"}
    assert store.port > 0
    # tests/ranks.py looks for the word EADDRINUSE in the error, and then takes another port.
    with pytest.raises(ListenError, match=rf"localhost:{store.port}: .* \(EADDRINUSE\)"):
        listening_store("localhost", store.port, 1, timedelta(seconds=5))
    with pytest.raises(ListenError, match=r"203\.0\.113\.9:0: .* \(EADDRNOTAVAIL\)"):
        listening_store("203.0.113.9", 0, 1, timedelta(seconds=5))


def test_an_interface_by_name_and_by_address() -> None:
    assert interface_address("lo") == interface_address("127.0.0.1") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
    assert is_loopback("localhost")
    assert not is_loopback("203.0.113.9")
    assert not is_loopback("no.such.host.invalid")
    with pytest.raises(InterfaceError, match=r"got 'eth9', .*lo \(127.0.0.1\)"):
        interface_address("eth9")


def test_a_listener_on_every_interface_is_seen() -> None:
    """A control of ``listening``: without it, the other tests would pass if ``listening`` missed such listeners."""
    with socket.create_server(("", 0)):
        assert "0.0.0.0" in listening() or "::" in listening()
