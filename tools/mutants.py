"""Change one operator or number of the numerical core at a time, run its tests, and print what no
test notices: ``make mutants`` (or ``python tools/mutants.py [PATH ...]``).

Cosmic Ray makes the mutants, in memory: no file is changed. Each runs in a forked child that finds
torch already loaded. tests/mutants.md explains the survivors that are known.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.util
import itertools
import os
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_S = 300.0
"""A mutant whose tests take longer counts as killed: it made something endless."""

CORE = ("policy_loss", "masks", "divergence", "nonfinite", "presets", "theory_binds", "theory")
DATA = ("packing", "data_balancing", "mini_batches")
TARGETS: dict[str, tuple[str, ...]] = {
    "algorithms/advantages.py": ("advantages",),
    "algorithms/aggregation.py": ("mini_batches",),
    "algorithms/decisions.py": CORE,
    "algorithms/diagnostics.py": CORE,
    "algorithms/divergence.py": ("divergence", *CORE),
    "algorithms/inputs.py": CORE,
    "algorithms/masks.py": ("masks", *CORE),
    "algorithms/options.py": ("presets",),
    "algorithms/penalties.py": ("properties", *CORE),
    "algorithms/policy_loss.py": ("properties", *CORE),
    "algorithms/presets.py": ("presets", *CORE),
    "algorithms/sequences.py": (*CORE, "mini_batches"),
    "algorithms/supervised.py": ("nonfinite",),
    "algorithms/token_weights.py": CORE,
    "vocab_parallel/arguments.py": ("policy_stats",),
    "vocab_parallel/eager_backend.py": ("policy_stats",),
    "vocab_parallel/exact.py": ("policy_stats", "explain_mask"),
    "vocab_parallel/policy_stats.py": ("policy_stats",),
    "vocab_parallel/wire.py": ("policy_stats",),
    "data/balancing.py": DATA,
    "data/log_prob_checks.py": ("nonfinite",),
    "data/packing.py": DATA,
    "loop/batches.py": DATA,
}
"""Module -> the unit tests that must notice a change of it, the quickest to notice first."""

OPERATORS = frozenset(
    [
        f"ReplaceBinaryOperator_{a}_{b}"
        for group in (("Add", "Sub", "Mul", "Div"), ("BitOr", "BitAnd"), ("FloorDiv", "Mod", "Mul"))
        for a in group
        for b in group
        if a != b
    ]
    + [
        f"ReplaceComparisonOperator_{a}_{b}"
        for group in (("Eq", "NotEq"), ("Lt", "LtE", "Gt", "GtE"), ("Is", "IsNot"))
        for a in group
        for b in group
        if a != b
    ]
    + ["ReplaceUnaryOperator_USub_UAdd", "ReplaceUnaryOperator_Delete_Not", "NumberReplacer"]
    + ["ReplaceUnaryOperator_Delete_Invert", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue"]
    + ["ReplaceAndWithOr", "ReplaceOrWithAnd", "AddNot", "ZeroIterationForLoop"]
)
"""Cosmic Ray's operators without those that no one writes by mistake, such as + into >>."""


@dataclass(frozen=True)
class Mutant:
    """One changed place of a module."""

    path: str
    line: int
    operator: str
    source: str
    changed: str


class Planted(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a mutant's source instead of its file."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant
        self._name = "megatron_dppo." + mutant.path.removesuffix(".py").replace("/", ".")

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        """Only of the mutated module."""
        if name != self._name:
            return None
        file = ROOT / "megatron_dppo" / self._mutant.path
        return importlib.util.spec_from_file_location(name, file, loader=self)

    def exec_module(self, module) -> None:  # type: ignore[no-untyped-def]
        """Run the changed source."""
        exec(compile(self._mutant.source, str(module.__spec__.origin), "exec"), module.__dict__)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Every mutant of a module whose meaning differs: not of annotations or errors' words."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    text = (ROOT / "megatron_dppo" / path).read_text()
    seen = {meaning(text)}
    for name in sorted(OPERATORS):
        for occurrence in itertools.count():
            source = mutate_code(text, get_operator(f"core/{name}")(), occurrence)
            if source is None:
                break
            try:
                found = meaning(source)
            except SyntaxError:  # of a star that was no product
                continue
            if found in seen:
                continue
            seen.add(found)
            pairs = zip(text.splitlines(), source.splitlines(), strict=False)
            line, changed = next((i, b.strip()) for i, (a, b) in enumerate(pairs, 1) if a != b)
            yield Mutant(path, line, name, source, changed)


def meaning(text: str) -> str:
    """The syntax tree without annotations, decorators of classes, and the words of what is raised."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Constant(0) if isinstance(node, ast.AnnAssign) else None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.ClassDef):  # frozen or not
            node.decorator_list = []
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = []
    return ast.dump(tree)


def start(mutant: Mutant, tests: tuple[str, ...]) -> int:
    """Run the tests of a mutant in a forked child; its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.setsid()
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.meta_path.insert(0, Planted(mutant))
        files = [f"tests/unit/test_{name}.py" for name in dict.fromkeys(tests)]
        import pytest

        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *files]))
    finally:
        os._exit(code)


def verdicts(
    mutants: list[Mutant], processes: int, seconds: float
) -> Iterator[tuple[Mutant, bool]]:
    """Each mutant with whether it survives its tests; those not started in time are left out."""
    waiting, running = deque(mutants), {}
    stop = time.monotonic() + seconds
    while waiting or running:
        while waiting and len(running) < processes and time.monotonic() < stop:
            mutant = waiting.popleft()
            running[start(mutant, TARGETS[mutant.path])] = mutant, time.monotonic() + LIMIT_S
        if not running:
            return
        time.sleep(0.02)
        for child, (mutant, limit) in list(running.items()):
            if time.monotonic() > limit:
                os.killpg(child, signal.SIGKILL)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                del running[child]
                yield mutant, status == 0


def main() -> int:
    """Print the survivors and each module's share killed; 1 where any survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", help="modules, e.g. algorithms/masks.py; default: all")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="start none after these"
    )
    words = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
    chosen = [p for p in TARGETS if not words.paths or any(p.startswith(w) for w in words.paths)]
    made = [mutant for path in chosen for mutant in mutants_of(path)]
    import hypothesis.extra.numpy  # noqa: F401  what every child would load again
    import pydantic  # noqa: F401
    import torch

    torch.set_num_threads(1)
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for mutant, alive in verdicts(made, words.processes, words.seconds):
        tried[mutant.path] += 1
        if alive:
            survived[mutant.path] += 1
            where = f"{mutant.path}:{mutant.line}"
            print(f"survived  {where}  {mutant.operator}:  {mutant.changed}", flush=True)
    for path, count in Counter(mutant.path for mutant in made).items():
        print(f"{path}: {tried[path] - survived[path]} of {tried[path]} killed, {count} made")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
