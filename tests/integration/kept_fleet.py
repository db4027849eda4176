"""Real SGLang servers and the real router, kept alive as the supervisor of a run keeps them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import psutil

from megatron_dppo.config.machine import this_machine
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.process import Runtime, local_launcher
from megatron_dppo.fleet.endpoint import ENDPOINT_VARIABLE, RecordClient
from megatron_dppo.fleet.membership import Member
from megatron_dppo.fleet.record import Server
from megatron_dppo.launch.local import local_placement
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.servers import ServerStarts, supervised_fleet
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError
from tests.patience import UNBOUNDED_S, Patience, family_of
from tests.small_config import small_config

_WAIT_S = 300.0


class KeptFleet:
    """The servers and the router of ``config``, started by a separate thread. A context manager.

    Processes die with the thread that starts them, so one thread does all the work. ``rank_variables``: environment
    variables for ranks that a test starts. They are also set in this process.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._record: RecordClient | None = None
        self._config = config
        self.rank_variables: Mapping[str, str] = {}
        self._end = threading.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> KeptFleet:
        self._thread.start()
        self.wait_for(self._started.is_set)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _keep(self) -> None:
        with RunDirectory(self._config.run.directory) as directory:
            spec = RunSpec.of_checked(self._config)
            placement = local_placement(self._config, spec.roles, this_machine())
            runtime = Runtime(local_launcher(self._config.engine))
            starts = ServerStarts(lambda hosts: runtime, placement.master_address)
            fleet = supervised_fleet(self._config, spec, directory, placement, starts)
            self._record = RecordClient(fleet.rank_variables[ENDPOINT_VARIABLE], fleet.keys)
            self.rank_variables = fleet.rank_variables
            os.environ.update(fleet.rank_variables)
            try:
                fleet.start()
                self._started.set()
                while not self._end.wait(0.05):
                    fleet.check()
            except RunError as error:
                self._error = error
            finally:
                fleet.stop(at_once=True)
                for name in fleet.rank_variables:
                    os.environ.pop(name, None)

    def wait_for(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds. Fails if the fleet gives up, or if the patience is exhausted first."""
        # The servers' processes are children of this process.
        patience = Patience(_WAIT_S, lambda: family_of(os.getpid()))
        while not condition():
            assert self._error is None, self._error
            assert not patience.is_exhausted()
            time.sleep(0.02)

    @property
    def record(self) -> RecordClient:
        """The client of the server registry, as a rank has it."""
        assert self._record is not None
        return self._record

    def server(self, name: str) -> Server | None:
        """Return one server, or the router; None if it is not published."""
        published = [*self.record.servers(), *filter(None, [self.record.router()])]
        return next((s for s in published if s.name == name), None)

    def members(self, count: int) -> list[Member]:
        """Wait until ``count`` servers are healthy, and return them."""
        self.wait_for(lambda: len(self.record.servers()) == count)
        return [Member(s, self.record.keys(s)) for s in self.record.servers()]

    def wait_until_replaced(self, server: Server) -> Server:
        """Wait until the next incarnation of ``server`` is healthy, and return it."""
        self.wait_for(
            lambda: (s := self.server(server.name)) and s.incarnation > server.incarnation
        )
        found = self.server(server.name)
        assert found is not None
        return found


def family(server: Server) -> list[psutil.Process]:
    """Return the process of a server and its children: scheduler and detokenizer."""
    assert server.pid is not None
    root = psutil.Process(server.pid)
    return [root, *root.children(recursive=True)]


def kill(server: Server) -> None:
    """Send SIGKILL, as the kernel does when memory runs out."""
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)


def stop(server: Server) -> None:
    """Send SIGSTOP to all processes: connections stay open, and nothing answers."""
    for process in family(server):
        process.suspend()


def stop_scheduler(server: Server) -> None:
    """Send SIGSTOP to the process that computes. The HTTP process continues."""
    _suspend(server, "scheduler")


def stop_detokenizer(server: Server) -> None:
    """Send SIGSTOP to the process that turns tokens into answers."""
    _suspend(server, "detokenizer")


def _suspend(server: Server, word: str) -> None:
    [process] = [p for p in family(server)[1:] if word in " ".join(p.cmdline())]
    process.suspend()


def proceed(server: Server) -> None:
    """Send SIGCONT to all processes."""
    for process in family(server):
        process.resume()


def config_of(folder: Path, model: Path, **engine: object) -> TrainConfig:
    """Return the configuration of a run of ``model`` in ``folder``."""
    fleet = {"device": "cpu", "servers": 2, "max_restarts": 9, "start_timeout_s": UNBOUNDED_S}
    return small_config(folder, model, data={"max_prompt_tokens": 64}, engine={**fleet, **engine})
