"""The group of weight updates: error mode, time limit and end, as far as CPUs can show them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from megatron_dppo.system.network import listening_store
from megatron_dppo.system.ports import free_port
from megatron_dppo.weights import weight_group
from megatron_dppo.weights.links import CalledOffError
from megatron_dppo.weights.server import weight_groups
from megatron_dppo.weights.server.weight_groups import (
    ABORT_GROUP,
    CALLED_OFF,
    ERROR_MODE,
    GroupWatch,
    errors_abort_the_group,
    limit_of,
    new_name,
    wait_for_bytes,
)
from megatron_dppo.weights.weight_group import WeightGroup, call_off
from tests.patience import own_patience, run_patiently

ENGINE_PROGRAM = """
import sys
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Backend, PrefixStore, _new_process_group_helper, _world, rendezvous
from megatron_dppo.weights.server import weight_groups

def sglangs_method(updater, address, port, rank, size, name, backend):
    limit = timedelta(minutes=30)
    store, rank, size = next(rendezvous(f"tcp://{address}:{port}", rank, size, timeout=limit))
    group, _ = _new_process_group_helper(
        size, rank, [], Backend(backend), PrefixStore(name, store), group_name=name, timeout=limit
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    updater._model_update_group[name] = group
    return True, "joined"

address, port, name = sys.argv[1:]
updater = SimpleNamespace(_model_update_group={}, device="cpu")
print(*weight_groups.join(sglangs_method, updater, address, int(port), 1, 2, name, "gloo"), flush=True)
options = dist.BroadcastOptions()
options.rootRank = options.rootTensor = 0
try:
    if (group := updater._model_update_group.get(name)) is None:
        raise RuntimeError("left already")
    group.broadcast([torch.ones(1 << 24, dtype=torch.uint8)], options).wait()
    print("received", flush=True)
except RuntimeError:
    print("freed", flush=True)
"""


@pytest.fixture
def join_engine(monkeypatch):
    """A function that joins this process and the process of an engine rank, which waits in its first broadcast."""
    engines: list[subprocess.Popen[str]] = []
    groups: list[WeightGroup] = []

    def join(limit_s: float = 90.0) -> tuple[WeightGroup, subprocess.Popen[str]]:
        name = new_name(timedelta(seconds=limit_s))
        monkeypatch.setattr(weight_group, "new_name", lambda limit: name)
        group = WeightGroup(ranks=1, address="127.0.0.1", device="cpu", timeout_s=60.0)
        groups.append(group)
        words = [group.address, str(group.port), group.name]
        engine = subprocess.Popen(
            [sys.executable, "-c", ENGINE_PROGRAM, *words], stdout=subprocess.PIPE, text=True
        )
        engines.append(engine)
        assert engine.stdout is not None
        assert engine.stdout.readline() == "True joined\n"
        group.joined.result(60)
        return group, engine

    yield join
    for engine in engines:
        engine.kill()
        engine.wait()
    for group in groups:
        group.abort()


def next_line(engine: subprocess.Popen[str]) -> str:
    assert engine.stdout is not None
    return engine.stdout.readline().strip()


def test_an_engine_frees_itself_at_the_limit_in_the_groups_name(join_engine):
    """SGLang's own limit of the group is 30 minutes."""
    _, engine = join_engine(limit_s=1.0)
    assert next_line(engine) == "freed"


def test_a_rank_that_waits_to_join_sees_that_the_transfer_is_called_off():
    """The thread that joins waits in the group's own connection to the rendezvous."""
    shared: dict[str, Any] = {
        "ranks": 1,
        "members": 2,
        "address": "127.0.0.1",
        "device": "cpu",
        "timeout_s": 5.0,
    }
    first = WeightGroup(**shared)
    second = WeightGroup(**shared, rank=1, port=first.port, name=first.name)
    call_off(first.address, first.port)
    patience = own_patience(20)
    for group in (first, second):
        with pytest.raises(CalledOffError):
            group.wait(group.joined)
        assert group.is_called_off()
        group.abort()
    assert not patience.is_exhausted()


def test_the_trainers_abort_frees_an_engine_over_gloo(join_engine):
    group, engine = join_engine()
    group.abort()
    assert next_line(engine) == "freed"


def test_a_bucket_is_received(join_engine):
    group, engine = join_engine()
    group.connect(1 << 24).result(60)
    assert next_line(engine) == "received"


def test_an_abort_tells_the_engines_before_it_breaks_the_group(monkeypatch):
    seen: list[str] = []
    group: Any = WeightGroup.__new__(WeightGroup)
    group._store = SimpleNamespace(set=lambda key, value: seen.append(key))
    group._group = SimpleNamespace(abort=lambda: seen.append("abort"))
    monkeypatch.setattr(
        weight_group.dist, "destroy_process_group", lambda group: seen.append("left")
    )
    group.abort()
    assert seen == [CALLED_OFF, "abort", "left"]


@pytest.mark.parametrize("value", [None, "3"])
def test_an_nccl_group_is_made_with_an_error_mode_that_ends_no_process(monkeypatch, value):
    """torch reads the variable in the constructor of the group. Here the constructor records the value."""
    seen: list[str | None] = []
    monkeypatch.delenv(ERROR_MODE, raising=False)
    if value is not None:
        monkeypatch.setenv(ERROR_MODE, value)

    def construct(*_: Any, **__: Any) -> tuple[Any, None]:
        seen.append(os.environ.get(ERROR_MODE))
        return SimpleNamespace(abort=lambda: None), None

    monkeypatch.setattr(c10d, "_new_process_group_helper", construct)
    monkeypatch.setattr(weight_group.c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    monkeypatch.setattr(c10d, "_world", SimpleNamespace(pg_group_ranks={}))
    group: Any = WeightGroup.__new__(WeightGroup)
    group.backend, group.address, group.name = "nccl", "127.0.0.1", "weights"
    group._backend_limit, group._store = timedelta(seconds=1), torch.distributed.HashStore()
    with suppress(TypeError):  # torch's table of groups can't hash the result
        group._join(2, 0)
    assert seen == [ABORT_GROUP]
    assert os.environ.get(ERROR_MODE) == value


@pytest.mark.parametrize(("backend", "read"), [("nccl", ABORT_GROUP), ("gloo", None)])
def test_the_server_s_group_is_made_with_it_too(monkeypatch, backend, read):
    seen: list[str | None] = []
    monkeypatch.delenv(ERROR_MODE, raising=False)

    def original(updater: Any, *_: Any) -> tuple[bool, str]:
        seen.append(os.environ.get(ERROR_MODE))
        return False, "no such host"

    updater = SimpleNamespace(_model_update_group={})
    answer = weight_groups.join(original, updater, "h", 1, 1, 2, "weights", backend)
    assert answer == (False, "no such host")
    assert seen == [read]
    assert ERROR_MODE not in os.environ


def test_two_groups_at_a_time_leave_the_variable_as_it_was(monkeypatch):
    monkeypatch.setenv(ERROR_MODE, "1")
    inside = threading.Event()

    def first() -> None:
        with errors_abort_the_group("nccl"):
            inside.set()
            time.sleep(0.05)

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with errors_abort_the_group("nccl"):
        assert os.environ[ERROR_MODE] == ABORT_GROUP
    thread.join()
    assert os.environ[ERROR_MODE] == "1"


def test_a_name_carries_its_limit():
    limit = timedelta(seconds=600.2)
    assert limit_of(new_name(limit)) == timedelta(seconds=601)
    assert new_name(limit) != new_name(limit)
    assert limit_of("weights") is None


def start_watch(monkeypatch):
    """Start the watch of a rank's group. Return the rendezvous, the groups, an event of the abort, and the thread."""
    monkeypatch.setattr(weight_groups, "_POLL_S", 0.01)
    monkeypatch.setattr(weight_groups, "_CONNECT_S", 0.05)
    store = [listening_store("127.0.0.1", 0, 2, timedelta(seconds=5), wait_for_workers=False)]
    aborted = threading.Event()
    groups: dict[str, Any] = {"weights": SimpleNamespace(abort=aborted.set)}
    watch = GroupWatch("127.0.0.1", store[0].port, groups, "weights")
    thread = threading.Thread(target=watch.run)
    thread.start()
    return store, groups, aborted, thread


def test_a_call_has_an_engine_abort_its_own_side(monkeypatch):
    """Over NVLink, the abort of another rank does not free an engine."""
    store, groups, aborted, thread = start_watch(monkeypatch)
    assert not aborted.wait(0.1)
    call_off("127.0.0.1", store[0].port)
    assert aborted.wait(60)
    thread.join(30)
    assert groups == {}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nccl_groups_alone_are_watched(monkeypatch, backend):
    """The trainer's abort wakes a rank of a gloo group, but not a rank that has aborted its own side."""
    started: list[str] = []
    limits: list[timedelta] = []
    monkeypatch.setattr(GroupWatch, "start", lambda watch: started.append(watch._name))
    monkeypatch.setattr(c10d, "_set_pg_timeout", lambda limit, group: limits.append(limit))
    name = new_name(timedelta(seconds=7))
    updater = SimpleNamespace(_model_update_group={})

    def original(updater: Any, *_: Any) -> tuple[bool, str]:
        updater._model_update_group[name] = object()
        return True, "joined"

    with socket.create_server(("127.0.0.1", 0)) as rendezvous:
        port = rendezvous.getsockname()[1]
        weight_groups.join(original, updater, "127.0.0.1", port, 1, 2, name, backend)
    assert limits == [timedelta(seconds=7)]
    assert started == ([name] if backend == "nccl" else [])


def test_a_watch_ends_with_the_group(monkeypatch):
    _, groups, aborted, thread = start_watch(monkeypatch)
    assert not aborted.wait(0.1)
    del groups["weights"]
    thread.join(30)
    assert not thread.is_alive()
    assert not aborted.is_set()


def test_a_trainer_that_is_gone_frees_its_engines(monkeypatch):
    store, groups, aborted, thread = start_watch(monkeypatch)
    assert not aborted.wait(0.1)
    store.clear()
    assert aborted.wait(60)
    thread.join(30)
    assert groups == {}


class Stream:
    def __init__(self, error: RuntimeError | None) -> None:
        self.error = error
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [None, RuntimeError("NCCL")])
def test_on_a_gpu_a_bucket_is_answered_when_its_bytes_are_there(monkeypatch, error):
    stream = Stream(error)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    success, _ = wait_for_bytes((True, "loaded"), SimpleNamespace(device="cuda"), [])
    assert success is (error is None)
    assert stream.waits == 1
    assert wait_for_bytes((True, "loaded"), SimpleNamespace(device="cpu"), []) == (True, "loaded")
    assert stream.waits == 1


SGLANG_PROGRAM = """
import logging
from datetime import timedelta
from types import SimpleNamespace
import torch
import torch.distributed as dist
from sglang.srt.plugins.hook_registry import HookRegistry
from megatron_dppo.weights.server import weight_groups
from megatron_dppo.system.network import listening_store
from megatron_dppo.system.ports import free_port

weight_groups.register()
HookRegistry.apply_hooks()
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
updater = SimpleNamespace(_model_update_group={}, tp_rank=0, device="cpu")
name = weight_groups.new_name(timedelta(seconds=7))
port = free_port("127.0.0.1")
join = WeightUpdater.init_weights_update_group
print(join(updater, "127.0.0.1", port, 0, 1, name, "gloo")[0])
print(updater._model_update_group[name]._get_backend(torch.device("cpu")).options._timeout)
print(hasattr(WeightUpdater.load_weights_from_distributed, "__wrapped__"))
store = listening_store("127.0.0.1", 0, 3, timedelta(minutes=30), wait_for_workers=False)
name = weight_groups.new_name(timedelta(seconds=1))
print(join(updater, "127.0.0.1", store.port, 1, 3, name, "gloo")[0])
"""


def test_a_server_does_not_join_where_no_trainer_listens():
    """Otherwise torch would try to connect until its limit, and the server would answer no request meanwhile."""
    updater = SimpleNamespace(_model_update_group={})
    calls: list[tuple[Any, ...]] = []

    def original(*arguments: Any) -> tuple[bool, str]:
        calls.append(arguments)
        return True, "joined"

    port = free_port("127.0.0.1")
    name = new_name(timedelta(seconds=600))
    joined, reason = weight_groups.join(original, updater, "127.0.0.1", port, 1, 2, name, "gloo")
    assert not joined
    assert f"127.0.0.1:{port}" in reason
    assert calls == []


def test_sglangs_own_group_gets_the_limit_by_the_hook():
    """The limit also ends the rendezvous of the group if another rank does not join."""
    command = [sys.executable, "-c", SGLANG_PROGRAM]
    result = run_patiently(command)
    last_lines = result.stdout.splitlines()[-4:]
    assert last_lines == ["True", "0:00:07", "True", "False"], result.stderr[-2000:]
