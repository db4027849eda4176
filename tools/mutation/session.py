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
"""A mutant may use START_S seconds of a core, and TIMES the seconds of its tests without a mutant.
A mutant that takes longer has an endless loop.
"""
Tell = Callable[[Mutant, Verdict], None]
"""Function that receives each tried mutant with its verdict."""


@dataclass
class Found:
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
    off = ("cacheprovider", "xdist")
    words = ["-x", "-q", "-s", "--tb=no", *(w for name in off for w in ("-p", f"no:{name}"))]
    return int(pytest.main([*words, *files], plugins=list(plugins)))


class Session:
    """A pytest plugin in place of the loop over tests.

    A mutant runs the tests that call its function. Tests that are quick, and that have killed mutants
    of the same function, run first.
    """

    def __init__(self, mutants: Sequence[Mutant], tell: Tell, *, processes: int) -> None:
        self.found = Found()
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
        at_load = set(self._called)
        measured = in_child(lambda: self._measure(session))
        self._calls = {name: calls for name, (_, calls) in measured.items()}
        self.found.seconds = {name: seconds for name, (seconds, _) in measured.items()}
        self.found.loaded = [name for name in sys.modules if "megatron_dppo" not in name]
        functions = functions_in(self._files)
        pairs = [(mutant, Change(mutant, functions)) for mutant in self._mutants]
        known = {file for file, _, _ in at_load}
        at_once = {m: c.fits and not c.inner & at_load and str(m.file) in known for m, c in pairs}
        here = [(mutant, change) for mutant, change in pairs if at_once[mutant]]
        self.found.left = [mutant for mutant in self._mutants if not at_once[mutant]]
        self._try(session, here)
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
        forget_answers(self._files)  # the collection of the tests has filled caches
        gc.freeze()  # children share what they don't change
        killers = RawArray("i", len(mutants))
        for number, verdict in verdicts(
            range(len(mutants)),
            lambda n: self._survives(session, mutants[n][1], killers, n),
            self._processes,
        ):
            mutant, change = mutants[number]
            if (
                verdict != Verdict.survived and not killers[number]
            ):  # it ended before its first test
                self.found.left.append(mutant)
                continue
            self._tell(mutant, verdict)
            if verdict == Verdict.killed:
                self._kills[change.outer, session.items[killers[number] - 1].nodeid] += 1

    def _survives(self, session: pytest.Session, change: Change, killers: Any, number: int) -> bool:
        change.apply()
        chosen = [
            (self._cost(change, item.nodeid), at)
            for at, item in enumerate(session.items)
            if change.outer in self._calls[item.nodeid]
        ]
        order = [at for _, at in sorted(chosen)]
        allow(START_S + TIMES * sum(self.found.seconds[session.items[at].nodeid] for at in order))
        for at, following in zip(order, [*order[1:], None], strict=True):
            killers[number] = at + 1
            session.items[at].ihook.pytest_runtest_protocol(
                item=session.items[at],
                nextitem=None if following is None else session.items[following],
            )
            if session.testsfailed:
                return False
        return True

    def _cost(self, change: Change, name: str) -> float:
        """Return the order of a test: its seconds, divided by how likely it kills."""
        return self.found.seconds[name] / (0.1 + self._kills[change.outer, name])


class Quickest:
    """A pytest plugin that runs the quickest test first, and limits the time of all tests together."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests."""
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))
        allow(START_S + TIMES * sum(self._seconds.get(item.nodeid, 0.0) for item in items))


def session_of(
    mutants: Sequence[Mutant], tests: Sequence[str], tell: Tell, *, processes: int
) -> Found:
    """Try the mutants whose functions can be swapped in a running process."""
    session = Session(mutants, tell, processes=processes)
    silence()
    session.watch()
    status = run_pytest(tests, session)
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with {status}")
    return session.found
