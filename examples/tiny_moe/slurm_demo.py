"""``make slurm-demo``: the tiny recipe with R3 as a job of a real Slurm, all on this machine.

    python -m examples.tiny_moe.slurm_demo [--directory runs/slurm_demo] [key.path=value ...]

The program starts a cluster of four nodes, submits the recipe, and prints what happens. Once the job has finished a
step, the program shortens the job's time limit, so that the limit ends the job on a fast machine, too. The job saves a
checkpoint before the limit, is started again by Slurm, resumes and finishes. Nothing is left running. After Ctrl-C, the
job is cancelled, the cluster ends, and the exit code is 130.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from megatron_dppo.demo.material import ROOT as MATERIAL
from megatron_dppo.demo.material import prepare
from megatron_dppo.launch.arguments import add_overrides
from megatron_dppo.launch.attempts import Attempt, AttemptBook
from megatron_dppo.metrics import table as metric_names
from megatron_dppo.metrics.records import RecordsError, read_records, step_of
from tools.slurm_cluster import Cluster, what_is_missing
from tools.slurm_cluster.signals import Interrupted, raise_interrupted

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/tiny_moe/config.yaml"
STEPS = 24
LIMIT_MIN = 120
MARGIN_S = 180
"""The job saves a checkpoint and ends this number of seconds before its time limit."""
POLL_S = 0.5
CANCEL_S = 10.0
"""Longest wait for the end of a cancelled job."""
LIVE_STATES = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
"""Slurm's states of a job that has not ended."""


def main() -> int:
    """Run the demo; return 0 if the job was started again at its limit, resumed and finished, else 1."""
    options = _parser().parse_intermixed_args()
    missing = what_is_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 1
    directory = Path(options.directory).absolute()
    raise_interrupted()
    try:
        material = prepare(seed=1, root=MATERIAL.absolute())
        overrides = [
            f"run.directory={directory}",
            f"run.steps={STEPS}",
            f"model.hf_checkpoint={material.warm_checkpoint}",
            f"data.train={material.train}",
            f"data.evaluation.held_out={material.held_out}",
            "rollout.router_replay=true",
            "engine.servers=2",
            "engine.device=cpu",
            *options.overrides,
        ]
        _set_aside(directory)
        return _run(directory, overrides)
    except Interrupted as end:
        _say(f"{end.name}: stopped; no job and no process of a cluster is left")
        return end.code


def _run(directory: Path, overrides: Sequence[str]) -> int:
    shared = [ROOT, Path(sys.prefix), Path(sys.base_prefix), directory.parent]
    _say("Slurm starts")
    with Cluster(4, shared=shared) as cluster:
        nodes = ", ".join(cluster.nodes)
        node_type = "machines of their own" if cluster.isolated else "daemons on this machine"
        _say(f"Slurm runs: nodes {nodes}, {node_type}")
        command = [
            sys.executable,
            "-m",
            "megatron_dppo.cluster.slurm",
            "submit",
            RECIPE,
            *overrides,
            "--set=gpus_per_node=0",
            f"--set=time={LIMIT_MIN}",
            "--set=start_s=60",
            f"--set=checkpoint_margin_s={MARGIN_S}",
            "--set=max_failures=6",
        ]
        _say(" ".join(["python", *command[1:]]))
        submission = subprocess.run(command, cwd=ROOT, env=cluster.environment, check=False)
        if submission.returncode != 0:
            return 1
        job = int((directory / "job").read_text())
        follower = _Follower(cluster, directory, job)
        try:
            _say(f"job {job} is followed; Ctrl-C cancels it and ends the cluster")
            _say(f"to ask it from a second terminal: {second_terminal(cluster, directory)}")
            state = follower.follow()
        except Interrupted as end:
            follower.cancel(end.name)
            raise
        status = [sys.executable, "-m", "megatron_dppo.cluster.slurm", "status", str(directory)]
        subprocess.run(status, cwd=ROOT, env=cluster.environment, check=False)
    return _result(directory, state)


def second_terminal(cluster: Cluster, directory: Path) -> str:
    """Return the command that prints the run's status in another shell while the cluster runs."""
    program = shlex.join(
        [sys.executable, "-m", "megatron_dppo.cluster.slurm", "status", str(directory)]
    )
    return f"SLURM_CONF={shlex.quote(str(cluster.configuration))} {program} (or watch, logs, stop)"


class _Follower:
    """Prints the progress of a job, and sets its time limit: short once the job trains, long when it starts again."""

    def __init__(self, cluster: Cluster, directory: Path, job: int) -> None:
        self._cluster = cluster
        self._directory = directory
        self._job = job
        self._log = directory / "logs" / f"slurm-{job}.out"
        self._printed_bytes = 0
        self._step = -1
        self._ended_starts = 0
        self._is_shortened = False

    def follow(self) -> str:
        """Follow the job until it has ended; return its last state."""
        while True:
            states = self._cluster.client.states(self._job)
            self._print_log()
            self._print_steps()
            if states == {"PENDING"}:
                self._raise_limit()
            elif states == {"RUNNING"} and self._step > 0 and not self._is_shortened:
                self._shorten_limit()
            # Without an answer of the controller, there are no states.
            if states and not states & LIVE_STATES:
                return ", ".join(states)
            time.sleep(POLL_S)

    def cancel(self, why: str) -> None:
        """Cancel the job and wait for its end, at most ``CANCEL_S``."""
        _say(f"{why}: job {self._job} is cancelled, then the cluster ends")
        client = self._cluster.client
        client.run("scancel", self._job, check=False)
        # After a time-out, the job ends with the nodes of the cluster.
        with contextlib.suppress(TimeoutError):
            client.wait(self._job, timeout_s=CANCEL_S)
        self._print_log()

    def _print_log(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._printed_bytes)
            text = file.read()
        whole_lines = text[: text.rfind(b"\n") + 1]
        self._printed_bytes += len(whole_lines)
        for line in whole_lines.decode(errors="replace").splitlines():
            print(f"  {line}", flush=True)

    def _print_steps(self) -> None:
        try:
            records = read_records(self._directory)
        except RecordsError:
            return
        for record in records:
            if step_of(record) > self._step:
                self._step = step_of(record)
                reward = record.get(metric_names.REWARD)
                reward_text = "" if reward is None else f": mean reward {reward:.3f}"
                _say(f"step {self._step} of {STEPS}{reward_text}")

    def _shorten_limit(self) -> None:
        """Set a time limit that leaves less than the margin, so that the job saves a checkpoint now."""
        start_time = datetime.fromisoformat(self._cluster.client.job(self._job)[0]["StartTime"])
        # Slurm's limits are whole minutes.
        elapsed_minutes = int((time.time() - start_time.timestamp()) // 60)
        minutes = elapsed_minutes + MARGIN_S // 60
        if not self._set_limit(minutes):
            return
        self._is_shortened = True
        _say(f"the job's time limit is now {minutes} min, {MARGIN_S} s before which it saves")

    def _raise_limit(self) -> None:
        """Set the long time limit once for each start that has ended, while the job waits for its next start."""
        attempts = AttemptBook(self._directory).all()
        if len(attempts) <= self._ended_starts or not self._set_limit(LIMIT_MIN):
            return
        self._ended_starts = len(attempts)
        # If the start ended without a checkpoint, there is nothing to resume: shorten the limit of the next start too.
        self._is_shortened = attempts[-1].saved > 0
        _say(
            f"start {len(attempts)} ended ({attempts[-1].why}) with a checkpoint of step "
            f"{attempts[-1].saved}; Slurm starts the job again, with {LIMIT_MIN} min"
        )

    def _set_limit(self, minutes: int) -> bool:
        """Set the job's time limit; return whether Slurm accepted it."""
        words = ("scontrol", "update", f"JobId={self._job}", f"TimeLimit={minutes}")
        return self._cluster.client.run(*words, check=False).returncode == 0


def _result(directory: Path, state: str) -> int:
    """Print whether the job did what the demo shows; return the exit code."""
    attempts = AttemptBook(directory).all()
    was_stopped_by_limit = any(attempt.why == "time" and attempt.saved for attempt in attempts)
    steps = _steps(directory)
    last_step = steps[-1] if steps else 0
    checks = {
        "the job ended as COMPLETED": state == "COMPLETED",
        "its time limit had it saved and started again": was_stopped_by_limit,
        "a later start resumed from that checkpoint": _has_resumed(attempts),
        "every step is recorded once": steps == list(range(last_step + 1)),
        "the run is complete": bool(attempts) and attempts[-1].why == "done",
    }
    for statement, holds in checks.items():
        print(f"  {'yes' if holds else 'NO '}  {statement}")
    summary_file = directory / "summary.json"
    if summary_file.exists():
        summary = json.loads(summary_file.read_text())
        updates = summary["weight_updates"]
        verified = summary["weight_updates_verified"]
        _say(f"weight updates verified: {verified} of {updates}")
    outputs = {"figures": directory / "report.png", "model": directory / "hf"}
    texts = [f"{name}: {path}" for name, path in outputs.items() if path.exists()]
    _say(", ".join(texts) or f"no figures and no model were left; logs: {directory / 'logs'}")
    return int(not all(checks.values()))


def _has_resumed(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last start resumed from a checkpoint that a time limit caused, or from a later checkpoint."""
    saved_steps = [attempt.saved for attempt in attempts if attempt.why == "time" and attempt.saved]
    return bool(saved_steps) and attempts[-1].first_saved >= saved_steps[-1]


def _steps(directory: Path) -> list[int]:
    try:
        return [step_of(record) for record in read_records(directory)]
    except RecordsError:
        return []


def _set_aside(directory: Path) -> None:
    """Rename the folder of an earlier demo."""
    if directory.exists():
        renamed = directory.with_name(f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        directory.rename(renamed)
        _say(f"the earlier run in {directory} is now {renamed}")


def _say(text: str) -> None:
    print(f"[slurm-demo] {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_moe.slurm_demo",
        description="The tiny recipe with R3 as a job of a real Slurm of four nodes, started here.",
    )
    parser.add_argument(
        "--directory", default="runs/slurm_demo", help="folder of the run (runs/slurm_demo)"
    )
    add_overrides(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
