"""A save that is being written in a thread while the run goes on."""

from __future__ import annotations

import logging
import threading
from typing import Any

from megatron_dppo.metrics.progress import progress
from megatron_dppo.model.errors import CheckpointError
from megatron_dppo.system.lease import FencedError
from megatron_dppo.trainer.checkpoint_task import MIB, Saved, SaveTask

log = logging.getLogger(__name__)

_SHOWN_AFTER_S = 1.0
_POLL_S = 0.2
_END_S = 10.0
"""For this rank's thread to end once another rank's has failed."""


class PendingSave:
    """Runs ``task`` in a thread from construction on."""

    def __init__(self, task: SaveTask) -> None:
        self._task = task
        self._saved: Saved | None = None
        self._error: BaseException | None = None
        # A daemon: where other ranks died, this one must be able to end.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._saved = self._task.run()
        except BaseException as error:
            self._error = error

    def report(self) -> dict[str, Any] | None:
        """For the other ranks, as JSON: None while it is being written, else whether and why it failed."""
        if self._error is not None:
            known = isinstance(self._error, (CheckpointError, FencedError))
            text = str(self._error) if known else f"{type(self._error).__name__}: {self._error}"
            return {"error": text, "fenced": isinstance(self._error, FencedError)}
        return None if self._saved is None else {"error": None, "fenced": False}

    def settle(self, reports: list[dict[str, Any] | None]) -> Saved | None:
        """What was saved, once every rank has reported; None before.

        Raises CheckpointError where a rank failed, FencedError where the run was succeeded.
        """
        failed = [report for report in reports if report is not None and report["error"]]
        if failed:
            self._thread.join(_END_S)
            kind = FencedError if failed[0]["fenced"] else CheckpointError
            raise kind(failed[0]["error"]) from self._error
        return None if None in reports else self._saved

    def wait(self) -> None:
        """Wait for this rank's thread, which waits for the others'; the progress is shown."""
        self._thread.join(_SHOWN_AFTER_S)
        if not self._thread.is_alive():
            return
        part, step = self._task.part, self._task.place.partial.step
        with progress(f"checkpoint of step {step}, MiB of this rank", part.bytes // MIB) as bar:
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
                bar.update(completed=part.written // MIB)

    def abandon(self) -> None:
        """Wait for this rank's thread where nobody will ask for its result any more."""
        if self._error is None:
            self.wait()
        if self._error is not None:
            log.warning("the checkpoint in the making was not saved: %s", self._error)
