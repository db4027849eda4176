"""Synchronous code's door to the asynchronous client: one event loop that lives between calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class AsyncRunner:
    """Runs coroutines in the calling thread on one event loop, so that connections stay open
    between calls.

    Use it as a context manager, from one thread.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The coroutine's result, or its exception."""
        return self._runner.run(coroutine)

    def close(self) -> None:
        """Cancel what is left on the loop and close it."""
        self._runner.close()
