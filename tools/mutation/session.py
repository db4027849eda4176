"""A pytest session that collects once, and then tries each mutant in a fork of itself."""

from __future__ import annotations

import gc
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import RawArray
from pathlib import Path
from typing import Any

import pytest

from mutation.children import ERRORS, Verdict, allow, in_child, silence, verdicts
from mutation.making import Mutant
from mutation.swapping import Change, Key, forget_answers, functions_in, key

START_S, TIMES = 5.0, 3.0
"""A mutant may use START_S seconds of a core, plus TIMES times the seconds that its tests take without a
mutant. A mutant that takes longer counts as an endless loop.
"""
Tell = Callable[[Mutant, Verdict], None]
"""Function that receives each tried mutant with its verdict."""


@dataclass
class SessionResults:
    """The results of a session for the mutants that it could not try.

    ``left``: the mutants whose changed code runs when their module is loaded. ``seconds``: seconds of
    each test without a mutant. ``loaded``: modules of other packages.
    """

    left: list[Mutant] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)


def run_pytest(tests: Sequence[str], *plugins: object) -> int:
    """Run pytest quietly on these unit tests, and return its exit code."""
    files = []
    for name in dict.fromkeys(tests):
        (path,) = Path("tests/unit").rglob(f"test_{name}.py")
        files.append(str(path))
    options = ["-x", "-q", "-s", "--tb=no", "-p", "no:cacheprovider", "-p", "no:xdist"]
    return int(pytest.main([*options, *files], plugins=list(plugins)))


class Session:
    """A pytest plugin that replaces pytest's loop over the tests.

    A mutant runs the tests that call its function. Tests that are quick, and that have killed mutants
    of the same function, run first.
    """

    def __init__(self, mutants: Sequence[Mutant], tell: Tell, *, processes: int) -> None:
        self.found = SessionResults()
        self._mutants = mutants
        self._files = {str(mutant.file) for mutant in mutants}
        self._tell = tell
        self._processes = processes
        self._called: set[Key] = set()
        self._calls: dict[str, set[Key]] = {}
        self._kills: Counter[tuple[Key | None, str]] = Counter()

    def watch(self) -> None:
        """Note every function of the mutated modules that runs from now on."""

        def trace(frame: Any, event: str, argument: Any) -> None:
            if frame.f_code.co_filename in self._files:
                self._called.add(key(frame.f_code))

        sys.settrace(trace)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Try every mutant with the collected tests."""
        sys.settrace(None)
        if session.testsfailed:
            raise RuntimeError("the tests cannot be collected")
        called_at_load = set(self._called)
        measured = in_child(lambda: self._measure(session))
        self._calls = {name: calls for name, (_, calls) in measured.items()}
        self.found.seconds = {name: seconds for name, (seconds, _) in measured.items()}
        self.found.loaded = [name for name in sys.modules if "megatron_dppo" not in name]
        functions = functions_in(self._files)
        loaded_files = {file for file, _, _ in called_at_load}
        swappable: list[tuple[Mutant, Change]] = []
        for mutant in self._mutants:
            change = Change(mutant, functions)
            runs_at_load = bool(change.inner & called_at_load)
            is_loaded = str(mutant.file) in loaded_files
            if change.fits and is_loaded and not runs_at_load:
                swappable.append((mutant, change))
            else:
                self.found.left.append(mutant)
        self._try(session, swappable)
        return True

    def pytest_internalerror(self, excrepr: object) -> None:
        """Print an error of this plugin. The process prints nothing else."""
        print(excrepr, file=ERRORS, flush=True)

    def _measure(self, session: pytest.Session) -> dict[str, tuple[float, set[Key]]]:
        """Return each test's seconds, and the functions that the test calls."""
        silence()
        measured = {}
        for item in session.items:
            forget_answers(self._files)
            self._called.clear()
            start = time.process_time()
            self.watch()
            item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
            sys.settrace(None)
            measured[item.nodeid] = time.process_time() - start, set(self._called)
            if session.testsfailed:
                raise RuntimeError(f"{item.nodeid} fails unmutated")
        return measured

    def _try(self, session: pytest.Session, mutants: Sequence[tuple[Mutant, Change]]) -> None:
        # The collection of the tests has filled caches.
        forget_answers(self._files)
        # Exclude all objects from garbage collection: a collection in a child would copy memory that it shares with
        # its parent.
        gc.freeze()
        # For each mutant, the number of the last test that began, counted from 1.
        killers = RawArray("i", len(mutants))
        for number, verdict in verdicts(
            range(len(mutants)),
            lambda n: self._survives(session, mutants[n][1], killers, n),
            self._processes,
        ):
            mutant, change = mutants[number]
            ended_before_tests = verdict != Verdict.survived and not killers[number]
            if ended_before_tests:
                self.found.left.append(mutant)
                continue
            self._tell(mutant, verdict)
            if verdict == Verdict.killed:
                self._kills[change.outer, session.items[killers[number] - 1].nodeid] += 1

    def _survives(self, session: pytest.Session, change: Change, killers: Any, number: int) -> bool:
        change.apply()
        costs: dict[int, float] = {}
        for index, item in enumerate(session.items):
            if change.outer in self._calls[item.nodeid]:
                costs[index] = self._cost(change, item.nodeid)
        order = sorted(costs, key=costs.__getitem__)
        items = [session.items[index] for index in order]
        allow(START_S + TIMES * sum(self.found.seconds[item.nodeid] for item in items))
        for index, item, next_item in zip(order, items, [*items[1:], None], strict=True):
            killers[number] = index + 1
            item.ihook.pytest_runtest_protocol(item=item, nextitem=next_item)
            if session.testsfailed:
                return False
        return True

    def _cost(self, change: Change, name: str) -> float:
        """Return the seconds of a test, divided by the number of mutants of the function that it has killed."""
        return self.found.seconds[name] / (0.1 + self._kills[change.outer, name])


class Quickest:
    """A pytest plugin that runs the quickest test first, and limits the time of all tests together."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests."""
        items.sort(key=self._seconds_of)
        allow(START_S + TIMES * sum(map(self._seconds_of, items)))

    def _seconds_of(self, item: pytest.Item) -> float:
        return self._seconds.get(item.nodeid, 0.0)


def session_of(
    mutants: Sequence[Mutant], tests: Sequence[str], tell: Tell, *, processes: int
) -> SessionResults:
    """Try the mutants whose functions can be swapped in a running process."""
    session = Session(mutants, tell, processes=processes)
    silence()
    session.watch()
    status = run_pytest(tests, session)
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with {status}")
    return session.found
