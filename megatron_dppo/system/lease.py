"""The lease of a run's folder: the right to write in the folder. Of all starts of the run, at most one holds it.

A start of the run is one execution of ``megatron-dppo train`` or of a Slurm job. It may start the ranks several times;
these starts of the ranks are counted from 1.

A holder renews a counter in the background. A start that finds a holder, the newcomer, takes the lease over in these
cases:

- the holder has released the lease;
- holder and newcomer are on one machine, and the holder's process has ended;
- Slurm has restarted the holder's job;
- the counter is unchanged for ``PATIENCE_S`` of the newcomer's own clock.

In any other case the newcomer is refused. Exactly one of several starts that race for a lease gets it. A holder that
was only suspended for a while, and continues after a takeover, is rejected by the fence.

    <folder>/lease.json                      the holder
    <folder>/lease/<nonce>.beat              the counter of the holder with this nonce; only the holder writes it
    <folder>/lease/<nonce>.start             the number of the holder's newest start of the ranks
    <folder>/lease/<nonce>.next/holder.json  the claim of the start that succeeds the holder with this nonce

The lease relies on these properties, also of NFS and Lustre: a rename is atomic, a rename of a folder onto a folder
that is not empty fails, and a file that is opened by its name after a rename has the new content. The lease does not
rely on locks, attributes (times, sizes), listings of folders, equal clocks, or process ids of other hosts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from megatron_dppo.system.errors import RunError
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.processes import process_start

LEASE_FILE = "lease.json"
# The first holder has no predecessor. Its claim has this name instead of a predecessor's nonce.
_FIRST = "first"
# Errors of a rename onto an existing claim. ENOENT: a new holder has removed the folder that was to be renamed.
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}


class LeaseError(RunError):
    """A lease can't be taken; the message names the holder, or the fault of the lease's files."""


@dataclass(frozen=True)
class Holder:
    """The identity of a process that takes a lease. With it, other processes find out whether the process still runs.

    Attributes:
        nonce: new for every start.
        host, boot, namespace: the machine's name, the id of its current boot, and the namespace of process ids
            (a container has a separate namespace). ``pid`` is valid only for processes with these three values.
        pid, pid_start: id of the process, and its start time in clock ticks after the boot.
        job, attempt: Slurm's job id, with the cluster's name if it is known, and the number of the job's restarts;
            None and 0 outside of Slurm.
        taken: time of the takeover in seconds since the epoch, by the process's own clock. Only users read it.
    """

    # The nonce becomes a file's name, so its form is restricted.
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    host: str
    boot: str
    namespace: str
    pid: int
    pid_start: int
    job: str | None
    attempt: int
    taken: float

    @classmethod
    def of_this_process(cls) -> Holder:
        job = os.environ.get("SLURM_JOB_ID")
        cluster = os.environ.get("SLURM_CLUSTER_NAME")
        attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
        pid_start = process_start(os.getpid())
        assert pid_start is not None
        if job and cluster:
            job = f"{job}@{cluster}"
        return cls(
            nonce=secrets.token_hex(8),
            host=socket.gethostname(),
            boot=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            namespace=os.readlink("/proc/self/ns/pid"),
            pid=os.getpid(),
            pid_start=pid_start,
            job=job,
            attempt=int(attempt) if attempt.isdigit() else 0,
            taken=round(time.time(), 3),
        )

    def describe(self) -> str:
        job = ""
        if self.job:
            job = f" (Slurm job {self.job}, attempt {self.attempt})"
        return f"process {self.pid} on {self.host}{job}"

    def how_to_end(self) -> str:
        """Return the command that ends the process."""
        if self.job:
            return f"scancel {self.job.partition('@')[0]}"
        return f"kill {self.pid}, on {self.host}"

    def is_neighbour(self, other: Holder) -> bool:
        """Whether both processes are on one machine and see each other's process ids."""
        machine = self.host, self.boot, self.namespace
        return machine == (other.host, other.boot, other.namespace)

    def runs(self) -> bool:
        """Whether the process runs. Call this only on a neighbour."""
        return process_start(self.pid) == self.pid_start

    def is_earlier_attempt(self, other: Holder) -> bool:
        """Whether ``other`` is a later restart of this process's Slurm job. Then Slurm has ended this process."""
        return self.job is not None and self.job == other.job and self.attempt < other.attempt


@dataclass(frozen=True)
class Beat:
    """The content of a holder's counter file. ``count`` grows. ``ended``: whether the holder has released the lease."""

    count: int = 0
    ended: bool = False


class LeaseFiles:
    """Reads and writes the files of the lease in ``folder``. Each read opens the file again, to see new content."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEASE_FILE
        self._folder = Path(folder) / "lease"

    def holder(self) -> Holder | None:
        """Return the holder in ``lease.json``; None without the file. Raises OSError, LeaseError (damaged file)."""
        return _read_holder(self.path)

    def last_claimant(self, holder: Holder | None) -> Holder | None:
        """Return the last start in the chain of claims that begins with ``holder``; without a claim, ``holder`` itself.

        A start that has claimed the lease may not be in ``lease.json`` yet.
        """
        while (successor := _read_holder(self._claim_path(holder) / "holder.json")) is not None:
            holder = successor
        return holder

    def claim(self, predecessor: Holder | None, successor: Holder) -> bool:
        """Make ``successor`` the only successor of ``predecessor``. Return False if another successor exists."""
        new_claim = self._folder / f".{successor.nonce}"
        new_claim.mkdir(parents=True)
        try:
            write_atomically(new_claim / "holder.json", _encode(successor))
            failpoint("lease/claim")
            new_claim.rename(self._claim_path(predecessor))
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        finally:
            shutil.rmtree(new_claim, ignore_errors=True)
        return True

    def give_up_claim(self, predecessor: Holder | None) -> None:
        """Remove the claim of this process on the lease of ``predecessor``."""
        shutil.rmtree(self._claim_path(predecessor), ignore_errors=True)

    def install(self, holder: Holder) -> None:
        """Write ``holder`` to ``lease.json``, then remove the files of earlier holders."""
        failpoint("lease/install")
        self.write_beat(holder, Beat())
        write_atomically(self.path, _encode(holder))
        # The new holder has not written its file ``.start`` yet, so any such file is an earlier holder's. The loop may
        # also remove a newcomer's unfinished claim: its ``claim`` then returns False, and the newcomer tries again.
        kept_paths = {self.beat_path(holder), self._claim_path(holder)}
        for path in list(self._folder.iterdir()):
            if path in kept_paths:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def beat(self, holder: Holder) -> Beat | None:
        """Return the last counter of ``holder``; None if its file is missing or damaged."""
        try:
            return TypeAdapter(Beat).validate_json(self.beat_path(holder).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write_beat(self, holder: Holder, beat: Beat) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {**asdict(beat), "time": round(time.time(), 3)}
        write_atomically(self.beat_path(holder), json.dumps(content))

    def read_start(self, holder: Holder) -> int:
        """Return the number of the holder's newest start of the ranks. Raises OSError, LeaseError."""
        path = self._start_path(holder)
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if not re.fullmatch("[0-9]+", text):
            raise LeaseError(f"{path}: got {text!r}, expected a number")
        return int(text)

    def write_start(self, holder: Holder, number: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._start_path(holder), f"{number}\n")

    def beat_path(self, holder: Holder) -> Path:
        return self._folder / f"{holder.nonce}.beat"

    def _start_path(self, holder: Holder) -> Path:
        return self._folder / f"{holder.nonce}.start"

    def _claim_path(self, predecessor: Holder | None) -> Path:
        name = _FIRST
        if predecessor is not None:
            name = predecessor.nonce
        return self._folder / f"{name}.next"


def _encode(holder: Holder) -> str:
    return json.dumps(asdict(holder), indent=1) + "\n"


def _read_holder(path: Path) -> Holder | None:
    """Return the holder in a file; None without the file. Raises LeaseError if the file is damaged."""
    try:
        return TypeAdapter(Holder).validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (IsADirectoryError, ValidationError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            fault = error.errors()[0]
            reason = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
        raise LeaseError(
            f"{path} is damaged ({reason}); remove it when no process of this run is left"
        ) from error


NONCE_VARIABLE = "MEGATRON_DPPO_LEASE"
"""Environment variable of a rank with the nonce of the run's lease."""


START_VARIABLE = "MEGATRON_DPPO_START"
"""Environment variable of a rank with the number of the start of the ranks under this lease, counted from 1."""


def start_of_ranks() -> int | None:
    """Return the number of the start that this rank belongs to; None in a process that no supervisor started."""
    text = os.environ.get(START_VARIABLE)
    if text is None:
        return None
    return int(text)


class FencedError(RunError):
    """This start of the run, or these ranks of it, no longer holds the run's folder, or can't find out."""


class Fence:
    """Checks that the start with ``nonce`` still holds the lease on ``folder``.

    Callers check before they publish a file or folder.

    A caller publishes by a rename directly after ``check``. If the process is suspended between check and rename, the
    rename may come after a takeover. So that this does no harm, unfinished folders of two starts never have the same
    name, and records have the number of their start.

    ``start``: number of the start of the ranks that this process belongs to; None for the holder itself, and for ranks
    that no supervisor starts.
    """

    def __init__(self, folder: str | Path, nonce: str, start: int | None = None) -> None:
        self._files = LeaseFiles(folder)
        self.nonce = nonce
        self.start = start

    def check(self) -> None:
        """Raise FencedError if this process no longer holds the lease, or can't find out whether it does."""
        try:
            holder = self._files.holder()
        except (LeaseError, OSError) as error:
            raise FencedError(f"this start can't tell whether it holds the run: {error}") from error
        if holder is None:
            raise FencedError(f"{self._files.path} is gone, so this start no longer holds the run")
        if holder.nonce != self.nonce:
            raise FencedError(
                f"another start of this run took over: {holder.describe()}; this one stops here"
            )
        if self.start is not None:
            self._check_start(holder, self.start)

    def _check_start(self, holder: Holder, start: int) -> None:
        try:
            newest_start = self._files.read_start(holder)
        except (LeaseError, OSError) as error:
            raise FencedError(
                f"this rank can't tell whether its start is the newest: {error}"
            ) from error
        if newest_start != start:
            raise FencedError(
                f"the ranks of this run were started again (start {newest_start}); this rank is of start {start}"
            )


log = logging.getLogger(__name__)

RENEW_S = 3.0
"""Seconds between two renewals of a holder's counter."""
PATIENCE_S = 30.0
"""A holder on another machine counts as ended if its counter is unchanged for this time, in seconds."""
_POLL_S = 0.5

Announce = Callable[[str], None]


class Lease:
    """A lease on ``folder`` from ``take`` to ``release``. As a context manager it calls both.

    Args:
        folder: the run's folder; must exist.
        announce: called with one line before the wait for a holder on another machine.
        patience_s: length of this wait.
        renew_s: seconds between two renewals.
    """

    def __init__(
        self,
        folder: str | Path,
        announce: Announce = log.info,
        *,
        patience_s: float = PATIENCE_S,
        renew_s: float = RENEW_S,
    ) -> None:
        self._files = LeaseFiles(folder)
        self._announce = announce
        self._patience_s = patience_s
        self._renew_s = renew_s
        self._holder = Holder.of_this_process()
        self._beat_count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.fence = Fence(folder, self._holder.nonce)
        self.loss: str | None = None
        """A sentence that says why this start has lost the lease; None while it holds the lease."""

    @property
    def heartbeat(self) -> Path:
        """The file that is renewed while this start holds the lease."""
        return self._files.beat_path(self._holder)

    def take(self) -> None:
        """Become the holder. Raises LeaseError if another start is the holder, or if the files can't be used."""
        try:
            self._take()
        except OSError as error:
            raise LeaseError(
                f"{error.filename}: {error.strerror}, expected a usable file or folder of the run's lease"
            ) from error

    def _take(self) -> None:
        files = self._files
        newcomer = self._holder
        while True:
            holder = files.holder()
            predecessor = files.last_claimant(holder)
            if predecessor is not None and not self._has_ended(predecessor):
                raise LeaseError(
                    f"in use by the run of {predecessor.describe()}; end that one ({predecessor.how_to_end()})"
                )
            if not files.claim(predecessor, newcomer):
                # Another start was faster: check whether it is alive.
                continue
            # Another start may have become the holder since we read the files. That start has removed its claim
            # (``install``), so our claim on the same predecessor succeeded too late. lease.json then has a new holder.
            if files.holder() == holder:
                break
            files.give_up_claim(predecessor)
        files.install(newcomer)
        self._thread.start()

    def fence_other_starts(self, number: int) -> None:
        """Let the fence pass only ranks of the start with this number from now on. Raises OSError."""
        self._files.write_start(self._holder, number)

    def release(self) -> None:
        """Release the lease, so that the next start need not wait."""
        self._ended.set()
        self._thread.join()
        if self.loss is None:
            self._write_beat(Beat(self._beat_count + 1, ended=True))

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _has_ended(self, holder: Holder) -> bool:
        beat = self._files.beat(holder)
        if beat is not None and beat.ended:
            return True
        if holder.is_earlier_attempt(self._holder):
            return True
        if holder.is_neighbour(self._holder):
            return not holder.runs()
        return self._stops_beating(holder, beat)

    def _stops_beating(self, holder: Holder, first_beat: Beat | None) -> bool:
        """Wait for the counter of a holder on another machine; return whether the holder has ended.

        A holder has ended if its counter does not change, or says ``ended``.
        """
        count = "none yet"
        if first_beat is not None:
            count = str(first_beat.count)
        self._announce(
            f"{self._files.path} is held by {holder.describe()}, which can't be asked from here: "
            f"taking it over if its heartbeat ({count}) does not change for {self._patience_s:.0f} s"
        )
        # Use only this machine's clock, because the clocks of two machines differ.
        deadline = time.monotonic() + self._patience_s
        while True:
            # Read the counter once more after the deadline, so that a renewal just before the deadline counts.
            is_last_read = time.monotonic() >= deadline
            beat = self._files.beat(holder)
            if beat != first_beat:
                # The holder has renewed or released the lease, or its file is gone. If the file is gone, another start
                # has taken over and removed it, so the lease is in use.
                return beat is not None and beat.ended
            if is_last_read:
                return True
            time.sleep(min(_POLL_S, self._patience_s / 10))

    def _renew(self) -> None:
        while not self._ended.wait(self._renew_s):
            try:
                self.fence.check()
            except FencedError as error:
                self.loss = str(error)
                return
            self._beat_count += 1
            self._write_beat(Beat(self._beat_count))

    def _write_beat(self, beat: Beat) -> None:
        try:
            self._files.write_beat(self._holder, beat)
        except OSError as error:
            log.warning("%s can't be renewed: %s", self._files.path, error)
