"""``make mutants``: its target modules and tests exist, and it empties the caches of mutated functions."""

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from mutation.swapping import forget_answers
from mutation.targets import TARGETS

ROOT = Path(__file__).resolve().parents[3]


def test_every_target_and_its_tests_are_there():
    missing = [path for path in TARGETS if not (ROOT / "megatron_dppo" / path).is_file()]
    names = {name for names in TARGETS.values() for name in names}
    present = {path.stem for path in (ROOT / "tests" / "unit").rglob("test_*.py")}
    missing += [name for name in names if f"test_{name}" not in present]
    assert not missing


@functools.cache
def square(x: int) -> int:
    return x * x


@functools.lru_cache(maxsize=2)
def halve(x: int) -> int:
    return x // 2


def test_cached_answers_of_the_mutated_files_are_forgotten():
    square(3), halve(4)
    forget_answers(["another.py"])
    assert (square.cache_info().currsize, halve.cache_info().currsize) == (1, 1)
    forget_answers([__file__])
    assert (square.cache_info().currsize, halve.cache_info().currsize) == (0, 0)
