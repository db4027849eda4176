#!/usr/bin/env python3
"""Simulate single responses, and print a step's seconds beside the planner's formulas, with the idle shares.

    python tools/simulate_idle.py examples/recipes/qwen3_30b_a3b_r3.yaml --gpu h100 --nodes 8

The planner computes a step's generation as a number of tokens at one rate, plus a tail. Here every response has its own
length (log-normal with the plan's mean, cut off at the limit), every server has its running sequences, and a batch
begins and ends as in a run: `rollout.max_staleness` allows it to begin, an update drains or interrupts, a colocated
trainer stops the servers. The plan has the seconds of a decode step, of training, of an update and of a switch.
`--train` and `--update` replace the plan's seconds of training and of an update by measured seconds. Prints, for each
schedule, a step's seconds by plan and by simulation, and the simulated idle shares of trainers and servers.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import NormalDist

from rich.console import Console
from rich.table import Table

from megatron_dppo.cluster.known_models import read_model
from megatron_dppo.cluster.planner.decode_time import decode_seconds
from megatron_dppo.cluster.planner.devices import DEVICES, Cluster
from megatron_dppo.cluster.planner.facts import (
    COLOCATED,
    ON_POLICY,
    STALE,
    RunFacts,
    Schedule,
    facts_of,
)
from megatron_dppo.cluster.planner.generation_time import resumed_seconds, server_slots
from megatron_dppo.cluster.planner.run_plan import RunPlan, plan_run
from megatron_dppo.config import load_config

SCHEDULES = {
    "synchronous": ON_POLICY,
    "one ahead, drained": Schedule(staleness=1),
    "one ahead, interrupted": STALE,
    "two ahead, interrupted": replace(STALE, staleness=2),
    "eight ahead, interrupted": replace(STALE, staleness=8),
    "colocated": COLOCATED,
    "colocated, one ahead": replace(COLOCATED, staleness=1, drains=False),
}
WARM_UP = 3
"""First steps that don't count, because servers begin empty."""


@dataclass
class Server:
    """At most ``slots`` sequences that decode together. A step of n sequences takes ``step_s(n)`` seconds.

    ``clock``: number of steps since the start. A sequence ends when the clock has grown by the sequence's length since
    its beginning. ``decoded``: tokens of all sequences.
    """

    slots: int
    step_s: Callable[[int], float]
    clock: float = 0.0
    decoded: float = 0.0
    running: list[tuple[float, int]] = field(default_factory=list)

    def begin(self, batch: int, tokens: float) -> None:
        heapq.heappush(self.running, (self.clock + tokens, batch))

    @property
    def first_end_s(self) -> float:
        """Seconds until the next sequence ends; infinite if none runs."""
        if not self.running:
            return math.inf
        return (self.running[0][0] - self.clock) * self.step_s(len(self.running))

    def advance(self, seconds: float) -> None:
        if self.running:
            tokens = seconds / self.step_s(len(self.running))
            self.clock += tokens
            self.decoded += tokens * len(self.running)

    def ended(self) -> Iterator[int]:
        """Remove the sequences that have ended, and yield the batch of each."""
        while self.running and self.running[0][0] <= self.clock * (1 + 1e-12) + 1e-9:
            yield heapq.heappop(self.running)[1]


@dataclass(frozen=True)
class Phases:
    """Seconds of a step without decoding. ``resume``: seconds to prefill interrupted sequences again after an
    update."""

    train: float
    update: float
    switch: float = 0.0
    resume: float = 0.0


@dataclass(frozen=True)
class StepFigures:
    """Mean figures of a step. ``trainers``, ``servers``: idle shares. A server with free slots counts as idle in
    part."""

    seconds: float
    trainers: float
    servers: float


def _running_count(server: Server) -> int:
    return len(server.running)


class Simulation:
    """A run of ``schedule``. ``draw`` draws a batch: a list of lengths in tokens."""

    def __init__(
        self,
        schedule: Schedule,
        phases: Phases,
        servers: Sequence[Server],
        draw: Callable[[], Sequence[float]],
    ) -> None:
        self.schedule = schedule
        self.phases = phases
        self.servers = servers
        self._draw = draw
        self.now = 0.0
        self._waiting: deque[tuple[int, float]] = deque()
        self._unfinished: dict[int, int] = {}

    def run(self, steps: int) -> StepFigures:
        """Simulate ``steps`` steps after the warm-up."""
        start = 0.0
        trained_s = 0.0
        earlier_tokens = 0.0
        last_begun_batch = 0
        for step in range(1, steps + WARM_UP + 1):
            if step == WARM_UP + 1:
                start = self.now
                trained_s = 0.0
                earlier_tokens = self._decoded_tokens()
            while last_begun_batch < step + self.schedule.staleness:
                last_begun_batch += 1
                self._begin(last_begun_batch)
            # Step n trains on batch n.
            self._decode_until(partial(self._is_decoded, step))
            self.now += self.phases.switch
            if self.schedule.is_colocated:
                self.now += self.phases.train
            else:
                self._decode_for(self.phases.train)
            if self.schedule.drains:
                self._decode_until(self._is_drained)
            is_interrupted = any(server.running for server in self.servers)
            self.now += self.phases.update
            if is_interrupted:
                self.now += self.phases.resume
            trained_s += self.phases.train + self.phases.update
        elapsed_s = self.now - start
        tokens_per_s = (self._decoded_tokens() - earlier_tokens) / elapsed_s
        # The rate of servers whose slots are all in use.
        full_tokens_per_s = sum(
            server.slots / server.step_s(server.slots) for server in self.servers
        )
        return StepFigures(
            elapsed_s / steps,
            trainers=1 - trained_s / elapsed_s,
            servers=1 - tokens_per_s / full_tokens_per_s,
        )

    def _decoded_tokens(self) -> float:
        return sum(server.decoded for server in self.servers)

    def _begin(self, batch: int) -> None:
        lengths = self._draw()
        self._unfinished[batch] = len(lengths)
        self._waiting.extend((batch, tokens) for tokens in lengths)
        self._fill()

    def _fill(self) -> None:
        while self._waiting:
            server = min(self.servers, key=_running_count)
            if len(server.running) >= server.slots:
                return
            server.begin(*self._waiting.popleft())

    def _is_decoded(self, batch: int) -> bool:
        return self._unfinished[batch] == 0

    def _is_drained(self) -> bool:
        return not any(self._unfinished.values())

    def _decode_until(self, is_done: Callable[[], bool]) -> None:
        while not is_done():
            self._advance(min(server.first_end_s for server in self.servers))

    def _decode_for(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            first = min(server.first_end_s for server in self.servers)
            self._advance(min(first, end - self.now))

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        for server in self.servers:
            server.advance(seconds)
            for batch in server.ended():
                self._unfinished[batch] -= 1
        self._fill()


def location(mean: float, longest: float, spread: float) -> float:
    """Return mu of a log-normal X with sigma ``spread``, so that E[min(X, longest)] = ``mean`` < ``longest``.

    E[min(X, L)] = exp(mu + s^2 / 2) Phi((ln L - mu - s^2) / s) + L (1 - Phi((ln L - mu) / s)).
    """
    normal, end = NormalDist(), math.log(longest)

    def cut_mean(mu: float) -> float:
        below = math.exp(mu + spread**2 / 2) * normal.cdf((end - mu - spread**2) / spread)
        return below + longest * (1 - normal.cdf((end - mu) / spread))

    low, high = math.log(mean) - 20 * spread, end + 20 * spread
    for _ in range(100):
        middle = (low + high) / 2
        if cut_mean(middle) < mean:
            low = middle
        else:
            high = middle
    return low


def simulate(
    facts: RunFacts, cluster: Cluster, phases: Phases, steps: int, spread: float, seed: int
) -> StepFigures:
    """Simulate the run of ``facts`` under its schedule."""
    rollout, engine = facts.rollout, facts.engine
    slots = max(1, int(server_slots(facts, cluster)))
    context = rollout.mean_prompt + rollout.mean_response / 2
    table = [decode_seconds(facts, cluster, max(1, n), context) for n in range(slots + 1)]
    servers = [Server(slots, table.__getitem__) for _ in range(engine.started)]
    rng, longest = random.Random(seed), rollout.longest_response
    mu = location(rollout.mean_response, longest, spread)

    def draw() -> list[float]:
        count = int(rollout.responses)
        return [min(longest, max(1.0, rng.lognormvariate(mu, spread))) for _ in range(count)]

    return Simulation(facts.schedule, phases, servers, draw).run(steps)


def phases_of(plan: RunPlan, cluster: Cluster, train: float | None, update: float | None) -> Phases:
    """The plan's phases. ``train`` and ``update`` replace the plan's seconds if they are not None."""
    seconds, facts = plan.seconds, plan.facts
    assert seconds is not None, "the plan has no seconds"
    running = facts.rollout.responses / max(1, facts.engine.started)
    return Phases(
        train=seconds.trainer if train is None else train,
        update=seconds.update if update is None else update,
        switch=seconds.switch,
        resume=0.0 if facts.schedule.drains else resumed_seconds(facts, cluster, running),
    )


def main() -> None:
    """Parse the command line, simulate, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", help="YAML of the run")
    parser.add_argument("overrides", nargs="*", metavar="key.path=value")
    parser.add_argument("--gpu", choices=sorted(DEVICES), default="h100")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20, help="that count (default: 20)")
    parser.add_argument("--spread", type=float, default=0.8, help="sigma of log length (0.8)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--train", type=float, help="seconds of training in a step, measured")
    parser.add_argument("--update", type=float, help="seconds of a weight update, measured")
    options = parser.parse_intermixed_args()
    config = load_config(options.config, options.overrides)
    shape = read_model(config.model.hf_checkpoint).shape
    cluster = Cluster(DEVICES[options.gpu], options.nodes)
    table = Table("schedule", "step, plan", "simulated", "ratio", "trainers idle", "servers idle")
    for name, schedule in SCHEDULES.items():
        facts = replace(facts_of(config, shape, schedule=schedule), evaluated_problems=0)
        plan = plan_run(facts, cluster)
        phases = phases_of(plan, cluster, options.train, options.update)
        found = simulate(facts, cluster, phases, options.steps, options.spread, options.seed)
        assert plan.seconds is not None
        planned = plan.seconds.total - plan.seconds.checkpoint
        table.add_row(
            name,
            f"{planned:,.0f} s",
            f"{found.seconds:,.0f} s",
            f"{planned / found.seconds:.2f}",
            f"{found.trainers:.0%}",
            f"{found.servers:.0%}",
        )
    Console(highlight=False, width=110).print(table)


if __name__ == "__main__":
    main()
