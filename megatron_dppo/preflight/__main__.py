"""Entry point: ``megatron-dppo preflight CONFIG.yaml [key.path=value ...]``.

On one machine it checks that machine and tells the result. As a Slurm step with one task a node it writes
the node's evidence, which the supervisor judges.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.config import TrainConfig, load_config
from megatron_dppo.config.machine import this_machine
from megatron_dppo.logging import fatal
from megatron_dppo.preflight.checks import CHECKS
from megatron_dppo.preflight.collection import run_task, this_host
from megatron_dppo.preflight.evidence import Evidence, read_evidence
from megatron_dppo.preflight.needs import Needs, needs_of
from megatron_dppo.preflight.table import table
from megatron_dppo.preflight.verdict import Verdict, judge
from megatron_dppo.system.errors import RunError

BAD_NODE = 3
"""Exit code where a node can't take part in the run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0 all is well, 2 refused, 3 a node (in a step: this one) is not fit."""
    words = _parser().parse_intermixed_args(arguments)
    try:
        config = load_config(words.config, words.overrides)
        needs = needs_of(config, gpus=_gpus(words, config), ports=words.port)
        folder = words.evidence or _folder(needs.run_directory)
        count = words.nodes or int(os.environ.get("SLURM_NTASKS", "1"))
        told = run_task(needs, folder, count, timeout_s=words.timeout, skipped=words.skip)
        return _alone(told, needs, folder) if count == 1 else _in_step(told, needs, folder)
    except RunError as error:
        fatal(str(error))


def _alone(told: Mapping[str, Evidence], needs: Needs, folder: Path) -> int:
    """Judge this machine and tell the result."""
    host = this_host()
    verdict = Verdict(judge({host: told}, needs, [host]))
    verdict.write(folder)
    print(table({host: told}, verdict.findings))
    return 0 if verdict.is_good else BAD_NODE


def _in_step(told: Mapping[str, Evidence], needs: Needs, folder: Path) -> int:
    """What this node's own evidence and that of those which are done tells of this node."""
    host = this_host()
    known = read_evidence(folder, [path.stem for path in folder.glob("*.json")])
    findings = [f for f in judge({**known, host: dict(told)}, needs, [host]) if f.host == host]
    for finding in findings:
        print(finding, flush=True)
    return BAD_NODE if findings else 0


def _gpus(words: argparse.Namespace, config: TrainConfig) -> int:
    if words.gpus is not None:
        return int(words.gpus)
    if config.engine.device == "cpu":
        return 0
    if config.engine.device is None and not this_machine().gpus:
        return 0  # such a run trains and serves on CPUs
    return int(os.environ.get("SLURM_GPUS_ON_NODE", config.parallel.world_size))


def _folder(run: Path) -> Path:
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return run / "preflight" / time.strftime("local-%Y%m%d-%H%M%S")
    return run / "preflight" / f"{job}-{os.environ.get('SLURM_RESTART_COUNT', '0')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo preflight",
        description="Check that this machine, or each node of a Slurm step, can do a run's work.",
        epilog="Exit codes: 0 all is well, 2 refused, 3 a node is not fit. docs/preflight.md",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument("overrides", metavar="key.path=value", nargs="*", help="replaces a value")
    parser.add_argument("--gpus", type=int, help="GPUs the run uses on each node")
    parser.add_argument(
        "--nodes", type=int, help="nodes that take part (default: tasks of the step)"
    )
    parser.add_argument("--port", type=int, action="append", default=[], help="must be free")
    parser.add_argument(
        "--skip", action="append", default=[], choices=list(CHECKS), help="leave a check out"
    )
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for others")
    parser.add_argument("--evidence", type=Path, help="folder for the evidence")
    return parser


if __name__ == "__main__":
    sys.exit(main())
