"""Calls in threads of their own, whose wait is bounded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class TransferTimeoutError(RuntimeError):
    """A broadcast or its group wasn't through in time."""


def in_background(call: Callable[[], T]) -> Future[T]:
    """Run ``call`` in a thread that doesn't keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
