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
"""Seconds of a core that a mutant may use: these, and so many times what its tests take, unmutated.
One that takes longer made something endless.
"""
Tell = Callable[[Mutant, Verdict], None]
"""Takes each mutant that was tried, and what became of it."""


@dataclass
class Found:
    """What a session leaves to do: ``left`` are the mutants whose change runs when their module is
    loaded. ``seconds`` of each test, unmutated. ``loaded``: modules of other packages.
    """

    left: list[Mutant] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    loaded: list[str] = field(default_factory=list)


def run_pytest(tests: Sequence[str], *plugins: object) -> int:
    """pytest over these unit tests, quietly."""
    files = []
    for name in dict.fromkeys(tests):
        (path,) = Path("tests/unit").rglob(f"test_{name}.py")
        files.append(str(path))
    off = ("cacheprovider", "xdist")
    words = ["-x", "-q", "-s", "--tb=no", *(w for name in off for w in ("-p", f"no:{name}"))]
    return int(pytest.main([*words, *files], plugins=list(plugins)))


class Session:
    """A pytest plugin in place of the loop over tests.

    A mutant runs the tests that call its function, those first that are quick and have killed its
    neighbours.
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
        """Every mutant against the collected tests."""
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
        """Tell an error of this plugin, whose process prints nothing else."""
        print(excrepr, file=ERRORS, flush=True)

    def _measure(self, session: pytest.Session) -> dict[str, tuple[float, set[Key]]]:
        """Each test's seconds, and the functions that it calls."""
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
        forget_answers(self._files)  # what collecting the tests left
        gc.freeze()  # children share what they don't change
        killers = RawArray("i", len(mutants))
        for number, verdict in verdicts(
            range(len(mutants)),
            lambda n: self._survives(session, mutants[n][1], killers, n),
            self._processes,
        ):
            mutant, change = mutants[number]
            if verdict != Verdict.survived and not killers[number]:  # it died before its first test
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
        """Of a test: its seconds by how likely it kills."""
        return self.found.seconds[name] / (0.1 + self._kills[change.outer, name])


class Quickest:
    """A pytest plugin that runs the quickest test first, and bounds the time of all."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the tests."""
        items.sort(key=lambda item: self._seconds.get(item.nodeid, 0.0))
        allow(START_S + TIMES * sum(self._seconds.get(item.nodeid, 0.0) for item in items))


def session_of(
    mutants: Sequence[Mutant], tests: Sequence[str], tell: Tell, *, processes: int
) -> Found:
    """Try each of the mutants whose functions can be swapped in a process that runs."""
    session = Session(mutants, tell, processes=processes)
    silence()
    session.watch()
    status = run_pytest(tests, session)
    if status not in (0, 1):
        raise RuntimeError(f"pytest ended with {status}")
    return session.found
