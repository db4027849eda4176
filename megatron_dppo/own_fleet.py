"""SGLang servers of programs that generate without a trainer: ``evaluate`` and ``rollout``.

The servers load the checkpoint themselves, run on this machine, and end with the program.
"""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config.errors import given
from megatron_dppo.config.machine import this_machine
from megatron_dppo.config.schema import AlgorithmConfig, TrainConfig
from megatron_dppo.engine.options import FIRST_WEIGHT_VERSION, free_server_port
from megatron_dppo.engine.process import EngineProcess, Runtime, local_launcher
from megatron_dppo.fleet.record import Keys, Server
from megatron_dppo.launch.local import local_placement
from megatron_dppo.launch.machine_checks import passed_variable_faults
from megatron_dppo.metrics.progress import progress
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError

if TYPE_CHECKING:
    from megatron_dppo.config.data_schema import Credit
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.fleet.generation import Generation, GenerationJob, OnResponse
    from megatron_dppo.fleet.membership import Member
    from megatron_dppo.loop.inputs import RunData
    from megatron_dppo.loop.scorer import Scorer

log = logging.getLogger(__name__)


class GenerationError(RunError):
    """The servers return no responses; the message says why."""


def own_fleet_faults(config: TrainConfig) -> Iterator[str]:
    """Report settings with which this process can't serve a checkpoint by itself."""
    if config.engine.servers_to_start == 0:
        yield (
            f"engine.servers: got {given(config.engine.servers)} with engine.urls {config.engine.urls}, expected at "
            "least 1: the checkpoint is served by servers that this command starts"
        )
    if config.engine.quantization is not None:
        yield (
            f"engine.quantization: got {config.engine.quantization}, expected null: servers without a trainer serve "
            f"the weights of model.hf_checkpoint ({config.model.hf_checkpoint}), which are not quantised"
        )
    yield from passed_variable_faults(config)


@contextmanager
def own_fleet(
    config: TrainConfig, spec: RunSpec, data: RunData, logs: Path, topk: int | None = None
) -> Iterator[tuple[OwnFleet, GenerationJob]]:
    """Start the servers of ``config``, with logs in the folder ``logs``, and its environment's processes; end them at
    the end of the block.

    ``config`` must have no ``own_fleet_faults``. Yields the servers, and the ``generation_job`` with ``topk``.
    """
    from megatron_dppo.loop.run_parts import generation_job, open_episodes

    episodes = open_episodes(config, spec, data)
    with ExitStack() as stack:
        if episodes is not None:
            stack.callback(episodes.pool.close)
        fleet = OwnFleet(config, stack.enter_context(_servers(config, spec, logs)))
        stack.callback(fleet.close)
        yield fleet, generation_job(config, data, spec, episodes, topk)


@contextmanager
def _servers(config: TrainConfig, spec: RunSpec, logs: Path) -> Iterator[list[Member]]:
    """Start servers on this machine, and kill them at the end."""
    from megatron_dppo.fleet.membership import Member

    servers = spec.servers
    keys = Keys(secrets.token_urlsafe(32), secrets.token_urlsafe(32))
    assert keys.admin is not None
    runtime = Runtime(local_launcher(config.engine), config.engine.python or sys.executable)
    processes = []
    try:
        placement = local_placement(
            config, replace(spec.roles, ranks=0, teachers=()), this_machine()
        )
        for device_place in placement.servers:
            process = EngineProcess(
                config,
                servers,
                port=free_server_port(servers, config.engine.host),
                log_path=logs / f"server-{device_place.index}.log",
                seed=config.run.seed + device_place.index,
                api_key=keys.api,
                admin_api_key=keys.admin,
                first_device=device_place.first_device,
                runtime=runtime,
            )
            processes.append(process)
            process.start()
        members = []
        for number, process in enumerate(processes):
            with progress(f"server {number + 1} of {len(processes)} starts", None) as bar:
                process.wait_healthy(
                    lambda seconds, stage: bar.update(note=f"{stage}, {seconds:.0f} s")
                )
            server = Server(f"server-{number}", process.url, incarnation=1, pid=process.pid)
            members.append(Member.of(server, keys, config.engine))
        yield members
    finally:
        for process in processes:
            process.kill()
        runtime.launcher.close()


class OwnFleet:
    """The servers of a program, as one client."""

    def __init__(self, config: TrainConfig, members: Sequence[Member]) -> None:
        from megatron_dppo.fleet.calls import ServerCalls

        self._calls = ServerCalls(config, _report_lost)
        self._calls.runner.run(self._calls.client.serve(members, FIRST_WEIGHT_VERSION))

    def start(
        self,
        job: GenerationJob,
        description: str,
        on_response: OnResponse | None = None,
        order: int = 0,
        done: Mapping[Hashable, Trajectory] | None = None,
    ) -> Generation:
        """Request the responses of ``job`` that are not in ``done``, and return at once."""
        from megatron_dppo.fleet.generation import Generation

        generation = Generation(job, description, on_response, order, dict(done or {}))
        self._calls.request(generation, stop=_never)
        return generation

    def finish(
        self, generation: Generation, trainer_version: int | None = None, *, mixes: bool = True
    ) -> list[Trajectory]:
        """Return all responses of a generation. ``trainer_version`` and ``mixes`` are for servers of a trainer.

        Raises GenerationError if no server is left, or if a response failed repeatedly.
        """
        from megatron_dppo.fleet.generation import GenerationEnd

        end, reason = generation.wait(stop=_never)
        if end is not GenerationEnd.DONE:
            raise GenerationError(f"{generation.description}: {reason}")
        return generation.job.trajectories(generation.done)

    def drop(self, generation: Generation) -> None:
        """Cancel a generation whose responses are not needed."""
        generation.cancel()

    def scored(
        self,
        job: GenerationJob,
        description: str,
        scorer: Scorer,
        algorithm: AlgorithmConfig,
        credit: Credit = "trajectory",
    ) -> list[Trajectory]:
        """Generate and score responses; return them with rewards and advantages, in the order of the job.

        A response whose reward is unavailable is replaced by another response, ``reward.max_replacements`` times at
        most.

        Args:
            job: problems and sampling settings.
            description: text of the progress bar.
            scorer: scores each response as soon as it arrives.
            algorithm: settings of advantages and length penalties.
            credit: what has an advantage of its own: each ``turn`` or each ``trajectory``.

        Raises RewardUnavailableError if responses have no reward in the end, and GenerationError as ``finish`` does.
        """
        from megatron_dppo.loop.scoring import ScoredGeneration

        generation = ScoredGeneration(self, scorer, job, description, gather=_of_this_process)
        generation.wait()
        return generation.scored(algorithm, credit)

    def close(self) -> None:
        self._calls.close()


def _report_lost(server: Server) -> None:
    log.warning("%s is lost: %s", server.name, server.url)


def _of_this_process(value: Any) -> list[Any]:
    """Return the values of all ranks: a program without a trainer has one."""
    return [value]


def _never() -> bool:
    return False
