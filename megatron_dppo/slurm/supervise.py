"""The batch process of a run: reads the allocation, places the roles, supervises them, and decides
whether the job starts again.

Signals: USR1, the time limit is near (Slurm's, beside our own clock): checkpoint, start again.
USR2: checkpoint, then end. TERM (scancel): the same, in the half minute that Slurm gives.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_dppo.config.loading import load_config, resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.child_server import Runtime
from megatron_dppo.launch.errors import LaunchError
from megatron_dppo.launch.finished import is_finished
from megatron_dppo.launch.library_checks import CHECK
from megatron_dppo.launch.local import generates, rank_command
from megatron_dppo.launch.placement import Allocation, Host, Placement, Roles, place
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.servers import supervised_fleet
from megatron_dppo.launch.slurm_rank import hostnames, port_base
from megatron_dppo.launch.srun import SrunLauncher, StepForm
from megatron_dppo.launch.srun_ranks import SrunRanks
from megatron_dppo.launch.stops import OVERTIME, TIME, Stop, StopRequests
from megatron_dppo.launch.supervisor import Outcome, Supervisor
from megatron_dppo.logging import configure_logging
from megatron_dppo.slurm import commands
from megatron_dppo.slurm.attempts import Attempt, AttemptBook, fruitless
from megatron_dppo.slurm.commands import SlurmError
from megatron_dppo.slurm.decisions import CANCELLED_CODE, Decision, decide
from megatron_dppo.slurm.site import SiteConfig, load_site, site_path
from megatron_dppo.system.fence import NONCE_VARIABLE

log = logging.getLogger(__name__)

MODULE = "megatron_dppo.train"
_LEAST_TO_END_S = 60.0
_EXCLUDE_TRIES = 20
_EXCLUDE_EVERY_S = 0.5
_LAST_BREATH_S = 2.0


@dataclass(frozen=True)
class Job:
    """The job that this process is the batch process of.

    ``attempt``: how often Slurm has started it before. ``ends``: epoch seconds, None without a limit.
    """

    id: str
    attempt: int
    hosts: tuple[Host, ...]
    ends: float | None

    @classmethod
    def of_environment(cls, site: SiteConfig) -> Job:
        """Raises SlurmError outside of a job."""
        job, attempt = commands.job_environment(os.environ)
        names = hostnames(os.environ["SLURM_JOB_NODELIST"])
        devices = site.devices(os.environ)
        places = zip(names, commands.addresses(names), strict=True)
        hosts = tuple(Host(name, address, devices) for name, address in places)
        return cls(job, attempt, hosts, commands.end_time(job))

    def stops(self, margin_s: float) -> StopRequests:
        """What asks this start to end."""
        deadlines = {}
        if self.ends is not None:
            deadlines[TIME] = self.ends - margin_s
            deadlines[OVERTIME] = self.ends - min(_LEAST_TO_END_S, margin_s / 3)
        signals: dict[int, Stop] = {
            signal.SIGUSR1: TIME,
            signal.SIGUSR2: Stop("asked", 0),
            signal.SIGTERM: Stop("cancelled", CANCELLED_CODE, insists=True),
        }
        return StopRequests(signals, deadlines)


def supervise(config_path: str, overrides: Sequence[str], site_file: str | None) -> int:
    """Run the recipe inside this job; the batch process's exit code. Raises ConfigError, LaunchError,
    SlurmError."""
    site = load_site(site_path(site_file))
    os.environ.update(site.environment)
    config = load_config(config_path, overrides)
    job = Job.of_environment(site)
    stops = job.stops(site.checkpoint_margin_s)
    with stops.listening():
        with RunDirectory(config.run.directory) as directory:
            configure_logging(directory.path, None)
            decision = _Start(config, job, site, directory, stops).run()
        return _requeue(job, decision)


class _Start:
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
        self._job = job
        self._site = site
        self._directory = directory
        self._stops = stops
        self._book = AttemptBook(directory.path)

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
            fruitless=fruitless([*before, ended]),
            max_failures=self._site.max_failures,
        )
        bad = _bad_nodes(names) if decision.requeue else {}
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
        if is_finished(self._config):
            return Outcome(0, "ended")
        try:
            placement = place(
                Roles.of(self._config), Allocation(self._job.hosts, port_base(self._job.id))
            )
        except LaunchError as error:
            return Outcome(1, "refused", str(error))
        log.info("attempt %d of job %s\n%s", self._job.attempt, self._job.id, placement.table())
        if (refused := self._check(placement)) is not None:
            return refused
        return self._supervisor(placement).run()

    def _check(self, placement: Placement) -> Outcome | None:
        """Have a step on the first host check everything that needs the libraries; why it refused."""
        path = self._directory.path / "logs" / "check.out"
        path.unlink(missing_ok=True)
        self._directory.write_config(resolved_yaml(self._config))
        launcher = SrunLauncher(placement.ranks[0].host, "check", self._form(server=False))
        command = [*rank_command(MODULE, self._directory), CHECK]
        step = launcher.start(command, environment=os.environ, log=path, stdin=b"")
        while (code := step.poll()) is None:
            if self._stops.came():
                step.kill()
                return Outcome(0, "stopped", self._stops.came()[0].why)
            time.sleep(0.1)
        if code == 0:
            return None
        return Outcome(code, "refused" if code == 2 else "failed", path.read_text(errors="replace"))

    def _supervisor(self, placement: Placement) -> Supervisor:
        config, directory = self._config, self._directory
        fleet = None
        if generates(config):
            fleet = supervised_fleet(config, directory, placement, self._runtime_at)
        lease = directory.lease
        found = {} if fleet is None else fleet.rank_variables
        ranks = SrunRanks(
            rank_command(MODULE, directory),
            directory,
            placement,
            self._form(server=False),
            {NONCE_VARIABLE: lease.fence.nonce, **found},
        )
        return Supervisor(ranks, fleet, lambda: lease.taken_over, self._stops)

    def _runtime_at(self, host: Host) -> Runtime:
        launcher = SrunLauncher(host, "server", self._form(server=True))
        python = self._config.engine.python
        return Runtime(launcher) if python is None else Runtime(launcher, python)

    def _form(self, *, server: bool) -> StepForm:
        folder = str(Path.cwd())
        return self._site.container.form(folder, server=server, flags=self._site.srun_flags)


def _bad_nodes(names: Sequence[str]) -> dict[str, str]:
    """Nodes that Slurm can't use any more; empty where it can't be asked."""
    try:
        return commands.bad_nodes(names)
    except SlurmError as error:
        log.warning("%s", error)
        return {}


def _requeue(job: Job, decision: Decision) -> int:
    """Have the job start again where that was decided; the exit code.

    A requeue ends this process too, by a TERM that is only noted. A job can be given nodes to keep off
    only when it waits again.
    """
    if not decision.requeue:
        return decision.code
    try:
        commands.requeue(job.id)
    except SlurmError as error:
        log.error("the job can't be requeued, so this run ends here: %s", error)
        return decision.code or 1
    for _ in range(_EXCLUDE_TRIES if decision.exclude else 0):
        try:
            commands.exclude(job.id, decision.exclude)
            break
        except SlurmError:
            time.sleep(_EXCLUDE_EVERY_S)
    time.sleep(_LAST_BREATH_S)
    return 0
