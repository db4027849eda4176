"""The demo's data: sums and differences of four small numbers, ``3+5-2+4``, whose answer is 10.

    python -m examples.tiny_moe.make_data FOLDER [--seed 1]

Writes into FOLDER, in the JSON Lines form of DAPO-Math and AIME files:

``train.jsonl``, ``held_out.jsonl``: ``{"prompt", "answer"}``; no expression is in both.
``warm_start.jsonl``: ``{"prompt", "response"}`` for supervised learning, on expressions of the
training split alone.

The warm start imitates what a base model has read: two kinds of writers. Some work the sum out,
``8 6 = 10`` (the running totals, then the answer). The others jot down an estimate, ``= 12``,
which is off by up to five. A model that imitates both is right less than half of the time;
reinforcement learning can find out, from the reward alone, that working it out pays.
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
"""Of the warm start's responses; the rest are estimates."""
ESTIMATE_RANGE = 5
"""An estimate is uniform within this distance of the answer, and never negative."""


def running_totals(expression: str) -> list[int]:
    """The value after each operation: ``3+5-2+4`` -> [8, 6, 10]."""
    signed = expression.replace("-", "+-").split("+")
    return list(itertools.accumulate(int(term) for term in signed))[1:]


def expressions() -> Iterator[str]:
    """Every expression whose running totals stay at 0 or above."""
    terms = [str(i) for i in range(1, LARGEST_TERM + 1)]
    for signs in itertools.product("+-", repeat=TERMS - 1):
        for first, *rest in itertools.product(terms, repeat=TERMS):
            text = first + "".join(s + t for s, t in zip(signs, rest, strict=True))
            if min(running_totals(text)) >= 0:
                yield text


def worked_out(expression: str) -> str:
    """``8 6 = 10``."""
    *steps, answer = running_totals(expression)
    return " ".join([*map(str, steps), "=", str(answer)])


def estimate(expression: str, rng: random.Random) -> str:
    """``= 12``."""
    answer = running_totals(expression)[-1]
    low, high = max(0, answer - ESTIMATE_RANGE), answer + ESTIMATE_RANGE
    return f"= {rng.randint(low, high)}"


def make_data(folder: Path, seed: int) -> dict[str, int]:
    """Write the three files; the number of lines of each."""
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
