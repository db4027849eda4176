"""One start of a run inside its job: placed, inspected, checked, supervised, written down."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_dppo.config.allocator import allocator_problems
from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import ServerSections
from megatron_dppo.engine.process import Runtime
from megatron_dppo.launch.local import rank_command
from megatron_dppo.launch.placement import (
    Allocation,
    Host,
    LaunchError,
    Placement,
    PlacementError,
    Roles,
    place,
)
from megatron_dppo.launch.run_directory import RunDirectory, is_finished
from megatron_dppo.launch.servers import Grounds, supervised_fleet
from megatron_dppo.launch.srun import SrunLauncher, SrunRanks, StepForm, port_base
from megatron_dppo.launch.supervisor import Outcome, StopRequests, Supervisor
from megatron_dppo.slurm.attempts import Attempt, AttemptBook, fruitless
from megatron_dppo.slurm.decisions import Decision, decide
from megatron_dppo.slurm.job import Job
from megatron_dppo.slurm.site import SiteConfig
from megatron_dppo.slurm.spares import Spares, bad_nodes
from megatron_dppo.slurm.steps import MODULE, PreflightError, Steps
from megatron_dppo.system.lease import NONCE_VARIABLE
from megatron_dppo.system.processes import HEARTBEAT_VARIABLE, PATIENCE_VARIABLE

log = logging.getLogger(__name__)


class Start:
    """One start of the run inside its job."""

    def __init__(
        self,
        config: TrainConfig,
        job: Job,
        site: SiteConfig,
        directory: RunDirectory,
        stops: StopRequests,
    ) -> None:
        self._config = config
        self._sections = ServerSections.where_generated(config)
        self._job = job
        self._site = site
        self._directory = directory
        self._stops = stops
        self._book = AttemptBook(directory.path)
        self._left_out: dict[str, str] = {}

    def run(self) -> Decision:
        """Supervise it and write down how it ended."""
        job, names = self._job, tuple(host.name for host in self._job.hosts)
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        attempt = self._book.begin(Attempt(job.id, job.attempt, node, names, time.time()))
        outcome = self._outcome()
        ended = self._book.reached(replace(attempt, why="failed", ended=time.time()))
        before = [a for a in self._book.all() if (a.job, a.attempt) != (job.id, job.attempt)]
        decision = decide(
            outcome,
            finished=is_finished(self._config),
            cancelled=any(stop.why == "cancelled" for stop in self._stops.came()),
            fruitless=fruitless([*before, ended]),
            max_failures=self._site.max_failures,
        )
        if decision.why == "cancelled" and (lost := bad_nodes(names)):
            told = ", ".join(f"{name} is {state}" for name, state in lost.items())
            decision = replace(decision, detail=f"by Slurm, which lost a node: {told}")
        bad = {**bad_nodes(names), **self._left_out} if decision.requeue else {}
        ended = replace(
            ended,
            why=decision.why,
            detail=decision.detail,
            requeued=decision.requeue,
            excluded=tuple(bad.items()),
        )
        self._book.end(ended)
        log.info(
            "attempt %d of job %s: %s, checkpoint of step %d%s",
            job.attempt,
            job.id,
            decision.why,
            ended.saved,
            "; the job starts again" if decision.requeue else "",
        )
        return replace(decision, exclude=tuple(bad))

    def _outcome(self) -> Outcome:
        """Place and check everything, then run; why nothing was started, where that is so."""
        if is_finished(self._config):
            return Outcome(0, "ended")
        base = port_base(self._job.id)
        self._directory.write_config(resolved_yaml(self._config))
        try:
            self._require_environment()
            roles = Roles.of(self._config.parallel.world_size, self._sections)
            placement = place(roles, Allocation(self._job.hosts, base))
            if self._site.preflight and (bad := self._preflight(placement)):
                self._left_out = bad
                sound = tuple(host for host in self._job.hosts if host.name not in bad)
                placement = _place_again(roles, Allocation(sound, base), bad)
        except PreflightError as error:
            return Outcome(1, "failed", str(error))
        except LaunchError as error:
            log.error("refused: %s", error)
            return Outcome(2, "refused", str(error))
        if stopped := self._stops.came():
            return Outcome(stopped[0].code, "stopped", stopped[0].why)
        log.info("attempt %d of job %s\n%s", self._job.attempt, self._job.id, placement.table())
        refused = self._check(placement)
        return self._supervise(placement) if refused is None else refused

    def _supervise(self, placement: Placement) -> Outcome:
        try:
            supervisor = self._supervisor(placement)
        except LaunchError as error:  # its endpoint can't listen
            return Outcome(1, "failed", str(error))
        return supervisor.run()

    def _require_environment(self) -> None:
        """What this process has, every step gets. Raises LaunchError for what the run can't work with."""
        if problems := list(allocator_problems(self._config, os.environ)) if self._job.gpus else []:
            raise LaunchError("; ".join(problems))

    def _preflight(self, placement: Placement) -> dict[str, str]:
        """Nodes that must be left out, with the reason. Raises LaunchError where none is to blame."""
        return self._steps().preflight(
            self._config, self._job, placement, self._site.preflight_skip
        )

    def _check(self, placement: Placement) -> Outcome | None:
        return self._steps().check(placement.ranks[0].host)

    def _steps(self) -> Steps:
        python = self._site.container.interpreter
        return Steps(self._directory, self._form(server=False), python, self._stops)

    def _supervisor(self, placement: Placement) -> Supervisor:
        config, directory = self._config, self._directory
        fleet = None
        if self._sections is not None:
            spares = Spares(placement.unused)
            own = self._job.hosts[0].address  # Slurm starts the batch process on the first node
            grounds = Grounds(self._runtime_at, own, spares.host_now)
            fleet = supervised_fleet(
                self._sections,
                directory,
                placement,
                grounds,
                seed=config.run.seed,
                interface=config.parallel.interface,
            )
        lease = directory.lease
        variables = {} if fleet is None else fleet.rank_variables
        ranks = SrunRanks(
            rank_command(MODULE, directory, self._site.container.interpreter),
            directory,
            placement,
            self._form(server=False),
            {NONCE_VARIABLE: lease.fence.nonce, **variables},
        )
        return Supervisor(ranks, fleet, lambda: lease.taken_over, self._stops)

    def _runtime_at(self, hosts: Sequence[Host]) -> Runtime:
        launcher = SrunLauncher(hosts, "server", self._form(server=True))
        variables = {}
        if self._site.spares_servers:
            variables[HEARTBEAT_VARIABLE] = str(self._directory.lease.heartbeat)
            variables[PATIENCE_VARIABLE] = str(self._site.supervisor_patience_s)
        python = self._config.engine.python or self._site.container.interpreter
        return Runtime(launcher, python, variables)

    def _form(self, *, server: bool) -> StepForm:
        form = self._site.form(str(Path.cwd()), server=server)
        return replace(form, fence=self._directory.lease.fence.check)


def _place_again(roles: Roles, sound: Allocation, bad: Mapping[str, str]) -> Placement:
    """The roles on the nodes that are left.

    Raises PreflightError where they are too few, LaunchError where of several none is left: then what the
    run asks for is at fault, and other nodes would not help.
    """
    told = "; ".join(f"{name}: {why}" for name, why in bad.items())
    log.warning("preflight leaves out %s", told)
    try:
        if sound.hosts:
            return place(roles, sound)
    except PlacementError as error:
        raise PreflightError(f"preflight left out {told}; {error}") from error
    if len(bad) > 1:
        raise LaunchError(f"preflight: no node is fit: {told}")
    raise PreflightError(f"preflight left out the only node: {told}")
