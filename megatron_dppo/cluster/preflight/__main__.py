"""Check whether this machine is fit for a run.

``megatron-dppo preflight CONFIG.yaml [key.path=value ...]``.

On one machine, the command checks this machine and prints the result. In a Slurm step with one task on each node, each
task writes its node's evidence, and the supervisor judges the evidence of all nodes.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_dppo.cluster.preflight import CHECKS, collect_evidence, judge, table, write_verdict
from megatron_dppo.cluster.preflight.evidence import (
    Evidence,
    Meeting,
    Needs,
    needs_of,
    read_evidence,
    write_evidence,
)
from megatron_dppo.config import TrainConfig, load_config
from megatron_dppo.config.machine import engine_device
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.logging import fatal
from megatron_dppo.system.arguments import (
    count_or_zero,
    positive_count,
    positive_number,
    whole_number,
)
from megatron_dppo.system.errors import RunError

BAD_NODE = 3
"""Exit code if a node can't take part in the run."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks and return the exit code: 0 without faults, 2 for a configuration that is refused, 3 for a faulty
    node. In a Slurm step, only this task's node counts.
    """
    options = _parser().parse_intermixed_args(arguments)
    # Slurm's name of the node may differ from the machine's host name.
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        config = load_config(options.config, options.overrides)
        gpus = options.gpus
        if gpus is None:
            gpus = _default_gpus(config)
        needs = needs_of(config, gpus=gpus, ports=options.port)
        folder = options.evidence or _folder(needs.run_directory)
        folder.mkdir(parents=True, exist_ok=True)
        count = options.nodes or int(os.environ.get("SLURM_NTASKS", "1"))
        meeting = Meeting(folder, host, count, options.timeout)
        evidence = collect_evidence(needs, meeting, options.skip)
        write_evidence(folder, host, evidence)
        if count == 1:
            return _judge_one_machine(host, evidence, needs, folder)
        return _judge_node_of_step(host, evidence, needs, folder)
    except RunError as error:
        fatal(str(error))


def _judge_one_machine(
    host: str, evidence: Mapping[str, Evidence], needs: Needs, folder: Path
) -> int:
    findings = judge({host: evidence}, needs, [host])
    write_verdict(folder, findings)
    print(table({host: evidence}, findings))
    return BAD_NODE if findings else 0


def _judge_node_of_step(
    host: str, evidence: Mapping[str, Evidence], needs: Needs, folder: Path
) -> int:
    """Judge this node by its own evidence and by the evidence of the nodes that have finished."""
    earlier_evidence = read_evidence(folder, [path.stem for path in folder.glob("*.json")])
    all_findings = judge({**earlier_evidence, host: evidence}, needs, [host])
    findings = [finding for finding in all_findings if finding.host == host]
    for finding in findings:
        print(finding, flush=True)
    return BAD_NODE if findings else 0


def _default_gpus(config: TrainConfig) -> int:
    if engine_device(config.engine) == "cpu":
        return 0
    return int(os.environ.get("SLURM_GPUS_ON_NODE", config.parallel.world_size))


def _folder(run: Path) -> Path:
    """Return the folder of the evidence. In a Slurm job, the folder has the name ``<job>-<attempt>``."""
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
    add_config_arguments(parser)
    parser.add_argument("--gpus", type=count_or_zero, help="GPUs that the run uses on each node")
    parser.add_argument(
        "--nodes", type=positive_count, help="nodes that take part (default: tasks of the step)"
    )
    parser.add_argument(
        "--port",
        type=whole_number(1, 65535),
        action="append",
        default=[],
        help="port that must be free",
    )
    parser.add_argument(
        "--skip", action="append", default=[], choices=list(CHECKS), help="leave a check out"
    )
    parser.add_argument(
        "--timeout", type=positive_number, default=60.0, help="seconds to wait for other nodes"
    )
    parser.add_argument("--evidence", type=Path, help="folder for the evidence")
    return parser


if __name__ == "__main__":
    sys.exit(main())
