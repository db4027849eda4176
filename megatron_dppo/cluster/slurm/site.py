"""The site file: settings of a group's Slurm cluster.

The file is ``--site``, else ``$MEGATRON_DPPO_SITE``, else ``~/.config/megatron_dppo/site.yaml``. Without a site
file, every key has its default.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from megatron_dppo.config.data_schema import Section
from megatron_dppo.config.loading import load_as
from megatron_dppo.launch.slurm_client import SlurmError
from megatron_dppo.launch.srun import StepForm

SITE_VARIABLE = "MEGATRON_DPPO_SITE"
_DEFAULT = Path("~/.config/megatron_dppo/site.yaml")


class ContainerConfig(Section):
    """The container of a run's ranks and servers. The supervisor runs outside of it."""

    kind: Literal["none", "pyxis", "apptainer"] = "none"
    """``none``: no container. ``pyxis``: srun starts the container, by the flags of this Slurm plugin. ``apptainer``:
    ``apptainer exec`` precedes each command.
    """
    image: str | None = None
    """Image of the ranks: a name or a file for pyxis, a file for apptainer."""
    server_image: str | None = None
    """Image of servers and router. Empty: ``image``."""
    python: str = "python3"
    """Interpreter in the images, with this package's libraries. If ``engine.python`` is set, servers use that one."""
    mounts: list[str] = Field(default_factory=list)
    """Mounts: ``outside:inside``, or one path for outside and inside. The working directory is always mounted."""

    @property
    def interpreter(self) -> str:
        """Python of the ranks, and of the servers if ``engine.python`` is not set."""
        if self.kind == "none":
            return sys.executable
        return self.python

    def seen_inside(self, folder: str) -> list[Path]:
        """Return the folders that a container started from ``folder`` sees under the same path as the host."""
        folders = [Path(folder)]
        for mount in self.mounts:
            # Options may follow the inside path: ``outside:inside:ro``.
            outside, *further_words = mount.split(":")
            inside = further_words[0] if further_words else outside
            if inside == outside:
                folders.append(Path(outside))
        return folders


def prologue_words(lines: str) -> tuple[str, ...]:
    """Return the words before a command that make a shell run ``lines`` first; none without lines.

    The shell is a login shell, because clusters define ``module`` in login shells. A line that fails ends the step.
    """
    if not lines.strip():
        return ()
    script = (
        "set -e; trap 'echo \"prologue: failed: $BASH_COMMAND\" >&2' ERR\n"
        # The command reads variables that hold secrets from standard input, so the lines must not read that input.
        f'{{\n{lines.strip()}\n}} </dev/null\ntrap - ERR\nexec "$@"'
    )
    return ("bash", "--login", "-c", script, "prologue")


class SiteConfig(Section):
    """Settings of a Slurm cluster."""

    partition: str | None = None
    """``--partition``."""
    account: str | None = None
    """``--account``."""
    qos: str | None = None
    """``--qos``."""
    reservation: str | None = None
    """``--reservation``."""
    time: str | int | None = None
    """``--time``: a Slurm time such as ``1-00:00:00``, or minutes. Empty: the partition's default."""
    gpus_per_node: int = Field(default=8, ge=0, le=1024)
    """GPUs of a node. 0: nodes without GPUs; each of ``processes_per_node`` processes then counts like a GPU."""
    gres: str | None = None
    """``--gres``, for clusters that require it in place of ``--gpus-per-node``: for example ``gpu:h100:8``. Its number
    of GPUs must be ``gpus_per_node``.
    """
    gpu: (
        Literal["a100", "h100", "h200", "b200", "a100-40gb", "h100-pcie", "h100-nvl", "h200-nvl"]
        | None
    ) = None
    """Kind of the GPUs; ``submit`` then plans the run's memory and refuses a run that does not fit."""
    host_memory_gib: int | None = Field(default=None, gt=0)
    """Host memory of a node in GiB, for the memory plan. Empty: the memory of the vendor's nodes with these GPUs."""
    processes_per_node: int = Field(default=1, gt=0, le=1024)
    """Ranks and servers on a node without GPUs."""
    checkpoint_margin_s: int = Field(default=900, gt=0, le=65535)
    """This many seconds before the time limit, the ranks are asked to end their step and save a checkpoint. Set it
    longer than a step and a checkpoint take. ``sbatch --signal`` accepts at most 65535.
    """
    start_s: int = Field(default=900, gt=0)
    """Seconds that a start and one step take at least. A time limit must be at least ``start_s`` +
    ``checkpoint_margin_s``.
    """
    preflight: bool = True
    """Check every node before a start (docs/preflight.md)."""
    preflight_skip: list[str] = Field(default_factory=list)
    """Names of the preflight's checks to skip."""
    spares_servers: bool = False
    """Whether a node's death ends only the processes on this node. The node's servers then move to a spare node, or are
    given up. Otherwise Slurm ends the whole job and starts it again.
    """
    supervisor_patience_s: int = Field(default=180, gt=0)
    """With ``spares_servers``: after this many seconds without a heartbeat of the supervisor, the servers end and the
    job is requeued. Set it longer than the shared file system may hang.
    """
    max_failures: int = Field(default=3, gt=0)
    """A run is given up after this many starts in a row without a new checkpoint."""
    server_partition: str | None = None
    """Partition of the servers' nodes. The job is then heterogeneous: ranks and router are on nodes of ``partition``,
    servers on nodes of ``server_partition``. All nodes must have equally many devices. Empty: one allocation.
    """
    sbatch_flags: list[str] = Field(default_factory=list)
    """Further flags of sbatch, for example ``--constraint=h100``."""
    srun_flags: list[str] = Field(default_factory=list)
    """Further flags of every srun."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Environment variables of every rank and server, for example NCCL_SOCKET_IFNAME."""
    prologue: str = ""
    """Shell lines before the Python of every rank, server and check, on each node: ``module load cuda``, exports.
    bash runs the lines as a login shell, and a line that fails ends the step. With apptainer, the lines run before the
    container starts; with pyxis, they run inside the container. The supervisor does not run them: it has the
    environment of ``submit``.
    """
    container: ContainerConfig = ContainerConfig()

    @property
    def device_flag(self) -> str:
        """Return sbatch's flag that requests a node's devices."""
        if self.gres is not None:
            return f"--gres={self.gres}"
        if self.gpus_per_node:
            return f"--gpus-per-node={self.gpus_per_node}"
        return f"--ntasks-per-node={self.processes_per_node}"

    @property
    def job_flags(self) -> list[str]:
        """Return sbatch's flags of the partition, account, quality of service, reservation and time limit."""
        options = {
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "reservation": self.reservation,
            "time": self.time,
        }
        return [f"--{name}={value}" for name, value in options.items() if value is not None]

    def form(self, folder: str, *, server: bool) -> StepForm:
        """Return the form of steps in ``folder``, outside and inside of the container.

        ``server``: whether they run servers and router (``server_image``) instead of ranks.
        """
        container = self.container
        flags = tuple(self.srun_flags)
        prologue = prologue_words(self.prologue)
        if container.kind == "none":
            return StepForm(flags, prologue)
        image = container.image or ""
        if server and container.server_image:
            image = container.server_image
        mounts = [f"{folder}:{folder}", *container.mounts]
        if container.kind == "pyxis":
            container_flags = (
                f"--container-image={image}",
                f"--container-mounts={','.join(mounts)}",
                f"--container-workdir={folder}",
                "--no-container-mount-home",
            )
            return StepForm((*flags, *container_flags), prologue)
        binds = [f"--bind={mount}" for mount in mounts]
        apptainer = ("apptainer", "exec", "--nv", f"--pwd={folder}", *binds, image)
        return StepForm(flags, (*prologue, *apptainer))

    def devices(self, environment: Mapping[str, str]) -> int:
        """Return a node's number of devices: in the job that ``environment`` describes, or as configured.

        Raises SlurmError if a variable of Slurm has no number of devices.
        """
        names: tuple[str, ...] = ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE")
        count = self.gpus_per_node
        if not count:
            names = ("SLURM_NTASKS_PER_NODE",)
            count = self.processes_per_node
        for name in names:
            if environment.get(name):
                return _device_count(name, environment[name])
        return count


_PARENTHESES = re.compile(r"\([^)]*\)")
"""Details beside a number: the sockets ``(S:0-1)``, the devices ``(IDX:0-7)``, the number of nodes ``(x2)``."""
_TYPE = re.compile(r"[A-Za-z][\w.-]*")


def _device_count(name: str, value: str) -> int:
    """Return the number of devices of each node in the ``value`` of Slurm's variable ``name``.

    Slurm writes ``8``, ``8(x2)``, ``h100:8``, ``gpu:h100:8(S:0-1)``, ``h100`` for one device, and ``h100:4,a100:4`` for
    devices of two types. Raises SlurmError for another form, and if nodes have different numbers.
    """
    text = _PARENTHESES.sub("", value)
    count = 0
    for part in text.split(","):
        type_name, _, number = part.rpartition(":")
        if _TYPE.fullmatch(number):
            type_name, number = number, "1"
        # Several numbers without types are numbers of different nodes.
        if not number.isdecimal() or ("," in text and not type_name):
            raise SlurmError(
                f"{name}: got {value!r}, expected one number of devices for all nodes, such as 8, h100:8 or "
                "gpu:h100:8(S:0-1)"
            )
        count += int(number)
    return count


def site_path(given_path: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the path of the site file; None without one."""
    configured_path = given_path or environment.get(SITE_VARIABLE)
    if configured_path:
        return Path(configured_path)
    default = _DEFAULT.expanduser()
    return default if default.is_file() else None


def load_site(path: Path | None, overrides: Sequence[str] = ()) -> SiteConfig:
    """Read a site file strictly. Without a path, only ``overrides`` differ from the defaults. Raises ConfigError."""
    return load_as(SiteConfig, path, overrides)
