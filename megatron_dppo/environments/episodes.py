"""Episodes: the turns of a policy and the answers of an environment as one trajectory, token by token.

The prompt of a turn begins with all earlier tokens of its branch, exactly as they were sampled or inserted. Then come
the tokens that the chat template inserts before the turn (``TurnTemplate``); their loss mask is False. Each sampled
token keeps the weight version and the log-probability of the engine call that sampled it. A call requests recorded
routing only for those rows that the earlier calls of the branch did not record.

If the template ends a turn in the history by another token than the policy sampled, the sampled end is removed before
the next turn, so that the next prompt has the template's token alone.

A new branch begins with a prompt that the template renders from messages. If the messages contain turns of other
branches, the tokens of these turns are part of the prompt, with a loss mask of False. So each sampled token is trained
on once, in the branch in which it was sampled.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from megatron_dppo.data.thoughts import TurnText
from megatron_dppo.data.trajectory import FinishReason, Problem, Trajectory
from megatron_dppo.engine.protocol import GenerationRequest, seed_of
from megatron_dppo.engine.server.continuation import join, request_after
from megatron_dppo.engine.turn_text import ResponseReader
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
Encoded = TypeVar("Encoded")

_MOST_SHOWN = 200
"""Largest number of characters of a turn in a warning."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        turns: largest number of turns of the policy.
        tokens: largest number of tokens of a trajectory: the sum over all branches, with their prompts.
        observation_tokens: largest number of tokens of one observation, including the template's tokens.
        retries: how many times an episode is played again because its environment failed. If the environment fails
            once more, another sample replaces the episode.
        continues_after_cut: whether the environment answers a turn that was cut off, so that the episode continues.
    """

    turns: int
    tokens: int
    observation_tokens: int
    retries: int
    continues_after_cut: bool = False


@dataclass(eq=False)
class _Episode:
    """The state of an episode.

    Attributes:
        request: the request for the first turn.
        first_observation: the first observation. ``request`` contains it.
        last_observation: the newest observation.
        answered_turns: turns with the environment's answers.
        branches: all tokens of each branch so far.
        branch_numbers: branch of each sampled turn, in the order of sampling.
        turn: sampled turn without an answer yet.
        delta: tokens between the last turn and the next turn. For a new branch: the whole prompt.
        turn_limit: the limit that decides how long the present turn may be: a configuration key, or words.
        finish_reason: why the episode ended; None while it continues.
        ended_by: limit that ended the episode, in words.
    """

    request: GenerationRequest
    first_observation: Observation = ""
    last_observation: Observation = ""
    answered_turns: list[tuple[Turn, Step]] = field(default_factory=list)
    branches: list[Trajectory] = field(default_factory=list)
    branch_numbers: list[int] = field(default_factory=list)
    turn: Turn | None = None
    delta: Sequence[int] = ()
    turn_limit: str = ""
    finish_reason: FinishReason | None = None
    ended_by: str = ""

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Reset the episode to its first observation."""
        self.answered_turns = []
        self.branches = []
        self.branch_numbers = []
        self.turn = None
        self.last_observation = self.first_observation
        self.delta = self.request.prompt_ids

    @property
    def branch(self) -> int:
        """Number of the branch that the next turn belongs to."""
        if isinstance(self.last_observation, ChatCall):
            return self.last_observation.branch
        return 0

    @property
    def length(self) -> int:
        """Number of tokens of all branches."""
        return sum(branch.length for branch in self.branches)


@dataclass
class Episodes:
    """Plays the episodes of a rank; ``play`` is the function of a ``GenerationJob``.

    ``reader`` reads the text of turns; None: a turn has only the text that the engine decoded. ``faults`` counts the
    faults of the environments by their message, and ``unread_calls`` the turns with tool calls that can't be read.
    """

    pool: EnvironmentPool
    template: TurnTemplate
    limits: EpisodeLimits
    reader: ResponseReader | None = None
    faults: Counter[str] = field(default_factory=Counter)
    unread_calls: int = 0
    _taken_faults: Counter[str] = field(default_factory=Counter)
    _taken_calls: int = 0
    _has_warned: bool = False
    _has_warned_of_calls: bool = False

    def take_faults(self) -> Counter[str]:
        """Return the ``faults`` since the last call."""
        # Episodes count their faults in another thread, so read the counter once.
        all_faults = self.faults.copy()
        new_faults = all_faults - self._taken_faults
        self._taken_faults = all_faults
        return new_faults

    def take_unread_calls(self) -> int:
        """Return the number of ``unread_calls`` since the last call."""
        new_count = self.unread_calls - self._taken_calls
        self._taken_calls += new_count
        return new_count

    async def play(
        self,
        problem: Problem,
        request: GenerationRequest,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> Trajectory:
        """Play an episode that begins with ``request`` and return its trajectory.

        If the environment fails, the turns so far are replayed in a new environment, so no sampled token is lost. The
        turns are sampled again only if the new environment's answers differ. If the environment fails more often than
        ``EpisodeLimits.retries``, the trajectory is ``failed`` and has only the prompt.

        ``ask`` sends a request to the engine and returns the response.
        """
        episode = _Episode(request)
        fault_count = 0
        needs_own_process = False
        while True:
            try:
                async with self._opened(alone=needs_own_process) as environment:
                    self._begin(episode, problem, request, await environment.reset(problem))
                    await self._replay(environment, episode)
                    while episode.finish_reason is None:
                        await self._advance(environment, episode, ask)
                return _finished(episode, self._scored_text(episode))
            except EnvironmentFaultError as fault:
                # If the process had several episodes, another episode may be at fault. Then don't count this fault.
                # Play this episode alone in a process: this episode is then the cause of any further fault.
                if fault.is_shared:
                    needs_own_process = True
                else:
                    fault_count += 1
                is_last = fault_count > self.limits.retries
                self._note(problem, fault, is_last=is_last)
                if is_last:
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
        """Begin the episode with a new environment's first observation.

        A text is added to the prompt; a ChatCall replaces the prompt. If the earlier attempt had an equal first
        observation, the episode keeps its turns. Otherwise the turns are removed and sampled again.
        """
        # True for an equal observation in a later attempt, and for an empty text in the first attempt.
        if observation == episode.first_observation:
            return
        prompt_ids: Sequence[int] = problem.prompt_ids
        # An empty text adds nothing to the problem's prompt. A ChatCall counts as true.
        if observation:
            prompt_ids = self._encoded(partial(self.template.opening, problem, observation))
        if not isinstance(observation, ChatCall):
            self._check_length(len(prompt_ids) - len(problem.prompt_ids))
        elif observation.branch:
            raise EnvironmentFaultError(f"reset: branch {observation.branch}, expected 0")
        if len(prompt_ids) >= self.limits.tokens:
            raise EnvironmentFaultError(
                f"reset: a prompt of {len(prompt_ids)} tokens, expected fewer than {self.limits.tokens} "
                "(environment.max_tokens)"
            )
        episode.request = replace(request, prompt_ids=prompt_ids)
        episode.first_observation = observation
        episode.begin()

    def _encoded(self, encode: Callable[[], Encoded]) -> Encoded:
        """Return the tokens of an observation, the result of ``encode``.

        Raises EnvironmentFaultError if the template can't encode the observation.
        """
        try:
            return encode()
        # A template or a tokenizer may raise anything for text from outside.
        except Exception as error:
            error_name = ""
            if not isinstance(error, TurnTemplateError):
                error_name = f"{type(error).__name__}: "
            raise EnvironmentFaultError(
                f"its observation can't be encoded: {error_name}{error}"
            ) from error

    def _check_length(self, tokens: int) -> None:
        """Raise EnvironmentFaultError if an observation of ``tokens`` tokens is too long."""
        if tokens > self.limits.observation_tokens:
            raise EnvironmentFaultError(
                f"an observation of {tokens} tokens, expected at most {self.limits.observation_tokens} "
                "(environment.max_observation_tokens)"
            )

    async def _replay(self, environment: Environment, episode: _Episode) -> None:
        """Replay the episode's turns in a new environment. Raises EnvironmentFaultError if the new answers differ."""
        for turn, earlier_step in episode.answered_turns:
            if await environment.step(turn) != earlier_step:
                log.warning(
                    "an environment gave other answers to the same turns: its episode begins anew"
                )
                episode.begin()
                raise EnvironmentFaultError("the same turns received other answers")

    async def _advance(
        self,
        environment: Environment,
        episode: _Episode,
        ask: Callable[[GenerationRequest], Awaitable[Trajectory]],
    ) -> None:
        """Sample one turn and get the environment's answer.

        If the turn was already sampled before a fault of the environment, it is not sampled again.
        """
        turn = episode.turn
        if turn is None:
            request = self._request(episode)
            response = await ask(request)
            branches = episode.branches
            number = episode.branch
            begins_branch = number == len(branches)
            if begins_branch:
                branches.append(response)
            else:
                branches[number] = join(branches[number], response)
            episode.branch_numbers.append(number)
            turn_ids = tuple(response.response_ids.tolist())
            prompt_length = len(response.prompt_ids)
            text = TurnText.plain(response.text)
            if self.reader is not None:
                text = self.reader.read(response, request.sampling.stop)
            turn = Turn(
                text.text,
                turn_ids,
                response.truncated,
                prompt_length,
                text.special_text,
                text.open_thought,
                text.answer,
            )
            episode.turn = turn
        step = await environment.step(turn)
        if step.has_unread_call:
            self._note_unread_call(turn)
        # With ``continues_after_cut``, a turn that was cut off ends the episode only if the environment ends it too.
        if turn.is_truncated and (step.done or not self.limits.continues_after_cut):
            self._end_truncated(episode, turn, is_done=step.done)
        elif step.done:
            episode.finish_reason = "stop"
        else:
            self._prepare_next_turn(episode, step.observation)
        episode.answered_turns.append((turn, step))
        episode.turn = None

    def _end_truncated(self, episode: _Episode, turn: Turn, *, is_done: bool) -> None:
        """End the episode after a turn that was cut off. ``is_done``: whether the environment also ended it."""
        episode.finish_reason = "length"
        number = len(episode.answered_turns) + 1
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

    def _prepare_next_turn(self, episode: _Episode, observation: Observation) -> None:
        """Set the tokens before the next turn. End the episode if no turn or no token remains."""
        limits = self.limits
        episode.last_observation = observation
        replaces_end = False
        if episode.branch > len(episode.branches):
            raise EnvironmentFaultError(
                f"branch {episode.branch}, expected one of the {len(episode.branches)} there are, or the next"
            )
        if isinstance(observation, ChatCall) and observation.branch == len(episode.branches):
            # The call begins a new branch. Its prompt may repeat turns of other branches, so the limit of an
            # observation does not apply.
            delta = self._encoded(partial(self.template.prompt, observation))
        else:
            last_token = episode.branches[episode.branch].token_ids[-1:].tolist()
            after_turn = partial(self.template.after_turn, last_token, observation)
            delta, replaces_end = self._encoded(after_turn)
            self._check_length(len(delta))
        if not delta:
            # The loss mask alone separates two turns: at least one token between them must have False.
            raise EnvironmentFaultError(
                "an observation of no tokens, expected one: nothing would tell two turns apart"
            )
        episode.delta = delta
        # ``answered_turns`` does not contain the present turn yet.
        turn_count = len(episode.answered_turns) + 1
        if turn_count == limits.turns:
            episode.finish_reason = "length"
            episode.ended_by = f"all {limits.turns} turns were used (environment.max_turns)"
        elif episode.length + len(delta) >= limits.tokens:
            episode.finish_reason = "length"
            episode.ended_by = f"no token was left of {limits.tokens} (environment.max_tokens)"
        elif replaces_end:
            branch = episode.branches[episode.branch]
            # Keep the only token of a turn, because the loss mask alone separates two turns.
            if branch.loss_mask[-2]:
                episode.branches[episode.branch] = branch.part(0, branch.length - 1)

    def _request(self, episode: _Episode) -> GenerationRequest:
        """Return the engine's request for the next turn."""
        first_request = episode.request
        observation = episode.last_observation
        used_tokens = episode.length + len(episode.delta)
        limits = {
            "rollout.max_response_tokens": first_request.sampling.max_new_tokens,
            "environment.max_tokens": self.limits.tokens - used_tokens,
        }
        if isinstance(observation, ChatCall) and observation.max_tokens is not None:
            limits["the call's max_tokens"] = observation.max_tokens
        episode.turn_limit = min(limits, key=limits.__getitem__)
        max_tokens = limits[episode.turn_limit]
        number = episode.branch
        seed = first_request.sampling.seed
        if number and seed is not None:
            # The server samples by seed and position. With one seed, branches with equal prompts would get equal turns.
            seed = seed_of(seed, "branch", number)
        sampling = replace(first_request.sampling, max_new_tokens=max_tokens, seed=seed)
        request = replace(first_request, sampling=sampling)
        begins_branch = number == len(episode.branches)
        if begins_branch:
            return replace(request, prompt_ids=episode.delta)
        return request_after(request, episode.branches[number], max_tokens, episode.delta)

    def _scored_text(self, episode: _Episode) -> TurnText:
        """Return the text that the run's rewards score: the last turn's, or the text that the environment gave."""
        turns = [turn for turn, _ in episode.answered_turns]
        _, last_step = episode.answered_turns[-1]
        text = last_step.scored_text
        if text is None:
            return _text_of(turns[-1])
        # An agent may return the text of a turn.
        for turn in reversed(turns):
            if turn.text.strip() == text.strip():
                return _text_of(turn)
        if self.reader is None:
            return TurnText.plain(text)
        return self.reader.plain(text)

    def _note_unread_call(self, turn: Turn) -> None:
        self.unread_calls += 1
        if self._has_warned_of_calls:
            return
        self._has_warned_of_calls = True
        log.warning(
            "a tool call can't be read and stays text: %r; further ones are only counted (environment/unread_calls)",
            turn.text[-_MOST_SHOWN:],
        )

    def _note(self, problem: Problem, fault: EnvironmentFaultError, *, is_last: bool) -> None:
        """Count and log a fault. ``is_last``: whether the episode is given up."""
        self.faults[str(fault)[:300]] += 1
        consequence = "it begins again"
        if is_last:
            consequence = "its sample is replaced"
        log.warning("the environment of problem %d: %s; %s", problem.problem_id, fault, consequence)


def _text_of(turn: Turn) -> TurnText:
    assert turn.special_text is not None
    assert turn.answer is not None
    return TurnText(turn.text, turn.special_text, turn.open_thought, turn.answer)


def _finished(episode: _Episode, scored_text: TurnText) -> Trajectory:
    """Return the trajectory of an episode that has ended."""
    assert episode.finish_reason is not None
    # The trajectory has the turns branch by branch. List their positions in the order of sampling. The sort is stable:
    # within a branch, the turns stay in the order of sampling.
    branch_numbers = episode.branch_numbers
    sampling_positions = sorted(range(len(branch_numbers)), key=branch_numbers.__getitem__)
    turn_rewards: list[float] = []
    for position in sampling_positions:
        _, step = episode.answered_turns[position]
        turn_rewards.append(float(step.reward))
    _, last_step = episode.answered_turns[-1]
    return replace(
        Trajectory.of_branches(episode.branches),
        finish_reason=episode.finish_reason,
        ended_by=episode.ended_by,
        text=scored_text.text,
        scored_text=scored_text,
        turn_rewards=tuple(turn_rewards),
        turn_times=tuple(sampling_positions),
        wants_score=last_step.is_scored,
    )


def _failed(request: GenerationRequest, reason: str) -> Trajectory:
    """Return the trajectory of an episode that is given up: the prompt alone."""
    return Trajectory.of_response(
        request.prompt_ids,
        [],
        problem_id=request.problem_id,
        sample_index=request.sample_index,
        finish_reason="failed",
        reason=reason,
    )
