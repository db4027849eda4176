"""Checks for corrupted memory: replicas' weights and optimizer state between steps, engines between updates."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_dppo.config.errors import ConfigError
from megatron_dppo.config.loading import load_config
from megatron_dppo.config.schema import MemoryChecksConfig
from megatron_dppo.model.layout import Layout
from megatron_dppo.trainer.memory_checks import (
    RankHashes,
    _is_expert,
    differing_groups,
    replica_faults,
    replica_groups,
)
from megatron_dppo.weights.transaction import AlteredEngineError, WeightUpdateError
from tests.messages import mentioning, mentions
from tests.unit.config_files import minimal, write_config
from tests.unit.weight_doubles import NORM, A, B, Engine, updater


@pytest.mark.parametrize(
    "layout",
    [
        Layout(data=2),
        Layout(tensor=2, data=2, expert=2, expert_tensor=1, context=1),
        Layout(data=4, expert=2),
        Layout(tensor=2, pipeline=2, data=2, context=2, expert=4),
        Layout(tensor=4, data=2, expert=2, expert_tensor=2),
    ],
)
def test_groups_are_the_ranks_of_equal_place(layout: Layout) -> None:
    """Each rank is in one group for dense tensors and one group for experts, of the layout's sizes."""
    groups = replica_groups(layout)
    for is_expert, size in ((False, layout.data * layout.context), (True, layout.expert_data)):
        ranks = [rank for kind, group in groups if kind == is_expert for rank in group]
        assert sorted(ranks) == list(range(layout.world_size))
        assert {len(group) for kind, group in groups if kind == is_expert} == {size}


def test_replicas_of_experts_hold_the_same_shards() -> None:
    """Two ranks with other shards of one expert (ETP) hold other tensors."""
    layout = Layout(tensor=2, data=2, expert_tensor=2)
    groups = [group for is_expert, group in replica_groups(layout) if is_expert]
    assert groups == [[0, 2], [1, 3]]


def test_a_hash_that_became_larger_or_smaller_has_changed() -> None:
    earlier = RankHashes({"a": "5", "b": "5", "c": "5"}, frozenset())
    later = RankHashes({"a": "4", "b": "5", "c": "6"}, frozenset())
    assert later.changed_since(earlier) == [["a", "4", "5"], ["c", "6", "5"]]


def test_only_experts_are_compared_among_the_replicas_of_experts() -> None:
    """Megatron-Core marks the parameters of experts by ``allreduce`` = False."""
    expert = SimpleNamespace(allreduce=False)
    others = (SimpleNamespace(allreduce=True), SimpleNamespace())
    assert [_is_expert(parameter) for parameter in (expert, *others)] == [True, False, False]


def test_only_the_group_that_differs_is_named() -> None:
    layout = Layout(data=4, expert=2)
    summaries = [["dense", f"experts {rank % 2}"] for rank in range(4)]
    assert differing_groups(layout, summaries) == []
    summaries[3][1] = "flipped"
    assert differing_groups(layout, summaries) == [(True, [1, 3])]


def test_the_minority_is_named_and_without_a_majority_all_are() -> None:
    right = [{"norm": "a", "expert": "b"}, ["expert"]]
    wrong = [{"norm": "x", "expert": "b"}, ["expert"]]
    (fault,) = replica_faults(False, [0, 1, 2], [right, wrong, right])
    assert mentions(fault, "norm", "rank 1")
    assert not mentions(fault, "rank 0")
    (fault,) = replica_faults(False, [0, 1], [right, wrong])
    assert mentions(fault, "a", "rank 0", "x", "rank 1")
    assert replica_faults(True, [0, 1], [right, wrong]) == []


def test_an_engine_whose_weights_changed_is_named_before_the_next_update() -> None:
    engines = Engine(A), Engine(B)
    updates = updater(*engines)
    updates.compare_before_every = 3
    updates.update(1)
    updates.update(2)
    engines[1].held[NORM][0] += 1
    before = len(engines[1].sent)
    with pytest.raises(AlteredEngineError, match=mentioning("version 2", B, NORM, "rank 0")):
        updates.update(3)
    # Nothing was sent, and the engines stay paused with an unverified version.
    assert len(engines[1].sent) == before
    last_calls = engines[0].calls[engines[0].calls.index("unverified-3") :]
    assert "checksums" in last_calls
    assert "resume" not in last_calls


def test_engines_are_compared_as_often_as_configured() -> None:
    engine = Engine()
    updates = updater(engine)
    updates.compare_before_every = 3
    counts = []
    for version in range(1, 8):
        engine.calls.clear()
        updates.update(version)
        counts.append(engine.calls.count("checksums"))
    assert counts == [1, 1, 2, 1, 1, 2, 1]


def test_a_version_that_was_not_verified_is_not_compared() -> None:
    engine = Engine()
    updates = updater(engine, verify_every=2)
    updates.compare_before_every = 1
    engine_checks = []
    for version in range(1, 5):
        engine.calls.clear()
        updates.update(version)
        engine_checks.append(engine.calls.count("checksums"))
    # Versions 1 and 3 are verified as they arrive, and compared before versions 2 and 4.
    assert engine_checks == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("every", "verify_every", "compared_before"),
    # Versions 1, 3, 5, ... are verified, or versions 1, 4, 7, ...
    [(4, 2, [4, 8, 12]), (3, 2, [4, 8, 12]), (5, 3, [5, 11]), (2, 3, [2, 5, 8, 11])],
)
def test_a_due_comparison_waits_for_a_verified_version(
    every: int, verify_every: int, compared_before: list[int]
) -> None:
    engine = Engine()
    updates = updater(engine, verify_every=verify_every)
    updates.compare_before_every = every
    found = []
    for version in range(1, 13):
        engine.calls.clear()
        report = updates.update(version)
        if engine.calls.count("checksums") > int(report.verified):
            found.append(version)
    assert found == compared_before


def test_released_weights_are_not_compared() -> None:
    engine = Engine()
    updates = updater(engine)
    updates.compare_before_every = 1
    updates.update(1)
    engine.altered = {NORM: "0"}
    assert updates._is_memory_due(1)
    updates._keep_digests(None, exist=False)
    assert not updates._is_memory_due(1)


@pytest.mark.parametrize("word", ["stop", "restore"])
def test_a_stored_configuration_with_a_reaction_is_read(tmp_path: Path, word: str) -> None:
    """Ranks always end after a mismatch and start again, as both words of earlier versions allow."""
    path = write_config(tmp_path, minimal(tmp_path))
    overrides = [f"memory_checks.on_mismatch={word}", "memory_checks.max_restores=5"]
    assert load_config(str(path), overrides).memory_checks == MemoryChecksConfig()
    with pytest.raises(ConfigError, match=mentioning("memory_checks.on_mismatches")):
        load_config(str(path), ["memory_checks.on_mismatches=stop"])


def test_a_server_that_does_not_answer_fails_the_update_and_not_the_run() -> None:
    engine = Engine()
    updates = updater(engine)
    updates.compare_before_every = 1
    updates.update(1)
    engine.failing = "checksums"
    with pytest.raises(WeightUpdateError, match="refused"):
        updates.update(2)
