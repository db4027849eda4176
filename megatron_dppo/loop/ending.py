"""End a run before its last step: after a stop request, or when another start has taken over the run's folder."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch.distributed import ProcessGroup

from megatron_dppo.logging import FAILED, fatal, say
from megatron_dppo.system.errors import AlteredMemoryError, RunError
from megatron_dppo.system.lease import NONCE_VARIABLE, Fence, FencedError, Lease, start_of_ranks
from megatron_dppo.system.processes import STOP_FILE_VARIABLE, StopFile
from megatron_dppo.trainer.collectives import broadcast_json, first_failure


class RunStoppedError(Exception):
    """All ranks agreed to stop. The run's state is the state after the last completed step."""


class StopFlag:
    """Whether a clean stop was requested: by SIGTERM, or by the file whose path is in ``STOP_FILE_VARIABLE``.

    The loop calls the flag at its safe points. The supervisor turns Ctrl-C into SIGTERM. If ranks may run on other
    hosts (under Slurm, or with ``--hosts``), the supervisor writes the file instead. The signal or the file reaches the
    ranks at different times, so the ranks must agree before they stop.
    """

    def __init__(self) -> None:
        self.requested = False
        path = os.environ.get(STOP_FILE_VARIABLE)
        self._file = None if path is None else StopFile(Path(path))

    def install(self) -> StopFlag:
        """Handle SIGTERM, and ignore SIGINT: a terminal sends it to all processes, and the supervisor handles it."""
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return self

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self.requested = True

    def __call__(self) -> bool:
        return self.requested or (self._file is not None and self._file())


class RunFence:
    """Raises FencedError once another start holds the run's folder, so that this start publishes nothing.

    Args:
        directory: the run's folder.
        nonce: nonce of this start's lease on the folder; None on ranks that receive it later, in ``join``.
        start: how often the supervisor has started the ranks under this lease, from 1; None without a supervisor.
    """

    def __init__(self, directory: str, nonce: str | None, start: int | None = None) -> None:
        self._directory = directory
        self._start = start
        self._fence = None if nonce is None else Fence(directory, nonce, start)

    @property
    def nonce(self) -> str:
        assert self._fence is not None, "join first"
        return self._fence.nonce

    def join(self) -> None:
        """Receive the nonce from rank 0. Collective."""
        nonce = broadcast_json(None if self._fence is None else self._fence.nonce, src=0)
        self._fence = Fence(self._directory, nonce, self._start)

    def check(self) -> None:
        """Raise FencedError on this rank if another start holds the folder. Not collective."""
        assert self._fence is not None, "join first"
        self._fence.check()

    def check_together(self, group: ProcessGroup | None = None) -> None:
        """Raise FencedError on every rank of ``group`` (None: all) if the fence of one rank raises. Collective."""
        error = None
        try:
            self.check()
        except FencedError as fenced:
            error = str(fenced)
        first_error = first_failure(error, group)
        if first_error is not None:
            raise FencedError(first_error)


@contextmanager
def run_fence(directory: str) -> Iterator[RunFence]:
    """Yield the fence of the run in ``directory``, under the lease of the supervisor that started this rank.

    Without a supervisor (torchrun), rank 0 takes the lease itself and holds it until the block ends. The other ranks
    receive the lease's nonce in ``RunFence.join``. Raises LeaseError on rank 0 if another start holds the lease.
    """
    nonce = os.environ.get(NONCE_VARIABLE)
    if nonce is not None or os.environ.get("RANK", "0") != "0":
        yield RunFence(directory, nonce, start_of_ranks())
        return
    os.makedirs(directory, exist_ok=True)
    with Lease(directory, say) as lease:
        yield RunFence(directory, lease.fence.nonce)


@contextmanager
def rank_of_run(directory: str) -> Iterator[tuple[StopFlag, RunFence, ExitStack]]:
    """Yield what a run on this rank needs: its stop flag, its fence, and a stack that closes what the run opens.

    Errors that the user can correct end the process with a message.
    """
    stop = StopFlag().install()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        with run_fence(directory) as fence, ExitStack() as stack:
            yield stop, fence, stack
    except AlteredMemoryError as error:
        # No user can correct the error, and the newest checkpoint is whole: the ranks may start again from it.
        fatal(f"{type(error).__name__}: {error}", FAILED)
    except RunError as error:
        fatal(f"{type(error).__name__}: {error}")
