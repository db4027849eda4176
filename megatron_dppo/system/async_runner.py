"""An event loop in a separate thread. Synchronous code calls asynchronous clients through it.

Connections stay open between calls, and submitted coroutines continue while the caller does other work.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from megatron_dppo.system.files import Closing

T = TypeVar("T")


class AsyncRunner(Closing):
    """Runs coroutines on one event loop; ``run`` waits for the result, ``submit`` doesn't.

    The runner is a context manager. Any thread except the loop's own may call ``run``.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-io", daemon=True
        )
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Return the coroutine's result, or raise its exception. An interrupted wait cancels the coroutine."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel_all(self) -> None:
        """Cancel all coroutines and wait for their ends."""
        self.run(_cancel_others())

    def close(self) -> None:
        """Cancel all coroutines and end the thread. A second call has no effect."""
        if self._loop.is_closed():
            return
        self.cancel_all()
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def cancel_tasks(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel ``tasks``, and wait for their ends."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _cancel_others() -> None:
    await cancel_tasks(asyncio.all_tasks() - {asyncio.current_task()})
