"""Change one operator or number of the numerical core at a time, run its tests, and print what no
test notices: ``make mutants`` (or ``python tools/mutants.py [PATH ...]``).

Cosmic Ray makes the mutants, in memory: no file is changed. A changed function is swapped in a fork
of a process that has the tests collected; where what changes runs when its module is loaded, a fork
of a process that has the libraries loads all anew. tests/mutants.md explains the known survivors.
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
from mutation.session import Found, Quickest, Tell, run_pytest, session_of  # noqa: E402
from mutation.swapping import Planted  # noqa: E402
from mutation.targets import TARGETS  # noqa: E402

FOREIGN = ("torch", "numpy", "hypothesis", "pydantic")
"""What every process needs, so that it is loaded once."""
ANEW = ("tests", "examples", "mutation", "__main__", "megatron", "sglang")
"""Packages that a process loads anew with a mutant, beside megatron_dppo: the last two look at what
megatron_dppo sets up before.
"""


def load_libraries() -> None:
    """Load what all need; property tests draw the same examples in every process, and Triton runs in
    its interpreter, where a mutant of the process at work is found.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    for name in FOREIGN:
        importlib.import_module(name)
    import torch
    from hypothesis import Phase, settings

    torch.set_num_threads(1)
    with contextlib.suppress(AssertionError):  # what it loads where it fails
        torch.testing.assert_close(torch.zeros(1), torch.ones(1))
    phases = (Phase.explicit, Phase.generate)  # no time for small examples
    settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, phases=phases
    )
    settings.load_profile("mutants")


def load_anew(found: Found, tell: Tell, processes: int) -> None:
    """Try the mutants that a session left: each loads the whole module from its source."""
    for name in found.loaded:
        if name.split(".")[0] not in ANEW:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    quickest = Quickest(found.seconds)

    def survives(mutant: Mutant) -> bool:
        sys.meta_path.insert(0, Planted(mutant))
        return run_pytest(TARGETS[mutant.path], quickest) == 0

    paths = dict.fromkeys(mutant.path for mutant in found.left)
    for plain, verdict in verdicts([unchanged(p) for p in paths], survives, processes):
        if verdict != Verdict.survived:
            raise RuntimeError(f"the tests of {plain.path} fail unmutated")
    for mutant, verdict in verdicts(found.left, survives, processes):
        tell(mutant, verdict)


def main(words: Sequence[str] | None = None) -> int:
    """Print the survivors and each module's share killed; 1 where not every mutant is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="modules, e.g. algorithms/rules.py; default: all")
    parser.add_argument("--processes", type=int, default=2)
    chosen = parser.parse_args(words)
    os.chdir(ROOT)
    start = time.monotonic()
    paths = [p for p in TARGETS if not chosen.paths or any(p.startswith(w) for w in chosen.paths)]
    mutants = [mutant for path in paths for mutant in mutants_of(path)]
    tests = [name for path in paths for name in TARGETS[path]]
    made = Counter(mutant.path for mutant in mutants)
    screen, reading = os.fdopen(os.dup(1), "w"), os.pipe()

    def tell(mutant: Mutant, verdict: Verdict) -> None:
        os.write(reading[1], bytes([paths.index(mutant.path), verdict]))
        if verdict != Verdict.killed:
            print(f"{verdict.name:8}  {mutant}", file=screen, flush=True)

    load_libraries()
    found = in_child(lambda: session_of(mutants, tests, tell, processes=chosen.processes))
    in_child(lambda: load_anew(found, tell, chosen.processes))
    os.close(reading[1])
    told = os.fdopen(reading[0], "rb").read()
    ended = Counter(zip(told[::2], told[1::2], strict=True))
    for at, path in enumerate(paths):
        killed, stopped = ended[at, Verdict.killed], ended[at, Verdict.stopped]
        words = f"{path}: {made[path]} made, {killed} killed ({killed / made[path]:.1%})"
        print(words + (f", {stopped} stopped" if stopped else ""))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    took, cpu = time.monotonic() - start, used.ru_utime + used.ru_stime
    print(f"{len(mutants)} mutants in {took:.0f} s ({cpu:.0f} s of one core)")
    return 1 if any(verdict for _, verdict in ended) else 0


if __name__ == "__main__":
    sys.exit(main())
