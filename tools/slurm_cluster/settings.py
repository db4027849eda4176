"""Slurm's configuration files of a cluster, as text."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class NodeSize:
    """The resources that each node claims to have. GPUs are device files without a driver. A job has
    ``CUDA_VISIBLE_DEVICES`` for its GPUs."""

    cpus: int = 8
    gpus: int = 8
    memory_mib: int = 4000


@dataclass(frozen=True)
class NodeAddress:
    """The address that a node's daemon listens on, and the name of its machine."""

    name: str
    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Controller:
    """The address that the controller listens on."""

    host: str
    address: str
    port: int


@dataclass(frozen=True)
class Settings:
    """All values in the configuration files.

    Attributes:
        root: the cluster's folder.
        gpu_files: one device file for each GPU.
        cgroups: whether cgroups of version 1 track processes, and refuse GPUs of other jobs.
    """

    root: Path
    controller: Controller
    nodes: Sequence[NodeAddress]
    size: NodeSize
    gpu_files: Sequence[Path]
    cgroups: bool

    def files(self) -> dict[str, str]:
        """The files in the folder of ``slurm.conf``: name -> content."""
        return {
            "slurm.conf": slurm_conf(self),
            "gres.conf": _gres_conf(self),
            "cgroup.conf": _cgroup_conf(self.cgroups),
            "hosts": _hosts(self),
        }


def slurm_conf(settings: Settings) -> str:
    """``slurm.conf``: two partitions over the same nodes, and waits short enough for a test.

    ``cred_expire`` is also the time that a requeued job waits before it starts again (default: 120 s).
    Only the backfill pass starts heterogeneous jobs (default: every 30 s).
    """
    root, controller = settings.root, settings.controller
    tracking = "cgroup" if settings.cgroups else "linuxproc"
    return f"""\
ClusterName=small
SlurmctldHost={controller.host}({controller.address})
SlurmctldPort={controller.port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
SlurmUser={getpass.getuser()}
SlurmdUser={getpass.getuser()}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/slurmd-%n.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdLogFile={root}/log/slurmd-%n.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
ProctrackType=proctrack/{tracking}
TaskPlugin=task/{"cgroup" if settings.cgroups else "none"}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,batch_sched_delay=0,sched_interval=2
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
ReturnToService=2
SlurmdParameters=config_overrides
SlurmdTimeout=10
KillWait=15
UnkillableStepTimeout=60
MessageTimeout=10
InactiveLimit=0
MinJobAge=300
{"GresTypes=gpu" if settings.gpu_files else ""}
{_node_lines(settings)}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=short Nodes=ALL MaxTime=10 State=UP
"""


def _node_lines(settings: Settings) -> str:
    size = settings.size
    gres = f" Gres=gpu:h200:{len(settings.gpu_files)}" if settings.gpu_files else ""
    common = f"NodeName=DEFAULT CPUs={size.cpus} RealMemory={size.memory_mib}{gres} State=UNKNOWN"
    lines = [
        f"NodeName={n.name} NodeAddr={n.address} NodeHostname={n.host} Port={n.port}"
        for n in settings.nodes
    ]
    return "\n".join([common, *lines])


def _gres_conf(settings: Settings) -> str:
    if not settings.gpu_files:
        return ""
    files = ",".join(map(str, settings.gpu_files))
    return "".join(f"NodeName={n.name} Name=gpu Type=h200 File={files}\n" for n in settings.nodes)


def _cgroup_conf(cgroups: bool) -> str:
    # Slurm 22.05 reads the plugin's name even if nothing uses cgroups.
    if not cgroups:
        return "CgroupPlugin=cgroup/v1\n"
    return (
        "CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n"
        "ConstrainDevices=yes\nConstrainCores=no\nConstrainRAMSpace=no\n"
    )


def _hosts(settings: Settings) -> str:
    known = [("127.0.0.1", "localhost"), (settings.controller.address, settings.controller.host)]
    known += [(node.address, node.host) for node in settings.nodes]
    return "".join(f"{address} {host}\n" for address, host in known)
