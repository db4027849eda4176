"""A sampling seed for every response, which follows from what the response is for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SamplingSeeds:
    """The seeds of a job: the same in every run that asks for the same, whoever answers, in whatever
    order, and however often it is asked for.

    ``run_seed``: ``run.seed``. ``purpose``: what the responses are for, such as ``step 3``.
    ``positions``: of the job's problems among all that are asked for with this purpose, over all ranks
    and rounds; a problem that is drawn twice has two.
    """

    run_seed: int
    purpose: str
    positions: Sequence[int]

    def of(self, problem: int, sample: int) -> int:
        """Of answer ``sample`` to the ``problem``-th of the job's problems: below 2^63."""
        named = f"{self.run_seed}, {self.purpose}, {self.positions[problem]}, {sample}"
        digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1
