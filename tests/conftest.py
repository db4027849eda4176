"""Settings of every process of the tests and of its child processes, and the tiers of the tests.

The first tier is ``make test``. Continuous integration then runs the second tier, and a share of the slow tests that
changes from day to day.
"""

import asyncio
import inspect
import os
import sys
import zlib
from collections.abc import Iterator
from unittest import mock

import pytest

from megatron_dppo.system.async_runner import AsyncRunner

# torch and numpy read this variable when they are imported. Several test processes share the cores. If each process had
# a thread for each core, a parallel loop would spin until its last thread gets a core, and cost ten times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")

FOLDERS_OF_SECOND = (
    "distributed",
    "gpu_evidence",
    "integration",
    "slurm",
    "unit/annexes",
    "unit/repository",
)
"""Folders whose tests are of the second tier, unless they are marked ``first`` or ``slow``."""
DAYS = 7


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-day",
        type=int,
        choices=range(DAYS),
        help=f"of the slow tests, only the share of this day; {DAYS} days have all of them",
    )


@pytest.fixture(autouse=True, scope="module")
def environment_of_a_module() -> Iterator[None]:
    """Restore the environment variables after a file's last test.

    A trainer in the test's own process sets variables for libraries, such as gloo's interface. Without this fixture the
    runs that later files of this process start would get them.
    """
    with mock.patch.dict(os.environ):
        yield


@pytest.hookimpl(tryfirst=True)  # before pytest selects tests by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of the second tier, and leave out the slow tests of other days."""
    day = config.getoption("--slow-day")
    folders = [config.rootpath / "tests" / name for name in FOLDERS_OF_SECOND]
    kept, left_out = [], []
    for item in items:
        is_slow = item.get_closest_marker("slow") is not None
        is_first = item.get_closest_marker("first") is not None
        is_in_second_folder = any(item.path.is_relative_to(folder) for folder in folders)
        if is_in_second_folder and not is_slow and not is_first:
            item.add_marker(pytest.mark.second)
        if is_slow and day is not None and day_of(item.nodeid) != day:
            left_out.append(item)
        else:
            kept.append(item)
    items[:] = kept
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(tryfirst=True)  # before pytest refuses a coroutine
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    test = pyfuncitem.obj
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters
    asyncio.run(test(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


def day_of(nodeid: str) -> int:
    """Return the day, 0 to 6, on which continuous integration runs the slow test ``nodeid``."""
    return zlib.crc32(nodeid.encode()) % DAYS


@pytest.fixture(scope="module", autouse=True)
def no_process_group_is_left() -> Iterator[None]:
    """Check that a file's tests end the process groups that they start: the next file's tests share the process."""
    yield
    distributed = sys.modules.get("torch.distributed")
    assert distributed is None or not distributed.is_initialized()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Make a process group with this process as its only rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ends_process_group() -> Iterator[None]:
    """End the process group that a file's tests may have started."""
    import torch.distributed as dist

    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def runner() -> Iterator[AsyncRunner]:
    """Run coroutines on a thread of their own."""
    with AsyncRunner() as runner:
        yield runner
