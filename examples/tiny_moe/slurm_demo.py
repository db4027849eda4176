"""``make slurm-demo``: the tiny recipe with R3 on a Slurm cluster of four nodes that this machine plays.

    python -m examples.tiny_moe.slurm_demo [--steps N] [--minutes N] [key.path=value ...]

The job's first time limit ends before the run does: it saves, is requeued, resumes, and finishes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from examples.tiny_moe.demo import CONFIG
from examples.tiny_moe.prepare import prepare
from megatron_dppo.slurm.attempts import AttemptBook
from tools.slurm_cluster import INSTALL, Cluster, missing_programs

DIRECTORY = Path("runs/slurm-demo")
MARGIN_S = 60
"""Kept before the time limit: longer than a step of the demo and a checkpoint take on two cores."""
_LOOK_EVERY_S = 5.0
_SLURM = (sys.executable, "-m", "megatron_dppo.slurm")


def main() -> int:
    """Run it; the exit code: 0 where the run finished after a requeue."""
    words = _parser().parse_intermixed_args()
    if missing := missing_programs():
        print(f"not found: {', '.join(missing)}; on Debian and Ubuntu: {INSTALL}", file=sys.stderr)
        return 1
    material = prepare(seed=1)
    directory = _new(DIRECTORY)
    overrides = [
        f"run.directory={directory.resolve()}",
        f"run.steps={words.steps}",
        f"model.hf_checkpoint={material.warm_checkpoint.resolve()}",
        f"data.train={material.train.resolve()}",
        f"data.evaluation.held_out={material.held_out.resolve()}",
        "rollout.router_replay=true",
        "engine.servers=2",
        *words.overrides,
    ]
    with Cluster(shared=[Path.cwd(), Path(sys.prefix)]) as cluster:
        print(f"a Slurm cluster of {len(cluster.nodes)} nodes: {' '.join(cluster.nodes)}\n")
        return _run(cluster, directory, overrides, words.minutes)


def _run(cluster: Cluster, directory: Path, overrides: list[str], minutes: int) -> int:
    site = directory.with_suffix(".site.yaml")
    site.parent.mkdir(parents=True, exist_ok=True)
    limits = {"checkpoint_margin_s": MARGIN_S, "start_s": 30, "max_failures": 10}
    site.write_text(json.dumps({"gpus_per_node": 0, "time": minutes, **limits}))
    if _tell(cluster, "submit", CONFIG, *overrides, "--site", str(site)):
        return 1
    job = (directory / "job").read_text().strip()
    while _is_alive(cluster, job):
        starts = AttemptBook(directory).all()
        if len(starts) > 1 and starts[-2].saved:  # enough of time limits: the next start may finish
            cluster.client.run("scontrol", "update", f"JobId={job}", "TimeLimit=1-0", check=False)
        _tell(cluster, "status", str(directory))
        print(flush=True)
        time.sleep(_LOOK_EVERY_S)
    _tell(cluster, "status", str(directory))
    ends = [start.why for start in AttemptBook(directory).all()]
    print(f"\nreport: {directory / 'report.png'}")
    return 0 if ends[-1] == "done" and "time" in ends else 1


def _tell(cluster: Cluster, *words: str) -> int:
    command = [*_SLURM, *words]
    return subprocess.run(command, env=cluster.client.environment, check=False).returncode


def _is_alive(cluster: Cluster, job: str) -> bool:
    return bool(cluster.client.run("squeue", "-h", "-j", job, check=False).stdout.strip())


def _new(directory: Path) -> Path:
    """``directory``, or one with a number behind it where there is one already."""
    names = [directory, *(directory.with_name(f"{directory.name}-{n}") for n in range(2, 1000))]
    return next(path for path in names if not path.exists())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=12, help="of the run (default: 12)")
    parser.add_argument("--minutes", type=int, default=4, help="first time limit (default: 4)")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*")
    return parser


if __name__ == "__main__":
    sys.exit(main())
