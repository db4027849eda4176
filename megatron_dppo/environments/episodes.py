"""Episodes: the turns of a policy and the answers of an environment as one trajectory, token by token.

The prompt of a turn is every token of its branch so far, as it was sampled or given, followed by the tokens of the chat
template (``TurnTemplate``), whose loss mask is False. Recorded routing is requested from the first missing row. So
versions, log-probabilities and routing of each token come from the call that sampled it.

A new branch begins with a prompt that the template makes of messages. Turns of other branches among them are given, not
sampled. So each sampled token is trained on once, in the branch that it was sampled in.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from megatron_dppo.data.trajectory import FinishReason, Problem, Trajectory
from megatron_dppo.engine.continuation import after, join
from megatron_dppo.engine.protocol import GenerationRequest, seed_of
from megatron_dppo.environments import (
    ChatCall,
    Environment,
    EnvironmentFaultError,
    Observation,
    Step,
    Turn,
)
from megatron_dppo.environments.turn_template import TurnTemplate, TurnTemplateError
from megatron_dppo.environments.workers import EnvironmentPool

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        turns: most turns of the policy.
        tokens: most tokens of a trajectory with its prompt, all branches together.
        observation_tokens: most tokens of one observation, including the template's.
        retries: faults after which a sample is replaced.
        answers_cut_turns: whether an episode continues after a turn that was cut off.
    """

    turns: int
    tokens: int
    observation_tokens: int
    retries: int
    answers_cut_turns: bool = False


@dataclass(eq=False)
class _Episode:
    """The state of an episode.

    Attributes:
        observation: the first observation, which ``request`` contains.
        last: the newest observation.
        past: turns with the environment's answers.
        branch_numbers: branch of each sampled turn.
        branches: all tokens of each branch so far.
        turn: sampled turn without an answer yet.
        delta: tokens before the next turn; for a new branch its whole prompt.
        turn_limit: configuration key that limits the present turn.
        ended_by: limit that ended the episode, in words.
    """

    request: GenerationRequest
    observation: Observation = ""
    last: Observation = ""
    past: list[tuple[Turn, Step]] = field(default_factory=list)
    branches: list[Trajectory] = field(default_factory=list)
    branch_numbers: list[int] = field(default_factory=list)
    turn: Turn | None = None
    delta: Sequence[int] = ()
    turn_limit: str = ""
    ended: FinishReason | None = None
    ended_by: str = ""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the episode to its first observation."""
        self.past = []
        self.branches = []
        self.branch_numbers = []
        self.turn = None
        self.last, self.delta = self.observation, self.request.prompt_ids

    @property
    def branch(self) -> int:
        """Number of the branch that the next turn belongs to."""
        if isinstance(self.last, ChatCall):
            return self.last.branch
        return 0

    @property
    def length(self) -> int:
        return sum(branch.length for branch in self.branches)


@dataclass
class Episodes:
    """Plays the episodes of a rank; ``play`` is the function of a ``GenerationJob``.

    ``faults`` counts each kind of fault of the environments.
    """

    pool: EnvironmentPool
    template: TurnTemplate
    limits: EpisodeLimits
    faults: Counter[str] = field(default_factory=Counter)
    _taken: Counter[str] = field(default_factory=Counter)
    _has_warned: bool = False

    def take_faults(self) -> Counter[str]:
        """Return the ``faults`` since the last call."""
        new_faults = self.faults - self._taken
        self._taken = self.faults.copy()
        return new_faults

    async def play(
        self,
        problem: Problem,
        request: GenerationRequest,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> Trajectory:
        """Play an episode that begins with ``request`` and return its trajectory.

        After more faults of the environment than allowed, the trajectory is ``failed`` and has only the prompt. A fault
        costs no sampled token: the turns are replayed in a new environment, and only where its answers differ the
        policy starts again.
        """
        episode = _Episode(request)
        faults = 0
        needs_own_process = False
        while True:
            try:
                async with self._opened(alone=needs_own_process) as environment:
                    self._begin(episode, problem, request, await environment.reset(problem))
                    await self._repeat(environment, episode)
                    while episode.ended is None:
                        await self._advance(environment, episode, ask)
                return _finished(episode)
            except EnvironmentFaultError as fault:
                # Where the process had several episodes, the next attempt, in a process of its own, shows which one is
                # at fault.
                faults += not fault.is_shared
                needs_own_process = needs_own_process or fault.is_shared
                self._note(problem, fault, is_last=faults > self.limits.retries)
                if faults > self.limits.retries:
                    return _failed(request, str(fault))

    @asynccontextmanager
    async def _opened(self, *, alone: bool) -> AsyncIterator[Environment]:
        environment = await self.pool.open(alone=alone)
        try:
            yield environment
        finally:
            await environment.close()

    def _begin(
        self,
        episode: _Episode,
        problem: Problem,
        request: GenerationRequest,
        observation: Observation,
    ) -> None:
        """Append a new environment's first observation to the prompt of ``request``, or replace the prompt.

        Turns that followed another first observation are sampled again.
        """
        if observation == episode.observation:
            return
        ids: Sequence[int] = problem.prompt_ids
        if observation:
            ids = self._encoded(partial(self.template.opening, problem, observation))
        if not isinstance(observation, ChatCall):
            self._check_length(len(ids) - len(problem.prompt_ids))
        elif observation.branch:
            raise EnvironmentFaultError(f"reset: branch {observation.branch}, expected 0")
        if len(ids) >= self.limits.tokens:
            raise EnvironmentFaultError(
                f"reset: a prompt of {len(ids)} tokens, expected fewer than {self.limits.tokens} "
                "(environment.max_tokens)"
            )
        episode.request = replace(request, prompt_ids=ids)
        episode.observation = observation
        episode.begin()

    def _encoded(self, tokens: Callable[[], list[int]]) -> list[int]:
        """Return the tokens of an observation. Raises EnvironmentFaultError where the template can't encode it."""
        try:
            return tokens()
        # A template or a tokenizer may raise anything for text from outside.
        except Exception as error:
            kind = ""
            if not isinstance(error, TurnTemplateError):
                kind = f"{type(error).__name__}: "
            raise EnvironmentFaultError(
                f"what it said can't be put to the model: {kind}{error}"
            ) from error

    def _check_length(self, tokens: int) -> None:
        if tokens > self.limits.observation_tokens:
            raise EnvironmentFaultError(
                f"an observation of {tokens} tokens, expected at most {self.limits.observation_tokens} "
                "(environment.max_observation_tokens)"
            )

    async def _repeat(self, environment: Environment, episode: _Episode) -> None:
        """Replay the episode's turns in a new environment."""
        for turn, answered in episode.past:
            if await environment.step(turn) != answered:
                log.warning(
                    "an environment answered the same turns otherwise: its episode begins anew"
                )
                episode.begin()
                raise EnvironmentFaultError("the same turns were answered otherwise")

    async def _advance(
        self,
        environment: Environment,
        episode: _Episode,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> None:
        """Sample one turn and get the environment's answer to it."""
        turn = episode.turn
        if turn is None:
            answer = await ask(self._request(episode))
            branches = episode.branches
            number = episode.branch
            if number < len(branches):
                branches[number] = join(branches[number], answer)
            else:
                branches.append(answer)
            episode.branch_numbers.append(number)
            ids = tuple(answer.response_ids.tolist())
            prompt_length = len(answer.prompt_ids)
            episode.turn = turn = Turn(answer.text, ids, answer.truncated, prompt_length)
        step = await environment.step(turn)
        if turn.is_truncated and (step.done or not self.limits.answers_cut_turns):
            self._end_cut(episode, turn, is_done=step.done)
        elif step.done:
            episode.ended = "stop"
        else:
            self._go_on(episode, turn, step)
        episode.past.append((turn, step))
        episode.turn = None

    def _end_cut(self, episode: _Episode, turn: Turn, *, is_done: bool) -> None:
        """End the episode after a turn that was cut off. ``is_done``: whether the environment ends it, too."""
        episode.ended = "length"
        number = len(episode.past) + 1
        tokens = len(turn.token_ids)
        episode.ended_by = f"turn {number} was cut off at {tokens} tokens ({episode.turn_limit})"
        if is_done or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "an episode ended because its %s; environment.cut_turns=answer lets the environment answer such a turn. "
            "Further ones are only counted (rollout/truncated)",
            episode.ended_by,
        )

    def _go_on(self, episode: _Episode, turn: Turn, step: Step) -> None:
        """Set the tokens before the next turn, or end the episode where no turn or token remains."""
        observation = step.observation
        limits = self.limits
        episode.last = observation
        if episode.branch > len(episode.branches):
            raise EnvironmentFaultError(
                f"branch {episode.branch}, expected one of the {len(episode.branches)} there are, or the next"
            )
        if isinstance(observation, ChatCall) and observation.branch == len(episode.branches):
            # The prompt of a branch repeats other branches' turns, so the limit of an observation does not apply.
            delta = self._encoded(partial(self.template.prompt, observation))
        else:
            last_token = episode.branches[episode.branch].token_ids[-1:].tolist()
            delta = self._encoded(partial(self.template.delta, last_token, observation))
            self._check_length(len(delta))
        if not delta:
            raise EnvironmentFaultError(
                "an observation of no tokens, expected one: nothing would tell two turns apart"
            )
        episode.delta = delta
        if len(episode.past) + 1 == limits.turns:
            episode.ended = "length"
            episode.ended_by = f"all {limits.turns} turns were used (environment.max_turns)"
        elif episode.length + len(delta) >= limits.tokens:
            episode.ended = "length"
            episode.ended_by = f"no token was left of {limits.tokens} (environment.max_tokens)"

    def _request(self, episode: _Episode) -> GenerationRequest:
        """Return the engine's request for the next turn."""
        first_request = episode.request
        observation = episode.last
        prompt_length = episode.length + len(episode.delta)
        limits = {
            "rollout.max_response_tokens": first_request.sampling.max_new_tokens,
            "environment.max_tokens": self.limits.tokens - prompt_length,
        }
        if isinstance(observation, ChatCall) and observation.max_tokens is not None:
            limits["the call's max_tokens"] = observation.max_tokens
        episode.turn_limit = min(limits, key=limits.__getitem__)
        max_tokens = limits[episode.turn_limit]
        number = episode.branch
        seed = first_request.sampling.seed
        if number and seed is not None:
            # The server samples by seed and position: two branches with the same prompt would have the same answer.
            seed = seed_of(seed, "branch", number)
        sampling = replace(first_request.sampling, max_new_tokens=max_tokens, seed=seed)
        request = replace(first_request, sampling=sampling)
        if number < len(episode.branches):
            return after(request, episode.branches[number], max_tokens, episode.delta)
        return replace(request, prompt_ids=episode.delta)

    def _note(self, problem: Problem, fault: EnvironmentFaultError, *, is_last: bool) -> None:
        self.faults[str(fault)[:300]] += 1
        consequence = "it begins again"
        if is_last:
            consequence = "its sample is replaced"
        log.warning("the environment of problem %d: %s; %s", problem.problem_id, fault, consequence)


def _finished(episode: _Episode) -> Trajectory:
    assert episode.ended is not None
    numbers = episode.branch_numbers
    # Sort by the order of the turns in the branches.
    times = sorted(range(len(numbers)), key=numbers.__getitem__)
    turn, step = episode.past[-1]
    return replace(
        Trajectory.of_branches(episode.branches),
        finish_reason=episode.ended,
        ended_by=episode.ended_by,
        text=turn.text if step.scored_text is None else step.scored_text,
        turn_rewards=tuple(float(episode.past[time][1].reward) for time in times),
        turn_times=tuple(times),
        wants_score=step.is_scored,
    )


def _failed(request: GenerationRequest, reason: str) -> Trajectory:
    return Trajectory.of_response(
        request.prompt_ids,
        [],
        problem_id=request.problem_id,
        sample_index=request.sample_index,
        finish_reason="failed",
        reason=reason,
    )
