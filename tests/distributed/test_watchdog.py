"""One of two ranks is stopped before a collective. The other rank ends in time, and its error names the collective and
the missing rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta

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
    output = str(failure.value)
    assert f"--- rank {waiting}, exit code 1" in output
    begin = f"error: a collective hangs: rank {waiting} has waited for 1 s in gloo:all_reduce, number 2 of group"
    assert begin in output
    assert "(EXPERTS) (ranks 0, 1); asked for at trainer/collectives.py:" in output
    assert "(any_rank)" in output
    assert seen in output


def imports_worker() -> list[str]:
    """Return the modules of torch's compiler that ``pending_collectives`` imported. The watchdog's thread must import
    none, because the main thread may be importing them."""
    init_distributed(1)
    barrier()
    watchdog.pending_collectives(callers=False)
    return sorted({name.split(".")[1] for name in sys.modules if name.startswith(COMPILER)})


def test_a_look_imports_nothing_beside_the_main_thread() -> None:
    assert run_ranks(
        "tests.distributed.test_watchdog:imports_worker", 1, timeout=60, own_interpreter=True
    ) == [[]]


def aborted_update_worker() -> list[list[str]]:
    """Return the operations that the watchdog counts while an engine that joined a weight update hangs, and after the
    update is aborted. torch keeps the broadcast in its recorder for half a minute more."""
    from megatron_dppo.weights.weight_group import WeightGroup

    init_distributed(1)
    group = WeightGroup(ranks=1, address="127.0.0.1", device="cpu", timeout_s=1.0)
    store: dist.Store = dist.TCPStore("127.0.0.1", group.port, 2, False)
    for prefix in (group.name, f"{group.name}/", "cpu/"):
        store = dist.PrefixStore(prefix, store)
    engine_groups: list[dist.ProcessGroupGloo] = []

    def join() -> None:
        engine_groups.append(dist.ProcessGroupGloo(store, 1, 2, timedelta(seconds=60)))

    engine = threading.Thread(target=join, daemon=True)
    engine.start()
    group.wait(group.joined)
    # More bytes than the sockets' buffers hold.
    group.connect(1 << 24)
    while not (during := [each.name for each in watchdog.pending_collectives(callers=False)]):
        time.sleep(0.01)
    group.abort()
    return [during, [each.name for each in watchdog.pending_collectives(callers=False)]]


def test_a_weight_update_that_was_broken_off_is_not_waited_for() -> None:
    (seen,) = run_ranks("tests.distributed.test_watchdog:aborted_update_worker", 1, timeout=60)
    assert seen == [["gloo:broadcast"], []]
