"""A supervised run of stand-in processes, as a program that the supervisor's tests start and kill.

``python -m tests.unit.supervised_run SPEC`` with SPEC a JSON object: ``directory``; ``rank``:
Python code of every rank; ``world_size``; ``servers``: for each server, a list with the Python code of
each incarnation, of which later incarnations run the last; ``router``: the same list for the router, or
an empty one for no router; ``attached``: URLs of attached servers; ``max_restarts`` of each server and
``rank_restarts`` of the ranks; ``rank_pause_s``: the first pause before ranks start again. A file
``trained`` in the directory counts as progress. Ranks have ``RANK`` and servers have ``INCARNATION`` in their
environment, and their code may call the functions of PRELUDE: for example, ``note(text)`` appends a line
to ``<directory>/notes``.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_dppo.engine.errors import EngineStartError
from megatron_dppo.engine.process import last_exception_of
from megatron_dppo.fleet.record import Keys
from megatron_dppo.fleet.supervision import RestartBudget, SupervisedFleet, SupervisedServer
from megatron_dppo.launch.local import RankGroup
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import RankRestarts, Supervisor
from megatron_dppo.system.lease import NONCE_VARIABLE
from megatron_dppo.system.processes import start_process, tail

PRELUDE = """
import contextlib, json, os, signal, subprocess, sys, time, urllib.request
from megatron_dppo.system.secret_variables import hide_secrets
hide_secrets()
def note(text):
    with open(os.path.join({directory!r}, "notes"), "a") as file:
        file.write(text + chr(10))
def exists(path):
    return os.path.exists(os.path.join({directory!r}, path))
def path_of(name):
    return os.path.join({directory!r}, name)
def wait_for(path):
    while not exists(path):
        time.sleep(0.02)
def read(path):
    with open(os.path.join({directory!r}, path)) as file:
        return file.read()
def published(name="engine0"):
    with contextlib.suppress(FileNotFoundError), open(path_of("engine/fleet.json")) as file:
        return json.load(file)["servers"].get(name)
def wait_published(name="engine0"):
    while not (server := published(name)):
        time.sleep(0.02)
    return server
def report_lost(incarnation, name="engine0"):
    key = json.loads(os.environ["MEGATRON_DPPO_STARTED_KEYS"])["admin"]
    request = urllib.request.Request(
        os.environ["MEGATRON_DPPO_FLEET"] + "/fleet/report_lost",
        json.dumps({{"name": name, "incarnation": incarnation}}).encode(),
        {{"Authorization": "Bearer " + key}},
    )
    urllib.request.urlopen(request).close()
"""


class StandInEngine:
    """Like ``engine.process.ChildServer``, with a child that runs Python code and is healthy once a file exists."""

    def __init__(self, code: str, directory: RunDirectory, name: str, incarnation: int) -> None:
        self.url = f"http://stand-in/{name}/{incarnation}"
        self._code = code
        self._log = directory.server_log(name, incarnation)
        self._healthy = directory.path / f"{name}-healthy{incarnation}"
        self._incarnation = incarnation
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        environment = {
            **os.environ,
            "HEALTHY": str(self._healthy),
            "INCARNATION": str(self._incarnation),
        }
        with self._log.open("wb") as file:
            command = [sys.executable, "-c", self._code]
            self._process = start_process(command, output=file.fileno(), environment=environment)

    def wait_healthy(self, on_progress: Callable[[float, str], None] | None = None) -> float:
        while not self._healthy.exists():
            if self.poll() is not None:
                raise EngineStartError(f"exited with {self.poll()}:\n{self.log_tail()}")
            time.sleep(0.02)
        return 0.5

    def poll(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def log_tail(self, lines: int = 40) -> str:
        return tail(self._log, lines)

    def last_exception(self) -> str | None:
        return last_exception_of(self._log)


def main() -> int:
    spec = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    path = Path(spec["directory"])
    prelude = PRELUDE.format(directory=str(path))
    with RunDirectory(path) as directory:
        command = [sys.executable, "-c", prelude + spec["rank"]]
        outputs = [directory.rank_output(rank) for rank in range(spec["world_size"])]
        record = directory.fleet
        record.sync_configured(spec["attached"])

        def supervised_server(name: str, codes: list[str]) -> SupervisedServer:
            def make_engine(incarnation: int) -> Any:
                code = prelude + codes[min(incarnation, len(codes)) - 1]
                return StandInEngine(code, directory, name, incarnation)

            budget = RestartBudget(spec["max_restarts"], 3600, first_pause_s=0.05)
            return SupervisedServer(name, make_engine, record, budget=budget, title=name)

        servers = [
            supervised_server(f"engine{i}", codes) for i, codes in enumerate(spec["servers"])
        ]
        router = supervised_server("router", spec["router"]) if spec["router"] else None
        fleet = SupervisedFleet(servers, router, record, Keys("a", "b"), "127.0.0.1")
        lease = directory.lease
        variables = {NONCE_VARIABLE: lease.fence.nonce, **fleet.rank_variables}
        ranks = RankGroup(command, outputs, 1, variables)
        pause_s = spec.get("rank_pause_s", 0.05)
        restarts = RankRestarts(
            RestartBudget(spec.get("rank_restarts", 0), 3600, first_pause_s=pause_s),
            lease.fence_other_starts,
            (path / "trained").exists,
        )
        return Supervisor(ranks, fleet, lambda: lease.loss, restarts=restarts).run().code


if __name__ == "__main__":
    sys.exit(main())
