"""The files of a lease, and who holds one.

    <folder>/lease.json                 the holder
    <folder>/lease/<nonce>.beat         what the holder of that nonce renews; nobody else writes it
    <folder>/lease/<nonce>.next/holder.json
                                        the start that succeeds the holder of that nonce

Relied on, also of NFS and Lustre: a rename is atomic, a rename of a folder onto one that is not empty
fails, and a file that is opened by its name after a rename has the new content. Not relied on: locks,
attributes (times, sizes), listings of folders, equal clocks, process ids of other hosts.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.system.files import write_atomically

LEASE_FILE = "lease.json"
_NONCE = re.compile(r"[0-9a-f]{16}")
_FIRST = "first"
"""Stands for the nonce of the holder before the first one."""
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}
"""What a rename onto a claim fails with; ENOENT where another start tidied up meanwhile."""


class LeaseError(RuntimeError):
    """A lease can't be taken; the message says who holds it, or what is wrong with its files."""


@dataclass(frozen=True)
class Holder:
    """A process that takes a lease, as others can recognise it.

    Attributes:
        nonce: drawn anew by every start.
        host, boot, namespace: where ``pid`` means something: the machine's name, this boot of it, and
            the namespace of process ids (containers have their own).
        pid, pid_start: the process, and when it started, in clock ticks after the boot.
        job, attempt: Slurm's job id, with the cluster's name where it is known, and how often the job
            was restarted; None and 0 outside of Slurm.
        taken: seconds since the epoch by its own clock, for people to read.
    """

    nonce: str
    host: str
    boot: str
    namespace: str
    pid: int
    pid_start: int
    job: str | None
    attempt: int
    taken: float

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Holder:
        """This process, under a new nonce."""
        job = environment.get("SLURM_JOB_ID")
        cluster = environment.get("SLURM_CLUSTER_NAME")
        attempt = environment.get("SLURM_RESTART_COUNT", "0")
        started = process_start(os.getpid())
        assert started is not None
        return cls(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=os.readlink("/proc/self/ns/pid"),
            pid=os.getpid(),
            pid_start=started,
            job=f"{job}@{cluster}" if job and cluster else job,
            attempt=int(attempt) if attempt.isdigit() else 0,
            taken=round(time.time(), 3),
        )

    def describe(self) -> str:
        """For a message: the process, its host, its Slurm job."""
        job = f" (Slurm job {self.job}, attempt {self.attempt})" if self.job else ""
        return f"process {self.pid} on {self.host}{job}"

    def how_to_end(self) -> str:
        """For a message: the command that ends it."""
        if self.job:
            return f"scancel {self.job.partition('@')[0]}"
        return f"kill {self.pid}, on {self.host}"

    def is_neighbour(self, other: Holder) -> bool:
        """Whether both see the same process ids."""
        place = self.host, self.boot, self.namespace
        return place == (other.host, other.boot, other.namespace)

    def runs(self) -> bool:
        """Whether the process lives; to be asked by a neighbour alone."""
        return process_start(self.pid) == self.pid_start

    def is_earlier_attempt(self, of: Holder) -> bool:
        """Whether Slurm has started the same job again since, and so ended this one."""
        return self.job is not None and self.job == of.job and self.attempt < of.attempt


@dataclass(frozen=True)
class Beat:
    """What a holder renews. ``count`` grows; ``ended``: it gave the lease back."""

    count: int = 0
    ended: bool = False


class LeaseFiles:
    """Reads and writes the files of the lease in ``folder``. Every read opens its file anew."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEASE_FILE
        self._folder = Path(folder) / "lease"

    def holder(self) -> Holder | None:
        """Whom ``lease.json`` names. Raises LeaseError where it is damaged, OSError."""
        return _read_holder(self.path)

    def last_claim(self, holder: Holder | None) -> Holder | None:
        """The last of the starts that succeed ``holder``, itself where there is none."""
        while (successor := _read_holder(self._claim_on(holder) / "holder.json")) is not None:
            holder = successor
        return holder

    def claim(self, last: Holder | None, successor: Holder) -> bool:
        """Name the one successor of ``last``; False where it has another one already."""
        prepared = self._folder / f".{successor.nonce}"
        prepared.mkdir(parents=True)
        try:
            write_atomically(prepared / "holder.json", _encode(successor))
            prepared.rename(self._claim_on(last))
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
        return True

    def give_up_claim(self, last: Holder | None) -> None:
        """Remove the claim on ``last``."""
        shutil.rmtree(self._claim_on(last), ignore_errors=True)

    def install(self, holder: Holder) -> None:
        """Have ``lease.json`` name ``holder``; then remove what earlier ones left."""
        self.write_beat(holder, Beat())
        write_atomically(self.path, _encode(holder))
        for path in self._others(holder):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def beat(self, holder: Holder) -> Beat | None:
        """What ``holder`` renewed last; None where it never has, or the file is damaged."""
        try:
            found = json.loads(self.beat_of(holder).read_text(encoding="utf-8"))
            return Beat(int(found["count"]), bool(found["ended"]))
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return None

    def write_beat(self, holder: Holder, beat: Beat) -> None:
        """Renew. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        told = {**asdict(beat), "time": round(time.time(), 3)}
        write_atomically(self.beat_of(holder), json.dumps(told))

    def beat_of(self, holder: Holder) -> Path:
        """The file that ``holder`` renews."""
        return self._folder / f"{holder.nonce}.beat"

    def _claim_on(self, holder: Holder | None) -> Path:
        return self._folder / f"{_FIRST if holder is None else holder.nonce}.next"

    def _others(self, holder: Holder) -> Iterator[Path]:
        for path in list(self._folder.iterdir()):
            if path not in {self.beat_of(holder), self._claim_on(holder)}:
                yield path


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks after the boot; None where it has ended, or is a zombie."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else int(numbers[18])


def _encode(holder: Holder) -> str:
    return json.dumps(asdict(holder), indent=1) + "\n"


def _holder_of(found: Any) -> Holder:
    """Raises ValueError, TypeError or KeyError for what ``_encode`` has not written."""
    if not _NONCE.fullmatch(found["nonce"]):  # it becomes a file's name
        raise ValueError(f"nonce: got {found['nonce']!r}, expected 16 hexadecimal digits")
    return Holder(
        nonce=found["nonce"],
        host=str(found["host"]),
        boot=str(found["boot"]),
        namespace=str(found["namespace"]),
        pid=int(found["pid"]),
        pid_start=int(found["pid_start"]),
        job=None if found["job"] is None else str(found["job"]),
        attempt=int(found["attempt"]),
        taken=float(found["taken"]),
    )


def _read_holder(path: Path) -> Holder | None:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        return _holder_of(found)
    except FileNotFoundError:
        return None
    except (IsADirectoryError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise LeaseError(
            f"{path} is damaged ({error}); remove it once no process of this run is left"
        ) from error
