"""Data of the demo: sums and differences of four small numbers, e.g. ``3+5-2+4`` with answer 10.

    python -m megatron_dppo.demo.make_data FOLDER [--seed 1]

Writes into FOLDER, in the JSON Lines form of DAPO-Math and AIME files:

``train.jsonl``, ``held_out.jsonl``: ``{"prompt", "answer"}``; no expression is in both.
``warm_start.jsonl``: ``{"prompt", "response"}`` for supervised learning, on expressions of the
training split only.

The warm start imitates the mixed styles of a base model's training text: 40% of its responses are
worked out, ``8 6 = 10`` (the running totals, then the answer); the others are estimates, ``= 12``,
which are wrong by up to five. A model that imitates both is correct less than half of the time;
reinforcement learning can find from the reward that working out is better.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

TERMS = 4
LARGEST_TERM = 5
LARGEST_TOTAL = TERMS * LARGEST_TERM
HELD_OUT = 200
WARM_START_PAIRS = 40_000
WORKED_OUT_SHARE = 0.4
"""Share of the warm start's responses that are worked out; the others are estimates."""
ESTIMATE_RANGE = 5
"""Estimates are uniform within this distance of the answer, and not negative."""


def running_totals(expression: str) -> list[int]:
    """The value after each operation: ``3+5-2+4`` -> [8, 6, 10]."""
    signed = expression.replace("-", "+-").split("+")
    return list(itertools.accumulate(int(term) for term in signed))[1:]


def expressions() -> Iterator[str]:
    """Every expression whose running totals are all 0 or above."""
    terms = [str(i) for i in range(1, LARGEST_TERM + 1)]
    for signs in itertools.product("+-", repeat=TERMS - 1):
        for first, *rest in itertools.product(terms, repeat=TERMS):
            text = first + "".join(s + t for s, t in zip(signs, rest, strict=True))
            if min(running_totals(text)) >= 0:
                yield text


def worked_out(expression: str) -> str:
    """A worked-out response: ``8 6 = 10``."""
    *steps, answer = running_totals(expression)
    return " ".join([*map(str, steps), "=", str(answer)])


def estimate(expression: str, rng: random.Random) -> str:
    """An estimate: ``= 12``."""
    answer = running_totals(expression)[-1]
    low, high = max(0, answer - ESTIMATE_RANGE), answer + ESTIMATE_RANGE
    return f"= {rng.randint(low, high)}"


def make_data(folder: Path, seed: int) -> dict[str, int]:
    """Write the three files; returns name -> number of lines."""
    rng = random.Random(seed)
    everything = list(expressions())
    rng.shuffle(everything)
    held_out, train = everything[:HELD_OUT], everything[HELD_OUT:]
    return {
        name: _write(folder / f"{name}.jsonl", records)
        for name, records in {
            "held_out": map(_problem, held_out),
            "train": map(_problem, train),
            "warm_start": _warm_start(train, rng),
        }.items()
    }


def _problem(expression: str) -> dict[str, str]:
    return {"prompt": expression, "answer": str(running_totals(expression)[-1])}


def _warm_start(train: list[str], rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(WARM_START_PAIRS):
        expression = rng.choice(train)
        worked = rng.random() < WORKED_OUT_SHARE
        response = worked_out(expression) if worked else estimate(expression, rng)
        yield {"prompt": expression, "response": response}


def _write(path: Path, records: Iterable[dict[str, str]]) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record) + "\n" for record in records]
    path.write_text("".join(lines))
    return len(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for name, count in make_data(arguments.folder, arguments.seed).items():
        print(f"{arguments.folder / name}.jsonl: {count} lines")


if __name__ == "__main__":
    main()
