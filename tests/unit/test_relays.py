"""Which trainer ranks relay the messages of an update to other hosts, by hand."""

from __future__ import annotations

from collections import Counter

from megatron_dppo.model.engine_layout import EngineLayout
from megatron_dppo.model.layout import Layout
from megatron_dppo.model.shard_plan import Message, ShardPlan, shard_plan
from megatron_dppo.weights.relays import Relays
from tests.unit.test_shard_plan import MIB, MOE

A, B, C = Message(0, (0, 2, 4), (), 100), Message(1, (3, 5), (), 100), Message(0, (1,), (), 60, 1)


def by_hand() -> Relays:
    """Three servers of two ranks on hosts 0, 1 and 2. Trainer ranks 0 and 1 are on host 0, 2 on 1, 3 and 4 on 2."""
    plan = ShardPlan((A, B, C), (0, 0, 1, 1, 2, 2), (0,) * 6)
    return Relays(plan, [{0}, {0}, {1}, {2}, {2}])


def test_rounds_by_hand() -> None:
    relays = by_hand()
    assert relays.are_needed
    assert relays.unreached_hosts == []
    first, second = relays.rounds(0, 112, 224)
    # Engine rank 2 is the first of host 1, whose only trainer rank is 2; engine rank 4 is the first of host 2.
    assert (first.batch, first.sends, first.receives) == ([A], [(A, 2), (A, 3)], [])
    assert (second.batch, second.sends) == ([C], [])
    # Engine rank 5 is the second of host 2, as trainer rank 4 is.
    assert relays.rounds(1, 112, 224)[0].sends == [(B, 2), (B, 4)]
    assert relays.rounds(2, 112, 224)[0].receives == [(A, 0), (B, 1)]
    assert relays.rounds(3, 112, 224)[0].receives == [(A, 0)]
    assert relays.rounds(4, 112, 224)[0].receives == [(B, 1)]
    assert relays.is_local(3, 5)
    assert not relays.is_local(3, 3)
    # Larger batches have both messages of rank 0. Smaller rounds leave rank 2 with one message of 112 bytes in each.
    assert [current.batch for current in relays.rounds(0, 176, 224)] == [[A, C]]
    rounds = relays.rounds(2, 176, 112)
    assert [current.receives for current in rounds] == [[(A, 0)], [(B, 1)]]


def test_one_host_needs_no_relays() -> None:
    plan = ShardPlan((A, B), (0,) * 6, (0,) * 6)
    assert not Relays(plan, [{0}] * 5).are_needed
    lone = Relays(plan, [set(), set()])
    assert lone.unreached_hosts == [0]


def test_all_ranks_of_a_host_relay_alike() -> None:
    """Four hosts have two trainer ranks and a server of two ranks each."""
    servers, hosts = [EngineLayout(2)] * 4, [{rank // 2} for rank in range(8)]
    layout = Layout(tensor=2, data=4, expert_tensor=2)
    plan = shard_plan(MOE, layout, servers, MIB, 2, hosts=range(4))
    relays = Relays(plan, hosts)
    received = Counter[int]()
    sent = Counter[int]()
    for rank in range(8):
        for round_ in relays.rounds(rank, 4 * MIB, 16 * MIB):
            assert sum(message.bytes for message in round_.batch) <= 4 * MIB
            assert sum(message.bytes for message, _ in round_.receives) <= 16 * MIB
            received[rank] += sum(message.bytes for message, _ in round_.receives)
            sent[rank] += sum(message.bytes for message, _ in round_.sends)
    assert sum(received.values()) == sum(sent.values())
    # Every message enters each of the other three hosts once.
    assert sum(received.values()) == 3 * sum(message.bytes for message in plan.messages)
    assert max(received.values()) < 1.1 * min(received.values())
