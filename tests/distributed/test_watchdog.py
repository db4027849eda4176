"""A rank that is stopped in the middle: the other one ends in time and says where it waited, and for whom."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch.distributed as dist

from megatron_dppo.trainer import watchdog
from megatron_dppo.trainer.collectives import any_rank, barrier
from megatron_dppo.trainer.topology import init_distributed
from tests.ranks import RankFailedError, run_ranks

pytestmark = pytest.mark.distributed

LIMIT_S = 1.0
COMPILER = ("torch._inductor.utils", "torch._dynamo.")


def worker(stopped: int) -> None:
    init_distributed(2, limit_s=LIMIT_S)
    dist.new_group([stopped])
    group = dist.new_group([0, 1], group_desc="EXPERTS")
    any_rank(False, group)
    if dist.get_rank() == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    any_rank(False, group)


@pytest.mark.parametrize(
    ("stopped", "seen"),
    [
        (1, "rank 1 waits in no collective: it is stopped, or busy with something else"),
        (0, "the ranks' rendezvous, which rank 0 or its launcher hosts, does not answer"),
    ],
)
def test_the_rank_that_waits_names_the_collective_and_who_is_missing(
    stopped: int, seen: str
) -> None:
    with pytest.raises(RankFailedError) as failure:
        run_ranks("tests.distributed.test_watchdog:worker", 2, stopped, timeout=60)
    waiting = 1 - stopped
    told = str(failure.value)
    assert f"--- rank {waiting}, exit code 1" in told
    begin = f"error: a collective hangs: rank {waiting} has waited for 1 s in gloo:all_reduce, number 2 of group"
    assert begin in told
    assert "(EXPERTS) (ranks 0, 1); asked for at trainer/collectives.py:" in told
    assert "(any_rank)" in told
    assert seen in told


def looking_worker() -> list[str]:
    """torch's compiler modules that a look brought into a process, which its main thread may be importing."""
    init_distributed(1)
    barrier()
    watchdog.pending(callers=False)
    return sorted({name.split(".")[1] for name in sys.modules if name.startswith(COMPILER)})


def test_a_look_imports_nothing_beside_the_main_thread() -> None:
    assert run_ranks(
        "tests.distributed.test_watchdog:looking_worker", 1, timeout=60, own_interpreter=True
    ) == [[]]
