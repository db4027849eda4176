"""Steps before a run: every node's preflight, and the check that needs the libraries."""

from __future__ import annotations

import logging
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.launch.library_checks import CHECK
from megatron_dppo.launch.local import rank_command
from megatron_dppo.launch.placement import Allocation, Host, LaunchError, Placement
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.srun import SrunProcess, StepForm, literal, step_environment
from megatron_dppo.launch.supervisor import Outcome, StopRequests
from megatron_dppo.logging import REFUSED
from megatron_dppo.preflight import EVERYWHERE, Verdict, judge, needs_of, read_evidence
from megatron_dppo.preflight.table import table
from megatron_dppo.slurm.job import Job
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.processes import quote, start_process, tail

log = logging.getLogger(__name__)

MODULE = "megatron_dppo.train"
_POLL_S = 0.1
_PREFLIGHT_S = 900.0


class PreflightError(RunError):
    """Too few nodes can do the run's work; the message says which can't, and why."""


class Steps:
    """Runs such steps in the allocation.

    Args:
        directory: of the run, whose ``config.yaml`` is written.
        form: of the steps.
        python: that they run.
        stops: what ends one early.
    """

    def __init__(
        self, directory: RunDirectory, form: StepForm, python: str, stops: StopRequests
    ) -> None:
        self._directory = directory
        self._form = form
        self._python = python
        self._stops = stops

    def check(self, host: Host) -> Outcome | None:
        """Have ``host`` check everything that needs the libraries; why it refused, None where it did
        not."""
        path = self._directory.path / "logs" / "check.out"
        command = [*rank_command(MODULE, self._directory, self._python), CHECK]
        code = self._run("check", command, [host], path, tolerant=False)
        if code == 0:
            return None
        if stopped := self._stops.came():
            return Outcome(stopped[0].code, "stopped", stopped[0].why)
        text = path.read_text(errors="replace")
        log.error("the check on %s refused:\n%s", host.name, quote(text.strip()))
        return Outcome(code or 1, "refused" if code == REFUSED else "failed", text)

    def preflight(
        self, config: TrainConfig, job: Job, placement: Placement, skipped: Sequence[str]
    ) -> dict[str, str]:
        """Nodes that must be left out, each with the reason.

        Raises LaunchError for a fault that no node is to blame for: other nodes would have it too.
        """
        folder = self._directory.path / "preflight" / f"{job.id}-{job.attempt}"
        gpus = 0 if config.engine.device == "cpu" else job.gpus
        ports = sorted(_ports(placement))
        words = [self._python, "-m", "megatron_dppo.preflight", str(self._directory.config)]
        words += [f"--evidence={folder}", f"--gpus={gpus}", f"--nodes={len(job.hosts)}"]
        words += [f"--port={port}" for port in ports] + [f"--skip={name}" for name in skipped]
        output = self._directory.path / "logs" / "preflight.out"
        log.info("preflight on %d nodes", len(job.hosts))
        self._run("preflight", words, job.hosts, output, tolerant=True)
        if self._stops.came():  # nodes that were ended before they answered are not ill
            return {}
        names = [host.name for host in job.hosts]
        evidence = read_evidence(folder, names)
        needs = needs_of(config, gpus=gpus, ports=ports)
        verdict = Verdict(judge(evidence, needs, names))
        folder.mkdir(parents=True, exist_ok=True)
        verdict.write(folder)
        log.info("%s", table(evidence, verdict.findings))
        reasons = defaultdict(list)
        for finding in verdict.findings:
            reasons[finding.host].append(str(finding))
        if EVERYWHERE in reasons:
            raise LaunchError(f"preflight: {'; '.join(reasons[EVERYWHERE])}; see {output}")
        return {host: "; ".join(found) for host, found in reasons.items()}

    def _run(
        self,
        name: str,
        command: Sequence[str],
        hosts: Sequence[Host],
        output: Path,
        *,
        tolerant: bool,
    ) -> int | None:
        """The highest exit code of the step, one in each group of hosts; None where a stop came, or its time was up."""
        output.unlink(missing_ok=True)
        with open(output, "ab") as file:
            processes = [
                start_process(
                    self._form.command(
                        command,
                        name=name,
                        hosts=group,
                        tasks_per_host=1,
                        output=literal(output),
                        stdin=False,
                        tolerant=tolerant,
                    ),
                    environment=step_environment(os.environ),
                    output=file.fileno(),
                )
                for group in Allocation(tuple(hosts)).groups
            ]
        deadline = time.monotonic() + _PREFLIGHT_S
        while None in (codes := [process.poll() for process in processes]):
            if self._stops.came() or time.monotonic() > deadline:
                for process in processes:
                    SrunProcess(process, self._form.fence).kill()
                log.warning("the step %s was ended: %s", name, tail(output, 1))
                return None
            time.sleep(_POLL_S)
        return max(code for code in codes if code is not None)


def _ports(placement: Placement) -> set[int]:
    """Every port that the run listens on first."""
    router = placement.router
    ports = [placement.master_port, *(server.port for server in placement.servers)]
    ports += [server.meeting_port for server in placement.servers]
    ports += [] if router is None else [router.port, router.metrics_port]
    return {port for port in ports if port is not None}
