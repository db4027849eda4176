"""A task of a Slurm step as a rank of torch.distributed, without torchrun.

Only a numbered step counts: in a batch script, and in the shell of ``salloc``, SLURM_PROCID is 0 too.
A step of one task may be an interactive shell, so it counts where our own supervisor started it.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import MutableMapping

RANKS_VARIABLE = "MEGATRON_DPPO_RANKS"
"""``slurm`` in the environment of steps whose tasks are ranks, however few."""
_SPECIAL_STEPS = 2**32 - 16
"""Ids from here on are the batch script, its extern step, an interactive shell."""
_FIRST_PORT, _PORTS = 21_000, 9_000
_HOSTNAMES_S = 30


def adopt_slurm_rank(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK and the other variables of torch.distributed where this process is a task of a step.

    Leaves them alone where RANK is set already. MASTER_ADDR and MASTER_PORT of the environment are
    kept; without them the ranks meet on the step's first host, at a port that follows from the job.
    """
    if "RANK" in environment or not _is_rank(environment):
        return
    node = int(environment.get("SLURM_NODEID", "0"))
    local = tasks_per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))[node]
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["LOCAL_RANK"] = environment["SLURM_LOCALID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_WORLD_SIZE"] = str(local)
    if "MASTER_ADDR" not in environment:
        environment["MASTER_ADDR"] = hostnames(environment["SLURM_STEP_NODELIST"])[0]
    environment.setdefault("MASTER_PORT", str(port_base(environment["SLURM_JOB_ID"])))
    threads = max(1, len(os.sched_getaffinity(0)) // local)
    environment.setdefault("OMP_NUM_THREADS", str(threads))


def port_base(job: str) -> int:
    """First of the ports of a Slurm job: below those that systems give to outgoing connections, and
    rarely those of another job."""
    return _FIRST_PORT + int(job) * 97 % _PORTS


def hostnames(nodes: str) -> list[str]:
    """The names in Slurm's short form of a list, ``n[1-3]``, in order."""
    words = ["scontrol", "show", "hostnames", nodes]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=_HOSTNAMES_S)
    return done.stdout.split()


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` as ``[2, 2, 2, 1]``."""
    counts = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(times or 1)
    return counts


def _is_rank(environment: MutableMapping[str, str]) -> bool:
    step, tasks = environment.get("SLURM_STEP_ID", ""), environment.get("SLURM_STEP_NUM_TASKS", "")
    if not step.isdigit() or int(step) >= _SPECIAL_STEPS or not tasks.isdigit():
        return False
    return environment.get(RANKS_VARIABLE) == "slurm" or int(tasks) > 1
