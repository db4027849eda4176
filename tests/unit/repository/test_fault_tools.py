"""The tools that plant faults: how cases form chains, how processes are told apart, and what counts as lost."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.patience import run_patiently
from tools.faults import chaos, failpoints, soak
from tools.faults.failpoints import Case, Chain, Result, Runner, cases_of

REACHED = Counter({"write/a (torn)": 3, "rename/a": 1, "lease/a.beat": 5})


def test_a_point_has_the_cases_that_a_start_reaches():
    cases = cases_of(REACHED, "*", ["kill", "torn"], [1, 3])
    assert {(c.point, c.kind, c.occurrence) for c in cases} == {
        ("write/a", "kill", 1),
        ("write/a", "kill", 3),
        ("write/a", "torn", 1),
        ("write/a", "torn", 3),
        # This point has no torn case: nothing is written, so a torn write would equal a kill.
        ("rename/a", "kill", 1),
        # This point has no later occurrence: the beat follows the clock, so it may not come.
        ("lease/a.beat", "kill", 1),
    }


class Starts:
    """Stand-in for starts of a run of three steps. A start ends at its failure, or ends the run."""

    def __init__(self, broken: str = "") -> None:
        self.broken_point = broken
        self.steps: Counter[Path] = Counter()
        self.spoiled_directories: set[Path] = set()

    def fail(self, config: Path, chain: Chain, cases: list[Case]) -> bool:
        (case,) = cases
        self.steps[chain.directory] += case.occurrence
        if self.steps[chain.directory] > 3:
            chain.has_ended = True
            return False
        if case.point == self.broken_point:
            self.spoiled_directories.add(chain.directory)
        chain.results.append(Result(case, -9, []))
        return True

    def finish(self, config: Path, chain: Chain, calm: dict[str, object]) -> None:
        if chain.directory in self.spoiled_directories:
            chain.faults.append("export differs")


@pytest.mark.parametrize("broken", ["", "b"])
def test_cases_follow_each_other_and_the_one_at_fault_is_found(tmp_path, monkeypatch, broken):
    starts = Starts(broken)
    monkeypatch.setattr(failpoints, "fail_in_chain", starts.fail)
    monkeypatch.setattr(failpoints, "finish_chain", starts.finish)
    runner = Runner(tmp_path / "config.yaml", tmp_path, {})
    cases = [Case(point, "kill", occurrence) for point in "abcd" for occurrence in (1, 3)]
    runner.run(cases)
    assert sorted(r.case.plan for r in runner.results) == sorted(case.plan for case in cases)
    failed = {result.case.point for result in runner.results if result.faults}
    assert failed == ({broken} if broken else set())
    # Cases of a chain share a run directory, so that later cases need no start at step 0.
    assert len(starts.steps) < len(cases) or broken


def test_processes_of_a_run_have_one_kind():
    examples = {
        "rank": ("rank1", "python -m megatron_dppo.system.fork_server 5 megatron_dppo.train"),
        "server": ("python", "python -m megatron_dppo.engine.launch_server --config c.yaml"),
        "scheduler": ("sglang::schedul", "python -m megatron_dppo.engine.launch_server --config c"),
        "detokenizer": ("sglang::detoken", "sglang::detokenizer"),
        "router": ("python", "python -m megatron_dppo.fleet.http_router"),
        "worker": ("python", "python -m megatron_dppo.rewards.verifier 7"),
        "parser": ("python", "python -m megatron_dppo.engine.answer_parsing 7"),
    }
    for kind, (name, command) in examples.items():
        kinds = [k for k, is_of_kind in chaos.KINDS.items() if is_of_kind(name, command)]
        assert kinds == [kind]
    fork_server = "python -m megatron_dppo.system.fork_server 5 megatron_dppo.cpu.engine"
    assert not any(of_kind("python", fork_server) for of_kind in chaos.KINDS.values())


def test_the_table_of_kills_adds_up():
    tally = chaos.Tally(Counter(rank=2, router=1))
    tally.lost_s.update(rank=9.0, router=0.0)
    assert chaos.table(tally).splitlines()[2:] == [
        "| rank | 2 | 9 | 4.5 |",
        "| router | 1 | 0 | 0.0 |",
        "| all | 3 | 9 | 3.0 |",
    ]


def test_growth_is_that_of_high_values_after_the_warm_up_of_each_process():
    measurements = []
    for step in range(0, 2001, 100):
        # The caches of this server fill in its first 500 steps, 100 MiB in all; then it stays flat.
        server_mib = min(step, 500) / 5
        measurements.append(soak.Measurement(step, "server", 7, int(server_mib * 2**20), 40))
        # This scheduler loses 5 descriptors in 1,000 steps, and no memory.
        measurements.append(soak.Measurement(step, "scheduler", 11, 2**20, 80 + step // 200))
        # This rank loses 12 MiB in 1,000 steps, and 2 descriptors.
        measurements.append(
            soak.Measurement(step, "rank", 8, int(step * 12 * 2**20 / 1000), 100 + step // 500)
        )
        # The connections of this router come and go. It switches between two sizes, and then stays at the larger one.
        connections = 20 if step < 1500 else 23
        router_mib = 68 if step >= 1200 or step % 200 == 0 else 40
        measurements.append(soak.Measurement(step, "router", 10, router_mib * 2**20, connections))
    # A process that lived shorter than twice its warm-up is not judged.
    measurements.append(soak.Measurement(100, "worker", 9, 2**20, 5))
    measurements.append(soak.Measurement(900, "worker", 9, 2**30, 500))
    found = {growth.kind: growth for growth in soak.growths(measurements)}
    assert found.keys() == {"server", "rank", "router", "scheduler"}
    assert found["router"].is_flat
    assert not found["scheduler"].is_flat
    assert found["server"].mib == pytest.approx(0.0, abs=1e-9)
    assert found["server"].is_flat
    assert found["rank"].mib == pytest.approx(12.0, abs=1e-3)
    assert found["rank"].descriptors == pytest.approx(2.0, abs=0.4)
    assert found["rank"].steps == 1500
    assert not found["rank"].is_flat


def test_flips_in_each_kind_of_file_are_caught_or_harmless(tmp_path):
    command = [sys.executable, "-m", "tools.faults.flips", "--folder", tmp_path, "--flips", "18"]
    done = run_patiently(command)
    assert done.returncode == 0, done.stdout + done.stderr
    *_, total = done.stdout.splitlines()
    assert total.startswith("| all | 18 |")
