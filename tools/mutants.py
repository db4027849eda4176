"""Change one operator or number of the numerical core at a time, run its tests, and print the changes
that no test notices: ``make mutants`` (or ``python tools/mutants.py [PATH ...]``).

Cosmic Ray makes the mutants in memory: no file is changed. A process that has collected the tests forks,
and the fork swaps the changed function. If the changed code runs when its module is loaded, a fork of a
process with only the libraries loads the package anew. tests/mutants.md explains the known
survivors.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from mutation.children import Verdict, in_child, verdicts  # noqa: E402
from mutation.making import Mutant, mutants_of, unchanged  # noqa: E402
from mutation.session import Quickest, SessionResults, Tell, run_pytest, session_of  # noqa: E402
from mutation.swapping import MutantLoader  # noqa: E402
from mutation.targets import TARGETS  # noqa: E402

FOREIGN = ("torch", "numpy", "hypothesis", "pydantic")
"""Libraries that every process needs. They are loaded once, before the forks."""
ANEW = ("tests", "examples", "mutation", "__main__", "megatron", "sglang")
"""Packages that a process loads anew with a mutant, in addition to megatron_dppo. The last two depend
on settings that megatron_dppo makes before they are loaded.
"""


def load_libraries() -> None:
    """Load the libraries that all processes need.

    Property tests draw equal examples in every process. Triton runs in its interpreter, because a
    compiled kernel would not have the mutant of its process.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in FOREIGN:
        importlib.import_module(name)
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)
    # A failing comparison loads further modules: load them now.
    with contextlib.suppress(AssertionError):
        torch.testing.assert_close(torch.zeros(1), torch.ones(1))
    phases = (Phase.explicit, Phase.generate)  # no time for small examples
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=phases
    )
    settings.load_profile("mutants")


def load_anew(found: SessionResults, tell: Tell, processes: int) -> None:
    """Try the mutants that a session could not swap. Each fork loads the whole module from its mutant's source."""
    for name in found.loaded:
        if name.split(".")[0] not in ANEW:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    quickest = Quickest(found.seconds)

    def survives(mutant: Mutant) -> bool:
        sys.meta_path.insert(0, MutantLoader(mutant))
        return run_pytest(TARGETS[mutant.path], quickest) == 0

    paths = dict.fromkeys(mutant.path for mutant in found.left)
    for plain, verdict in verdicts([unchanged(p) for p in paths], survives, processes):
        if verdict != Verdict.survived:
            raise RuntimeError(f"the tests of {plain.path} fail unmutated")
    for mutant, verdict in verdicts(found.left, survives, processes):
        tell(mutant, verdict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the survivors and each module's share of killed mutants. Return 1 unless all are killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="modules, e.g. algorithms/rules.py; default: all")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    os.chdir(ROOT)
    start = time.monotonic()
    paths = list(TARGETS)
    if options.paths:
        paths = [path for path in TARGETS if path.startswith(tuple(options.paths))]
    mutants: list[Mutant] = []
    tests: list[str] = []
    for path in paths:
        mutants += mutants_of(path)
        tests += TARGETS[path]
    mutant_counts = Counter(mutant.path for mutant in mutants)
    screen = os.fdopen(os.dup(1), "w")
    # The children send the verdicts through a pipe: two bytes for each mutant.
    reading_end, writing_end = os.pipe()

    def tell(mutant: Mutant, verdict: Verdict) -> None:
        os.write(writing_end, bytes([paths.index(mutant.path), verdict]))
        if verdict != Verdict.killed:
            print(f"{verdict.name:8}  {mutant}", file=screen, flush=True)

    load_libraries()
    found = in_child(lambda: session_of(mutants, tests, tell, processes=options.processes))
    in_child(lambda: load_anew(found, tell, options.processes))
    os.close(writing_end)
    records = os.fdopen(reading_end, "rb").read()
    ended = Counter(zip(records[::2], records[1::2], strict=True))
    for at, path in enumerate(paths):
        count = mutant_counts[path]
        killed = ended[at, Verdict.killed]
        stopped = ended[at, Verdict.stopped]
        line = f"{path}: {count} made, {killed} killed ({killed / count:.1%})"
        if stopped:
            line += f", {stopped} stopped"
        print(line)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = time.monotonic() - start
    cpu_s = used.ru_utime + used.ru_stime
    print(f"{len(mutants)} mutants in {seconds:.0f} s ({cpu_s:.0f} s of one core)")
    return 1 if any(verdict for _, verdict in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
