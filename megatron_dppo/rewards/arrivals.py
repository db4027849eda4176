"""Scores of responses while others are still being generated."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future

from megatron_dppo.rewards.verifier import Score, Verifier

Pair = tuple[str, str]
"""(response, answer)."""


class ArrivalScorer:
    """Has ``verifier`` check what is added: at once where it needs no other process, else in a thread that lives as
    long as there is work."""

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._waiting: list[tuple[Pair, Future[Score]]] = []
        self._works = False
        self._lock = threading.Lock()

    def add(self, pair: Pair) -> Future[Score]:
        """Return at once. The future raises what ``Verifier.check`` raises."""
        future: Future[Score] = Future()
        if self._verifier.runs_inline:
            self._check([(pair, future)])
            return future
        with self._lock:
            self._waiting.append((pair, future))
            if self._works:
                return future
            self._works = True
        threading.Thread(target=self._work, name="rewards", daemon=True).start()
        return future

    def require(self, scores: Sequence[Score], pairs: Sequence[Pair]) -> None:
        """Raise VerifierError where a score is a refusal."""
        self._verifier.require(scores, pairs)

    def _work(self) -> None:
        while True:
            with self._lock:
                taken, self._waiting = self._waiting, []
                self._works = bool(taken)
            if not taken:
                return
            self._check(taken)

    def _check(self, taken: Sequence[tuple[Pair, Future[Score]]]) -> None:
        try:
            scores = self._verifier.check([pair for pair, _ in taken])
        except BaseException as error:  # whoever waits for the score gets it
            for _, future in taken:
                future.set_exception(error)
            return
        for (_, future), score in zip(taken, scores, strict=True):
            future.set_result(score)
