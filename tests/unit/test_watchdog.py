"""The watchdog's report of a hanging collective, from dumps of torch's flight recorder and from made-up ranks."""

import pickle
import threading
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from megatron_dppo.trainer import watchdog
from megatron_dppo.trainer.watchdog import (
    BACKGROUND,
    LONGEST_WAIT_S,
    PENDING_LIST,
    Pending,
    Watchdog,
    describe_wait,
    patience,
    read_trace,
)
from tests.patience import happens

SECOND = 10**9


def entry(**changes):
    """Return an entry as torch 2.13's flight recorder dumps it, without the fields that are not read."""
    return {
        "frames": [
            {
                "name": "all_reduce",
                "filename": "/v/site-packages/torch/distributed/c10d.py",
                "line": 1,
            },
            {"name": "reduce", "filename": "/v/site-packages/megatron/core/x.py", "line": 2},
            {"name": "agree", "filename": "/home/megatron_dppo/trainer/collectives.py", "line": 71},
            {"name": "main", "filename": "/home/run.py", "line": 3},
        ],
        "process_group": ("3", "DATA_PARALLEL"),
        "profiling_name": "gloo:all_reduce",
        "collective_seq_id": 41,
        "p2p_seq_id": 7,
        "is_p2p": False,
        "time_created_ns": 5 * SECOND,
        "retired": False,
        "state": "scheduled",
        **changes,
    }


HUNG_COLLECTIVE = Pending(
    "3 (DATA_PARALLEL)", (0, 2), "gloo:all_reduce", 41, "trainer/x.py:1 (f)", 5 * SECOND
)


def test_what_is_not_retired_is_pending_oldest_first():
    late = entry(
        process_group=("0", "default_pg"),
        is_p2p=True,
        profiling_name="nccl:send",
        time_created_ns=6 * SECOND,
    )
    trace = {"entries": [late, entry(retired=True), entry()]}
    first, second = read_trace(trace, {"3": (0, 2)})
    assert first == Pending(
        "3 (DATA_PARALLEL)",
        (0, 2),
        "gloo:all_reduce",
        41,
        "trainer/collectives.py:71 (agree)",
        5 * SECOND,
    )
    assert (second.name, second.number, second.ranks) == ("nccl:send", 7, ())
    assert PENDING_LIST.validate_json(PENDING_LIST.dump_json([first, second])) == [first, second]


def test_libraries_alone_are_named_by_their_outermost_line():
    frames = entry()["frames"][:2]
    (pending,) = read_trace({"entries": [entry(frames=frames)]}, {})
    assert pending.caller == "/v/site-packages/megatron/core/x.py:2"
    (without_frames,) = read_trace({"entries": [entry(frames=[])]}, {})
    assert without_frames.caller == "unknown"


def batch(number, **closing):
    """Return a batch of two sends as NCCL's recorder dumps it: only the entry that closes the batch ever changes."""
    values = {"is_p2p": True, "p2p_seq_id": number, "process_group": ("2", "PIPELINE")}
    sends = [entry(**values, profiling_name=f"nccl:send 0->{rank}") for rank in (1, 2)]
    return [*sends, entry(**values, profiling_name="nccl:coalesced", **closing)]


def test_a_batch_is_as_its_last_entry():
    ended = batch(1, retired=True) + batch(2, state="completed")
    assert read_trace({"entries": ended}, {}) == []
    (pending,) = read_trace({"entries": ended + batch(3, state="started")}, {"2": (0, 1, 2)})
    assert (pending.name, pending.number, pending.ranks) == ("nccl:coalesced", 3, (0, 1, 2))
    open_batch = batch(4)[:2]  # the process waits for a connection within the batch
    names = [pending.name for pending in read_trace({"entries": ended + open_batch}, {})]
    assert names == ["nccl:send 0->1", "nccl:send 0->2"]


def test_the_recorders_of_gloo_and_of_nccl_are_both_read(monkeypatch):
    hung_entry = entry(profiling_name="nccl:_all_gather_base", state="started")
    older = entry(time_created_ns=4 * SECOND)
    destroyed = entry(process_group=("weights-1", ""), profiling_name="gloo:broadcast")
    traces = {
        "_dump_nccl_trace": [entry(retired=True), hung_entry],
        "_dump_fr_trace": [older, destroyed],
    }
    monkeypatch.setattr(watchdog, "known_groups", lambda: {"3": (0, 2)})
    for name, entries in traces.items():
        dump = pickle.dumps({"version": "2.10", "entries": entries})
        module = watchdog._distributed_c10d
        monkeypatch.setattr(module, name, lambda *asked, dump=dump: dump, raising=False)
    pending = watchdog.pending_collectives(callers=False)
    assert [each.name for each in pending] == ["gloo:all_reduce", "nccl:_all_gather_base"]


def test_where_another_rank_is():
    other = Pending("0", (0, 2), "gloo:broadcast", 3, "loop/y.py:2 (g)", 0)
    assert describe_wait(2, HUNG_COLLECTIVE, {}).startswith("rank 2 waits in no collective")
    assert describe_wait(2, HUNG_COLLECTIVE, {2: [HUNG_COLLECTIVE]}) == "rank 2 waits in the same"
    assert describe_wait(2, HUNG_COLLECTIVE, {2: [other]}) == (
        "rank 2 waits in gloo:broadcast, number 3 of group 0 (ranks 0, 2), asked for at loop/y.py:2 (g)"
    )
    assert describe_wait(2, HUNG_COLLECTIVE, {2: []}) == "rank 2 has gone on"


def one_pending(callers: bool):
    """Return the pending collectives as the recorder does: one, with its caller only if ``callers``."""
    return [HUNG_COLLECTIVE if callers else replace(HUNG_COLLECTIVE, caller="unknown")]


def make_watchdog(reports, limit_s=2.0, store=None):
    return Watchdog(0, limit_s, lambda: store, reports.append, one_pending)


def test_a_collective_is_overdue_beyond_the_limit_of_the_moment():
    dog = make_watchdog([])
    assert dog.overdue(7 * SECOND) is None
    assert dog.overdue(7 * SECOND + 1) == replace(HUNG_COLLECTIVE, caller="unknown")
    with patience("others generate", 10.0):
        assert dog.overdue(15 * SECOND) is None
        with patience("less", 1.0):
            assert dog.overdue(15 * SECOND) is None
        assert dog.overdue(15 * SECOND + 1).is_same(HUNG_COLLECTIVE)
    assert dog.overdue(7 * SECOND + 1).is_same(HUNG_COLLECTIVE)


def test_a_checkpoint_in_the_background_may_wait_for_hours():
    writing = replace(HUNG_COLLECTIVE, group=f"9 ({BACKGROUND})", since_ns=0)
    dog = Watchdog(0, 2.0, lambda: None, print, lambda callers: [writing])
    assert dog.overdue(int(LONGEST_WAIT_S) * SECOND) is None
    assert dog.overdue(int(LONGEST_WAIT_S) * SECOND + 1) == writing


def wait_for(reports):
    assert happens(lambda: reports)
    return reports


def test_the_report_names_the_collective_its_caller_and_who_is_missing():
    reports = []
    make_watchdog(reports, 0.05, dist.HashStore()).start()
    (report,) = wait_for(reports)
    assert report == (
        "rank 0 has waited for 0 s in gloo:all_reduce, number 41 of group 3 (DATA_PARALLEL) (ranks 0, 2); "
        "asked for at trainer/x.py:1 (f); "
        "rank 2 waits in no collective: it is stopped, or busy with something else"
    )


def test_the_report_of_a_checkpoint_has_the_limit_of_checkpoints():
    writing = replace(HUNG_COLLECTIVE, group=f"9 ({BACKGROUND})", since_ns=0)
    reports = []
    dog = Watchdog(0, 0.05, dist.HashStore, reports.append, lambda callers: [writing])
    with patience("others generate", 10.0):
        dog.start()
        assert f"has waited for {LONGEST_WAIT_S:.0f} s in " in wait_for(reports)[0]


def test_a_rendezvous_that_does_not_answer_is_said(monkeypatch):
    monkeypatch.setattr("megatron_dppo.trainer.watchdog._STORE_S", 0.05)
    reports = []
    never: Any = threading.Event().wait
    dog = Watchdog(0, 0.05, never, reports.append, one_pending)
    dog.start()
    assert wait_for(reports)[0].endswith("which rank 0 or its launcher hosts, does not answer")
