"""The batch process of a run: it reads the allocation, checks the nodes, supervises one start, and requeues the job.

Signals to this process:

- USR1: Slurm sends it near the time limit. This process also watches the limit by its own clock. The run saves a
  checkpoint, and the job starts again.
- USR2 (``megatron-dppo stop``): the run saves a checkpoint and ends.
- TERM (scancel): the run saves a checkpoint and ends. Slurm kills the job after 30 s (KillWait).
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from megatron_dppo.cluster.preflight import judge, table, write_verdict
from megatron_dppo.cluster.preflight.evidence import EVERYWHERE, Needs, needs_of, read_evidence
from megatron_dppo.cluster.slurm import commands
from megatron_dppo.cluster.slurm.decisions import (
    CANCELLED_CODE,
    Decision,
    count_fruitless_starts,
    decide,
)
from megatron_dppo.cluster.slurm.site import SiteConfig, load_site, site_path
from megatron_dppo.config.loading import load_config
from megatron_dppo.config.machine import allocator_faults
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.process import Runtime
from megatron_dppo.launch import srun
from megatron_dppo.launch.attempts import Attempt, AttemptBook
from megatron_dppo.launch.forked_ranks import shares_imports
from megatron_dppo.launch.library_checks import CHECK
from megatron_dppo.launch.local import rank_command, supervisor_of
from megatron_dppo.launch.placement import (
    Allocation,
    Host,
    LaunchError,
    Placement,
    PlacementError,
    place,
)
from megatron_dppo.launch.run_directory import RunDirectory, is_finished
from megatron_dppo.launch.servers import ServerStarts
from megatron_dppo.launch.slurm_client import SlurmError
from megatron_dppo.launch.stops import OVERTIME, TIME, Stop, StopRequests
from megatron_dppo.launch.supervisor import Outcome, Supervisor
from megatron_dppo.logging import REFUSED, configure_logging
from megatron_dppo.spec import Roles, RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import (
    HEARTBEAT_VARIABLE,
    PATIENCE_VARIABLE,
    feed,
    quote,
    start_process,
    tail,
)
from megatron_dppo.system.secret_variables import hide_secrets, split_environment, without_secrets

log = logging.getLogger(__name__)

# A run that has not saved its checkpoint is ended this many seconds before the time limit.
_END_S = 60.0
# The time limit is read again after this many seconds.
_LIMIT_EVERY_S = 60.0


@dataclass(frozen=True)
class Job:
    """The Slurm job whose batch process this is.

    Attributes:
        attempt: number of the job's earlier starts.
        hosts: the job's nodes.
        ends: epoch seconds of the time limit; None without a limit.
        gpus: GPUs of a node.
    """

    id: str
    attempt: int
    hosts: tuple[Host, ...]
    ends: float | None
    gpus: int

    @classmethod
    def of_environment(cls, site: SiteConfig) -> Job:
        """Read the job from Slurm's variables. Raises SlurmError outside of a job."""
        job, attempt = commands.job_environment(os.environ)
        groups = job_groups(os.environ)
        names: list[str] = []
        group_of: dict[str, int | None] = {}
        for group, nodes in groups.items():
            group_names = srun.hostnames(nodes)
            names += group_names
            group_of |= dict.fromkeys(group_names, group)
        devices = site.devices(os.environ)
        hosts = []
        for name, address in zip(names, commands.addresses(names), strict=True):
            hosts.append(Host(name, address, devices, group_of[name]))
        gpus = devices if site.gpus_per_node else 0
        return cls(job, attempt, tuple(hosts), commands.end_time(job), gpus)

    def stops(self, margin_s: float) -> StopRequests:
        """Return the requests to stop: by Slurm's signals, and by the clock ``margin_s`` seconds before the limit."""
        signals: dict[int, Stop] = {
            signal.SIGUSR1: TIME,
            signal.SIGUSR2: Stop("asked", 0),
            signal.SIGTERM: Stop("cancelled", CANCELLED_CODE, insists=True),
        }
        return StopRequests(signals, deadlines(self.ends, margin_s))

    def follow_time_limit(self, stops: StopRequests, margin_s: float) -> None:
        """Start a thread that reads the time limit from Slurm regularly, because an operator may change it."""

        def follow() -> None:
            while True:
                time.sleep(_LIMIT_EVERY_S)
                try:
                    end_time = commands.end_time(self.id)
                except SlurmError as error:
                    log.warning("the job's time limit can't be read again: %s", error)
                else:
                    stops.move_deadlines(deadlines(end_time, margin_s))

        threading.Thread(target=follow, name="time limit", daemon=True).start()


def job_groups(environment: Mapping[str, str]) -> dict[int | None, str]:
    """Return Slurm's node list for each group of a heterogeneous job. Any other job has one group, with key None."""
    group_count = int(environment.get("SLURM_HET_SIZE", "0"))
    if not group_count:
        return {None: environment["SLURM_JOB_NODELIST"]}
    return {g: environment[f"SLURM_JOB_NODELIST_HET_GROUP_{g}"] for g in range(group_count)}


def deadlines(ends: float | None, margin_s: float) -> dict[Stop, float]:
    """Return when a job that ends at ``ends`` must save a checkpoint, and when it must end even without saving."""
    if ends is None:
        return {}
    # If the margin is short, the run has two thirds of the margin to save its checkpoint.
    return {TIME: ends - margin_s, OVERTIME: ends - min(_END_S, margin_s / 3)}


class Spares:
    """Hosts without a role. A spare replaces a host of servers if the host's node dies.

    All servers of a host move to one spare. The spare has as many devices as the host.
    """

    def __init__(
        self,
        hosts: Sequence[Host],
        states_of_bad_nodes: Callable[[Sequence[str]], dict[str, str]] = commands.bad_nodes,
    ) -> None:
        self._free_hosts = list(hosts)
        self._replacements: dict[Host, Host] = {}
        self._states_of_bad_nodes = states_of_bad_nodes

    def host_now(self, host: Host) -> Host:
        """Return the host on which a server of ``host`` restarts: ``host``, or the spare that replaces ``host``."""
        current_host = self._replacements.get(host, host)
        while True:
            name = current_host.name
            state = self._states_of_bad_nodes([name]).get(name)
            if state is None:
                return current_host
            if not self._free_hosts:
                log.error("node %s is %s, and there is no spare for its servers", name, state)
                return current_host
            spare = self._free_hosts.pop(0)
            log.warning("node %s is %s: its servers move to %s", name, state, spare.name)
            self._replacements[host] = spare
            current_host = spare


MODULE = "megatron_dppo.train"
_POLL_S = 0.1
_STEP_LIMIT_S = 900.0
"""Longest time of a step before the run, for example of the preflight."""


class PreflightError(RunError):
    """The preflight leaves too few nodes for the run; the message names the unfit nodes, and why each is unfit."""


@dataclass(frozen=True)
class Steps:
    """Runs the Slurm steps that precede a run. Any of ``stops`` ends a step early.

    ``check`` and ``preflight`` read the run's ``config.yaml``, so that file must exist.
    """

    directory: RunDirectory
    form: srun.StepForm
    python: str
    stops: StopRequests

    def check(self, host: Host) -> Outcome | None:
        """Run the checks that need the libraries on ``host`` (``launch/library_checks.py``).

        Return None if they pass, else the run's outcome.
        """
        path = self.directory.logs / "check.out"
        command = [*rank_command(MODULE, self.directory, self.python), CHECK]
        code = self.run("check", command, [host], path, tolerant=False, needs_keys=True)
        if code == 0:
            return None
        if stopped := self.stops.requested():
            return Outcome(stopped[0].code, "stopped", stopped[0].why)
        text = path.read_text(errors="replace")
        log.error("the check on %s refused:\n%s", host.name, quote(text.strip()))
        if code == REFUSED:
            return Outcome(code, "refused", text)
        # A step that was ended after its longest time has no exit code.
        return Outcome(code or 1, "failed", text)

    def preflight(self, needs: Needs, job: Job, skipped: Sequence[str]) -> dict[str, str]:
        """Return the nodes that must be left out, each with the reason.

        Raises LaunchError for a fault that no node causes: other nodes would have the same fault.
        """
        folder = self.directory.path / "preflight" / f"{job.id}-{job.attempt}"
        command = [self.python, "-m", "megatron_dppo.cluster.preflight", str(self.directory.config)]
        command += [f"--evidence={folder}", f"--gpus={needs.gpus}", f"--nodes={len(job.hosts)}"]
        command += [f"--port={port}" for port in needs.ports]
        command += [f"--skip={name}" for name in skipped]
        output = self.directory.logs / "preflight.out"
        log.info("preflight on %d nodes", len(job.hosts))
        self.run("preflight", command, job.hosts, output, tolerant=True, needs_keys=False)
        # A stop ends the step, and then missing evidence is not the node's fault.
        if self.stops.requested():
            return {}
        names = [host.name for host in job.hosts]
        evidence = read_evidence(folder, names)
        findings = judge(evidence, needs, names)
        folder.mkdir(parents=True, exist_ok=True)
        write_verdict(folder, findings)
        log.info("%s", table(evidence, findings))
        reasons = defaultdict(list)
        for finding in findings:
            reasons[finding.host].append(str(finding))
        if EVERYWHERE in reasons:
            raise LaunchError(f"preflight: {'; '.join(reasons[EVERYWHERE])}; see {output}")
        return {host: "; ".join(findings_of_host) for host, findings_of_host in reasons.items()}

    def run(
        self,
        name: str,
        command: Sequence[str],
        hosts: Sequence[Host],
        output: Path,
        *,
        tolerant: bool,
        needs_keys: bool,
    ) -> int | None:
        """Run a step in each group of hosts; return the highest exit code, or None after a stop or a time-out.

        Args:
            name: name of the step.
            command: the command of each task; one task runs on each host.
            hosts: hosts of any groups.
            output: file for the tasks' output; it is replaced.
            tolerant: whether the other tasks continue after a task's error.
            needs_keys: whether the tasks read the variables that hold secrets from their standard input.
        """
        output.unlink(missing_ok=True)
        variables = without_secrets(os.environ)
        secrets = b""
        if needs_keys:
            variables, secrets = split_environment(os.environ)
        processes = []
        with open(output, "ab") as file:
            for group in Allocation(tuple(hosts)).groups:
                step = self.form.command(
                    command,
                    name=name,
                    hosts=group,
                    tasks_per_host=1,
                    output=srun.literal(output),
                    stdin=needs_keys,
                    tolerant=tolerant,
                )
                process = start_process(
                    step,
                    environment=srun.step_environment(variables),
                    output=file.fileno(),
                    stdin=subprocess.PIPE if needs_keys else subprocess.DEVNULL,
                )
                if needs_keys:
                    feed(process, secrets)
                processes.append(process)
        deadline = time.monotonic() + _STEP_LIMIT_S
        while None in (codes := [process.poll() for process in processes]):
            if self.stops.requested() or time.monotonic() > deadline:
                for process in processes:
                    srun.SrunProcess(process, self.form.fence).kill()
                log.warning("the step %s was ended: %s", name, tail(output, 1))
                return None
            time.sleep(_POLL_S)
        return max(code for code in codes if code is not None)


def _ports(placement: Placement) -> set[int]:
    """Return the ports on which the run's processes listen. A process that restarts listens on another port."""
    router = placement.router
    servers = (*placement.servers, *placement.teachers)
    ports = [placement.master_port, *(server.port for server in servers)]
    ports += [server.meeting_port for server in servers]
    if router is not None:
        ports += [router.port, router.metrics_port]
    return {port for port in ports if port is not None}


@dataclass(eq=False)
class Start:
    """One start of a run in a job.

    Attributes:
        config: the run's configuration.
        job: the Slurm job of this process.
        site: settings of the cluster.
        directory: the run's folder. This process holds the folder's lease.
        stops: requests to end the run.
        roles_of: the configuration whose ranks and servers are placed; None: ``config``. In a rehearsal, ``roles_of``
            is the recipe: the rehearsal's smaller servers take the places of the recipe's servers.
    """

    config: TrainConfig
    job: Job
    site: SiteConfig
    directory: RunDirectory
    stops: StopRequests
    roles_of: TrainConfig | None = None
    _unfit_nodes: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._book = AttemptBook(self.directory.path)

    def run(self) -> Decision:
        """Run this start, record it among the run's attempts, and return what follows."""
        job = self.job
        names = tuple(host.name for host in self.job.hosts)
        node = os.environ.get("SLURMD_NODENAME", socket.gethostname())
        attempt = self._book.begin(Attempt(job.id, job.attempt, node, names, time.time()))
        outcome = self._outcome()
        # Read this attempt's last checkpoint now, because the count of fruitless starts includes this attempt. The
        # reason "failed" is provisional: the reason of the decision replaces "failed".
        ended_attempt = self._book.reached(replace(attempt, why="failed", ended=time.time()))
        this_attempt = (job.id, job.attempt)
        earlier_attempts = [a for a in self._book.all() if (a.job, a.attempt) != this_attempt]
        decision = decide(
            outcome,
            finished=is_finished(self.config),
            cancelled=any(stop.why == "cancelled" for stop in self.stops.requested()),
            fruitless_starts=count_fruitless_starts([*earlier_attempts, ended_attempt]),
            max_failures=self.site.max_failures,
        )
        if decision.why == "cancelled" and (lost_nodes := commands.bad_nodes(names)):
            states = ", ".join(f"{name} is {state}" for name, state in lost_nodes.items())
            decision = replace(decision, detail=f"by Slurm, which lost a node: {states}")
        excluded_nodes = {}
        what_follows = ""
        if decision.requeue:
            excluded_nodes = {**commands.bad_nodes(names), **self._unfit_nodes}
            what_follows = "; the job starts again"
        ended_attempt = replace(
            ended_attempt,
            why=decision.why,
            detail=decision.detail,
            requeued=decision.requeue,
            excluded=tuple(excluded_nodes.items()),
        )
        self._book.end(ended_attempt)
        log.info(
            "attempt %d of job %s: %s, checkpoint of step %d%s",
            job.attempt,
            job.id,
            decision.why,
            ended_attempt.saved,
            what_follows,
        )
        return replace(decision, exclude=tuple(excluded_nodes))

    def _outcome(self) -> Outcome:
        """Place and check everything, then run. If nothing was started, the outcome has the reason."""
        if is_finished(self.config):
            return Outcome(0, "ended")
        first_port = srun.port_base(self.job.id)
        python = self.site.container.interpreter
        steps = Steps(self.directory, self._form(server=False), python, self.stops)
        self.directory.write_config(self.config)
        try:
            # Check this process's variables: every step receives them.
            faults = list(allocator_faults(self.config.weight_sync.strategy, os.environ))
            if self.job.gpus and faults:
                raise LaunchError("; ".join(faults))
            roles = Roles.of(self.config)
            if self.roles_of is not None:
                devices = self.job.hosts[0].devices
                roles = rehearsed_roles(self.roles_of, devices, on_gpus=self.job.gpus > 0)
            placement = place(roles, Allocation(self.job.hosts, first_port))
            if self.site.preflight:
                self._unfit_nodes = self._preflight(steps, placement)
            if self._unfit_nodes:
                fit_hosts = [host for host in self.job.hosts if host.name not in self._unfit_nodes]
                allocation = Allocation(tuple(fit_hosts), first_port)
                placement = _place_again(roles, allocation, self._unfit_nodes)
        except PreflightError as error:
            return Outcome(1, "failed", str(error))
        except LaunchError as error:
            log.error("refused: %s", error)
            return Outcome(2, "refused", str(error))
        if stopped := self.stops.requested():
            return Outcome(stopped[0].code, "stopped", stopped[0].why)
        log.info("attempt %d of job %s\n%s", self.job.attempt, self.job.id, placement.table())
        refusal = steps.check(placement.ranks[0].host)
        return refusal or self._supervise(placement)

    def _supervise(self, placement: Placement) -> Outcome:
        try:
            supervisor = self._supervisor(placement)
        except LaunchError as error:
            # The supervisor's HTTP endpoint can't listen on this node.
            return Outcome(1, "failed", str(error))
        return supervisor.run()

    def _preflight(self, steps: Steps, placement: Placement) -> dict[str, str]:
        gpus = 0
        if self.config.engine.device != "cpu":
            gpus = self.job.gpus
        needs = needs_of(self.config, gpus=gpus, ports=sorted(_ports(placement)))
        return steps.preflight(needs, self.job, self.site.preflight_skip)

    def _supervisor(self, placement: Placement) -> Supervisor:
        config = self.config
        directory = self.directory
        spec = RunSpec.of_checked(config)
        starts = None
        if not spec.rollout.replays:
            spares = Spares(placement.unused)
            # Slurm starts the batch process on the first node.
            address = self.job.hosts[0].address
            starts = ServerStarts(self._runtime_at, address, spares.host_now)
        ranks_with = partial(
            srun.SrunRanks,
            rank_command(MODULE, directory, self.site.container.interpreter),
            directory,
            placement,
            self._form(server=False),
            forks=shares_imports(placement.ranks_per_host, self.job.gpus),
        )
        supervisor = supervisor_of(config, spec, directory, placement, starts, ranks_with)
        supervisor.stops = self.stops
        names = [host.name for host in placement.rank_hosts]
        assert supervisor.restarts is not None
        supervisor.restarts.obstacle = partial(_lost_nodes, names)
        return supervisor

    def _runtime_at(self, hosts: Sequence[Host]) -> Runtime:
        launcher = srun.SrunLauncher(hosts, "server", self._form(server=True))
        variables = {}
        if self.site.spares_servers:
            variables[HEARTBEAT_VARIABLE] = str(self.directory.lease.heartbeat)
            variables[PATIENCE_VARIABLE] = str(self.site.supervisor_patience_s)
        python = self.config.engine.python or self.site.container.interpreter
        return Runtime(launcher, python, variables)

    def _form(self, *, server: bool) -> srun.StepForm:
        form = self.site.form(str(Path.cwd()), server=server)
        return replace(form, fence=self.directory.lease.fence.check)


def _lost_nodes(names: Sequence[str]) -> str | None:
    """Return the nodes that Slurm can't use any more, in words; None if Slurm can use all nodes."""
    states = [f"node {name} is {state}" for name, state in commands.bad_nodes(names).items()]
    return ", ".join(states) or None


def rehearsed_roles(recipe: TrainConfig, devices: int | None, *, on_gpus: bool) -> Roles:
    """Return the roles of ``recipe`` in its rehearsal.

    Without GPUs, each server is on one host and has at most ``devices`` devices. The servers do not use the recipe's
    port, because a rehearsal's configuration has no port.
    """
    roles = Roles.of(recipe)
    if on_gpus:
        return roles
    most = devices or 1
    teachers = [replace(t, server_devices=min(t.server_devices, most)) for t in roles.teachers]
    return replace(
        roles, server_devices=min(roles.server_devices, most), port=None, teachers=tuple(teachers)
    )


def _place_again(roles: Roles, fit_nodes: Allocation, unfit_nodes: Mapping[str, str]) -> Placement:
    """Place the roles on the remaining nodes.

    Raises PreflightError if too few nodes remain. Raises LaunchError if there were several nodes and none remains: then
    the run's own settings are at fault, and other nodes would not help.
    """
    reasons = "; ".join(f"{name}: {reason}" for name, reason in unfit_nodes.items())
    log.warning("preflight leaves out %s", reasons)
    try:
        if fit_nodes.hosts:
            return place(roles, fit_nodes)
    except PlacementError as error:
        raise PreflightError(f"preflight left out {reasons}; {error}") from error
    if len(unfit_nodes) > 1:
        raise LaunchError(f"preflight: no node is fit: {reasons}")
    raise PreflightError(f"preflight left out the only node: {reasons}")


_EXCLUDE_TRIES = 20
_EXCLUDE_EVERY_S = 0.5
_REQUEUE_SIGNAL_S = 2.0


def supervise(
    config_path: str,
    overrides: Sequence[str],
    site_file: str | None,
    *,
    once: bool = False,
    roles_of: str | None = None,
) -> int:
    """Run the recipe inside this job and return the batch process's exit code.

    Args:
        config_path: the recipe.
        overrides: values that replace the recipe's.
        site_file: the site file.
        once: whether to return after this start without a requeue, however the start ends.
        roles_of: the recipe whose ranks and servers are placed; see ``Start``.

    Raises ConfigError, LaunchError, SlurmError.
    """
    site = load_site(site_path(site_file))
    os.environ.update(site.environment)
    hide_secrets()
    config = load_config(config_path, overrides)
    placed_config = None if roles_of is None else load_config(roles_of)
    job = Job.of_environment(site)
    stops = job.stops(site.checkpoint_margin_s)
    job.follow_time_limit(stops, site.checkpoint_margin_s)
    with stops.listening():
        with RunDirectory(config.run.directory) as directory:
            configure_logging(directory.path, None)
            decision = Start(config, job, site, directory, stops, placed_config).run()
        if once:
            return decision.code
        return _requeue(job, decision)


def _requeue(job: Job, decision: Decision) -> int:
    """Requeue the job if ``decision`` says so, and return the exit code.

    Nodes are excluded after the requeue: Slurm accepts excluded nodes only for a waiting job.
    """
    if not decision.requeue:
        return decision.code
    try:
        commands.requeue(job.id)
    except SlurmError as error:
        log.error("the job can't be requeued, so this run ends here: %s", error)
        return decision.code or 1
    if decision.exclude:
        _exclude(job, decision.exclude)
    # A requeue also sends SIGTERM to this process. Wait for SIGTERM while the caller's ``stops.listening()`` handles
    # signals: there, SIGTERM only adds a stop to ``stops``, and does not replace the exit code 0.
    time.sleep(_REQUEUE_SIGNAL_S)
    return 0


def _exclude(job: Job, nodes: Sequence[str]) -> None:
    for _ in range(_EXCLUDE_TRIES):
        try:
            commands.exclude(job.id, nodes)
            return
        except SlurmError:
            time.sleep(_EXCLUDE_EVERY_S)
