"""The right to write in a run's folder: one start at a time has it, on any host.

A holder renews a counter in the background. A start that finds a holder takes the lease over where the holder released
it, where its process has ended (both on one machine), where Slurm has restarted its job, or where its counter is
unchanged for ``PATIENCE_S`` of the new start's own clock; otherwise the start is refused. Exactly one of several starts
that race for a lease gets it. A holder that was only stopped for a while, and continues after a takeover, is rejected
by the fence.

    <folder>/lease.json                 the holder
    <folder>/lease/<nonce>.beat         the counter of the holder with that nonce; only the holder writes it
    <folder>/lease/<nonce>.start        the number of the holder's newest start of the ranks
    <folder>/lease/<nonce>.next/holder.json
                                        the start that succeeds the holder of
                                            that nonce

The lease relies on these properties, also of NFS and Lustre: a rename is atomic, a rename of a folder onto one that is
not empty fails, and a file that is opened by its name after a rename has the new content. It does not rely on locks,
attributes (times, sizes), listings of folders, equal clocks, or process ids of other hosts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, TypeAdapter, ValidationError

from megatron_dppo.system.errors import RunError
from megatron_dppo.system.failpoints import failpoint
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.processes import process_start

LEASE_FILE = "lease.json"
# Placeholder for the nonce of the holder before the first one.
_FIRST = "first"
# Errors of a rename onto an existing claim; ENOENT where another start has cleaned up meanwhile.
_TAKEN = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT}


class LeaseError(RunError):
    """A lease can't be taken; the message names the holder, or the fault of the lease's files."""


@dataclass(frozen=True)
class Holder:
    """A process that takes a lease, as other processes can identify it.

    Attributes:
        nonce: new for every start.
        host, boot, namespace: scope of ``pid``: the machine's name, this boot of it, and the namespace of process
            ids (containers have their own).
        pid, pid_start: the process, and its start time in clock ticks after the boot.
        job, attempt: Slurm's job id, with the cluster's name where it is known, and the number of the job's
            restarts; None and 0 outside of Slurm.
        taken: seconds since the epoch by its own clock, for the user.
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
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> Holder:
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
        job = ""
        if self.job:
            job = f" (Slurm job {self.job}, attempt {self.attempt})"
        return f"process {self.pid} on {self.host}{job}"

    def how_to_end(self) -> str:
        if self.job:
            return f"scancel {self.job.partition('@')[0]}"
        return f"kill {self.pid}, on {self.host}"

    def is_neighbour(self, other: Holder) -> bool:
        machine = self.host, self.boot, self.namespace
        return machine == (other.host, other.boot, other.namespace)

    def runs(self) -> bool:
        return process_start(self.pid) == self.pid_start

    def is_earlier_attempt(self, of: Holder) -> bool:
        """Whether Slurm has started the same job again since, and so ended this one."""
        return self.job is not None and self.job == of.job and self.attempt < of.attempt


@dataclass(frozen=True)
class Beat:
    """The content of a holder's counter file. ``count`` grows; ``ended`` tells that the holder released the lease."""

    count: int = 0
    ended: bool = False


class LeaseFiles:
    """Reads and writes the files of the lease in ``folder``. Every read opens its file anew."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LEASE_FILE
        self._folder = Path(folder) / "lease"

    def holder(self) -> Holder | None:
        """Return the holder in ``lease.json``. Raises LeaseError where the file is damaged, OSError."""
        return _read_holder(self.path)

    def last_claim(self, holder: Holder | None) -> Holder | None:
        """Return the last of the starts that succeed ``holder``; ``holder`` itself without one."""
        while (successor := _read_holder(self._claim_on(holder) / "holder.json")) is not None:
            holder = successor
        return holder

    def claim(self, predecessor: Holder | None, successor: Holder) -> bool:
        """Name the only successor of ``predecessor``; return False where it has another one already."""
        prepared = self._folder / f".{successor.nonce}"
        prepared.mkdir(parents=True)
        try:
            write_atomically(prepared / "holder.json", _encode(successor))
            failpoint("lease/claim")
            prepared.rename(self._claim_on(predecessor))
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            return False
        finally:
            shutil.rmtree(prepared, ignore_errors=True)
        return True

    def give_up_claim(self, predecessor: Holder | None) -> None:
        shutil.rmtree(self._claim_on(predecessor), ignore_errors=True)

    def install(self, holder: Holder) -> None:
        """Write ``holder`` to ``lease.json``, then remove the files of earlier holders."""
        failpoint("lease/install")
        self.write_beat(holder, Beat())
        write_atomically(self.path, _encode(holder))
        for path in self._others(holder):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def beat(self, holder: Holder) -> Beat | None:
        """Return the last counter of ``holder``; None where it has none, or the file is damaged."""
        try:
            return TypeAdapter(Beat).validate_json(self.beat_of(holder).read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def write_beat(self, holder: Holder, beat: Beat) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        content = {**asdict(beat), "time": round(time.time(), 3)}
        write_atomically(self.beat_of(holder), json.dumps(content))

    def beat_of(self, holder: Holder) -> Path:
        return self._folder / f"{holder.nonce}.beat"

    def start(self, holder: Holder) -> int:
        """Return the number of the holder's newest start of the ranks. Raises OSError, LeaseError."""
        path = self._start_of(holder)
        text = path.read_text()
        if not text.strip().isdigit():
            raise LeaseError(f"{path}: got {text!r}, expected a number")
        return int(text)

    def write_start(self, holder: Holder, number: int) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self._start_of(holder), f"{number}\n")

    def _start_of(self, holder: Holder) -> Path:
        return self._folder / f"{holder.nonce}.start"

    def _claim_on(self, holder: Holder | None) -> Path:
        return self._folder / f"{_FIRST if holder is None else holder.nonce}.next"

    def _others(self, holder: Holder) -> Iterator[Path]:
        for path in list(self._folder.iterdir()):
            if path not in {self.beat_of(holder), self._claim_on(holder)}:
                yield path


def _encode(holder: Holder) -> str:
    return json.dumps(asdict(holder), indent=1) + "\n"


def _read_holder(path: Path) -> Holder | None:
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
            f"{path} is damaged ({reason}); remove it once no process of this run is left"
        ) from error


NONCE_VARIABLE = "MEGATRON_DPPO_LEASE"
"""Variable with the nonce of the run's lease, in the environment of the trainer's ranks."""


START_VARIABLE = "MEGATRON_DPPO_START"
"""Variable with the number of the ranks' start under that lease, counted from 1, in their environment."""


def start_of_ranks(environment: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this rank's start; None in a process that no supervisor started."""
    text = environment.get(START_VARIABLE)
    return None if text is None else int(text)


class FencedError(RunError):
    """This start of the run no longer holds its folder; the message names the start that does."""


class Fence:
    """Check of the lease on ``folder`` for ``nonce``, before something is published.

    A rename follows the check within milliseconds. A process that is stopped exactly in between still makes the rename,
    so names of unfinished folders differ between starts, and records are numbered.

    ``start``: number of the start of the ranks that this process belongs to; None for the holder itself, and where no
    supervisor starts the ranks.
    """

    def __init__(self, folder: str | Path, nonce: str, start: int | None = None) -> None:
        self._files = LeaseFiles(folder)
        self.nonce = nonce
        self.start = start

    def check(self) -> None:
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
            newest_start = self._files.start(holder)
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
PATIENCE_S = 30.0
"""Seconds after which a holder on another machine with an unchanged counter counts as ended."""
_POLL_S = 0.5

Announce = Callable[[str], None]


class Lease:
    """A lease on ``folder`` from ``take`` to ``release``; a context manager does both.

    Args:
        folder: the run's folder; must exist.
        announce: called with one line before a wait for another machine's holder.
        patience_s: length of that wait.
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
        self._count = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self.fence = Fence(folder, self._holder.nonce)
        self.taken_over: str | None = None
        """A sentence about the start that took over while this one ran; None without one."""

    @property
    def heartbeat(self) -> Path:
        """The file that is renewed while this start holds the lease."""
        return self._files.beat_of(self._holder)

    def take(self) -> None:
        """Become the holder. Raises LeaseError where another start is, or where the files can't be used."""
        try:
            self._take()
        except OSError as error:
            raise LeaseError(
                f"{error.filename}: {error.strerror}, expected a file or folder of its lease"
            ) from error

    def _take(self) -> None:
        files = self._files
        newcomer = self._holder
        while True:
            holder = files.holder()
            last_claim = files.last_claim(holder)
            if last_claim is not None and not self._has_ended(last_claim):
                raise LeaseError(
                    f"in use by the run of {last_claim.describe()}; end that one ({last_claim.how_to_end()})"
                )
            if not files.claim(last_claim, newcomer):
                # Another start was faster: check whether it is alive.
                continue
            # The winner may have removed the claim after it became the holder.
            if files.holder() == holder:
                break
            files.give_up_claim(last_claim)
        files.install(newcomer)
        self._thread.start()

    def begin_start(self, number: int) -> None:
        """Fence off the ranks of every start but that with this number. Raises OSError."""
        self._files.write_start(self._holder, number)

    def release(self) -> None:
        """Release the lease, so that the next start need not wait."""
        self._ended.set()
        self._thread.join()
        if self.taken_over is None:
            self._beat(Beat(self._count + 1, ended=True))

    def __enter__(self) -> Self:
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _has_ended(self, holder: Holder) -> bool:
        beat = self._files.beat(holder)
        if (beat is not None and beat.ended) or holder.is_earlier_attempt(of=self._holder):
            return True
        if holder.is_neighbour(self._holder):
            return not holder.runs()
        return self._stands_still(holder, beat)

    def _stands_still(self, holder: Holder, first_beat: Beat | None) -> bool:
        # Use only this machine's clock, because clocks differ. The last check follows after the time is up.
        self._announce(
            f"{self._files.path} is held by {holder.describe()}, which can't be asked from here: "
            f"taking it over if its heartbeat ({first_beat.count if first_beat else 'none yet'}) does not change "
            f"for {self._patience_s:.0f} s"
        )
        deadline = time.monotonic() + self._patience_s
        while True:
            late = time.monotonic() >= deadline
            beat = self._files.beat(holder)
            if beat != first_beat:
                return beat is not None and beat.ended
            if late:
                return True
            time.sleep(min(_POLL_S, self._patience_s / 10))

    def _renew(self) -> None:
        while not self._ended.wait(self._renew_s):
            try:
                self.fence.check()
            except FencedError as error:
                self.taken_over = str(error)
                return
            self._count += 1
            self._beat(Beat(self._count))

    def _beat(self, beat: Beat) -> None:
        try:
            self._files.write_beat(self._holder, beat)
        except OSError as error:
            log.warning("%s can't be renewed: %s", self._files.path, error)
