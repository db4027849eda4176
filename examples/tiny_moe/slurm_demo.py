"""``make slurm-demo``: the tiny recipe with R3 as a job of a real Slurm, all on this machine.

    python -m examples.tiny_moe.slurm_demo [--directory runs/slurm_demo] [key.path=value ...]

Starts a cluster of four nodes, submits the recipe, and tells what happens. Once the job has done a step its
time limit is shortened, on whatever machine: it saves a checkpoint before it, is started again by Slurm,
resumes and finishes. Nothing is left running, also after Ctrl-C: the job is cancelled, the cluster ends, and
the exit code is 130.
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
from megatron_dppo.launch.attempts import Attempt, AttemptBook
from megatron_dppo.metrics import table as names
from megatron_dppo.metrics.records import RecordsError, read_records, step_of
from tools.slurm_cluster import Cluster, what_is_missing
from tools.slurm_cluster.signals import Interrupted, raise_interrupted

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "examples/tiny_moe/config.yaml"
STEPS = 24
LIMIT_MIN, MARGIN_S = 120, 180
POLL_S = 0.5
CANCEL_S = 10.0


def main() -> int:
    """The exit code: 0 where the job was started again by its limit, resumed and finished."""
    words = _parser().parse_intermixed_args()
    if missing := what_is_missing():
        print(missing, file=sys.stderr)
        return 1
    directory = Path(words.directory).absolute()
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
            *words.overrides,
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
        kind = "machines of their own" if cluster.isolated else "daemons on this machine"
        _say(f"Slurm runs: nodes {', '.join(cluster.nodes)}, {kind}")
        command = [
            *(sys.executable, "-m", "megatron_dppo.cluster.slurm", "submit", RECIPE, *overrides),
            *("--set=gpus_per_node=0", f"--set=time={LIMIT_MIN}", "--set=start_s=60"),
            *(f"--set=checkpoint_margin_s={MARGIN_S}", "--set=max_failures=6"),
        ]
        _say(" ".join(["python", *command[1:]]))
        if subprocess.run(command, cwd=ROOT, env=cluster.environment, check=False).returncode:
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
    """The command that tells the run's status from any other shell, while the cluster runs."""
    program = shlex.join(
        [sys.executable, "-m", "megatron_dppo.cluster.slurm", "status", str(directory)]
    )
    return f"SLURM_CONF={shlex.quote(str(cluster.configuration))} {program} (or watch, logs, stop)"


class _Follower:
    """Tells what a job does; shortens its time limit when it is on its way, and gives it time to finish when it
    starts again."""

    def __init__(self, cluster: Cluster, directory: Path, job: int) -> None:
        self._cluster = cluster
        self._directory = directory
        self._job = job
        self._log = directory / "logs" / f"slurm-{job}.out"
        self._read = 0
        self._step = -1
        self._starts = 0
        self._shortened = False

    def follow(self) -> str:
        """Until the job has ended; its last state."""
        while True:
            states = self._cluster.client.states(self._job)
            self._tell_log()
            self._tell_steps()
            if states == {"PENDING"}:
                self._raise_limit()
            elif states == {"RUNNING"} and self._step > 0 and not self._shortened:
                self._shorten_limit()
            live = {"PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED"}
            if states and not states & live:  # empty: the controller did not answer
                return ", ".join(states)
            time.sleep(POLL_S)

    def cancel(self, why: str) -> None:
        """Have Slurm cancel the job and wait for its end, at most ten seconds."""
        _say(f"{why}: job {self._job} is cancelled, then the cluster ends")
        client = self._cluster.client
        client.run("scancel", self._job, check=False)
        with contextlib.suppress(TimeoutError):  # then it ends with its nodes
            client.wait(self._job, timeout_s=CANCEL_S)
        self._tell_log()

    def _tell_log(self) -> None:
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            print(f"  {line}", flush=True)

    def _tell_steps(self) -> None:
        try:
            records = read_records(self._directory)
        except RecordsError:
            return
        for record in records:
            if step_of(record) > self._step:
                self._step = step_of(record)
                reward = record.get(names.REWARD)
                told = "" if reward is None else f": mean reward {reward:.3f}"
                _say(f"step {self._step} of {STEPS}{told}")

    def _shorten_limit(self) -> None:
        """Whole minutes, of which less than the margin is left: the job must save now."""
        began = datetime.fromisoformat(self._cluster.client.job(self._job)[0]["StartTime"])
        minutes = int((time.time() - began.timestamp()) // 60) + MARGIN_S // 60
        if not self._set_limit(minutes):
            return
        self._shortened = True
        _say(f"the job's time limit is now {minutes} min, {MARGIN_S} s before which it saves")

    def _raise_limit(self) -> None:
        """While the job waits for its next start: time to finish."""
        attempts = AttemptBook(self._directory).all()
        if len(attempts) <= self._starts or not self._set_limit(LIMIT_MIN):
            return
        self._starts, self._shortened = len(attempts), attempts[-1].saved > 0
        _say(
            f"start {len(attempts)} ended ({attempts[-1].why}) with a checkpoint of step "
            f"{attempts[-1].saved}; Slurm starts the job again, with {LIMIT_MIN} min"
        )

    def _set_limit(self, minutes: int) -> bool:
        """Whether Slurm took it."""
        words = ("scontrol", "update", f"JobId={self._job}", f"TimeLimit={minutes}")
        return self._cluster.client.run(*words, check=False).returncode == 0


def _result(directory: Path, state: str) -> int:
    """Tell what was seen, and whether all of it is as promised."""
    attempts = AttemptBook(directory).all()
    seen = {
        "the job ended as COMPLETED": state == "COMPLETED",
        "its time limit had it saved and started again": any(
            a.why == "time" and a.saved for a in attempts
        ),
        "a later start resumed from that checkpoint": _resumed(attempts),
        "every step is recorded once": _steps(directory)
        == list(range((_steps(directory) or [0])[-1] + 1)),
        "the run is complete": bool(attempts) and attempts[-1].why == "done",
    }
    for what, holds in seen.items():
        print(f"  {'yes' if holds else 'NO '}  {what}")
    if (directory / "summary.json").exists():
        summary = json.loads((directory / "summary.json").read_text())
        updates, verified = summary["weight_updates"], summary["weight_updates_verified"]
        _say(f"weight updates verified: {verified} of {updates}")
    left = {"figures": directory / "report.png", "model": directory / "hf"}
    told = [f"{name}: {path}" for name, path in left.items() if path.exists()]
    _say(", ".join(told) or f"no figures and no model were left; logs: {directory / 'logs'}")
    return int(not all(seen.values()))


def _resumed(attempts: Sequence[Attempt]) -> bool:
    saved = [attempt.saved for attempt in attempts if attempt.why == "time" and attempt.saved]
    return bool(saved) and attempts[-1].first_saved >= saved[-1]


def _steps(directory: Path) -> list[int]:
    try:
        return [step_of(record) for record in read_records(directory)]
    except RecordsError:
        return []


def _set_aside(directory: Path) -> None:
    """Rename what an earlier demo left; delete nothing."""
    if directory.exists():
        kept = directory.with_name(f"{directory.name}-{time.strftime('%Y%m%d-%H%M%S')}")
        directory.rename(kept)
        _say(f"the earlier run in {directory} is now {kept}")


def _say(text: str) -> None:
    print(f"[slurm-demo] {text}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tiny_moe.slurm_demo",
        description="The tiny recipe with R3 as a job of a real Slurm of four nodes, started here.",
    )
    parser.add_argument("--directory", default="runs/slurm_demo", help="where the run goes")
    parser.add_argument(
        "overrides", nargs="*", metavar="key.path=value", help="of the recipe's values"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
