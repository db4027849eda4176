"""A problem, and a trajectory: one response to it, with tokens, loss mask and columns, from the engine to the loss.

A trajectory is never changed in place: its arrays are read-only, and every change makes a new trajectory. S = tokens,
N = sampled tokens.

An episode that continued from an edited history has several branches: token sequences that do not attend to each other.
One trajectory has all branches of the episode end to end, and counts as one response of its group. Packing makes each
branch a separate sequence. Tokens that a branch repeats from another branch count as its prompt, so the loss mask is
True exactly once for every sampled token.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from megatron_dppo.data.columns import (
    Column,
    Form,
    Rows,
    declared_column,
    digest,
    read_only,
    usable_rows,
)
from megatron_dppo.data.thoughts import TurnText

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""``aborted``: the server ended the response early, and the fleet will request the rest. ``failed``: the environment
failed, and the trajectory is not used. No batch has trajectories with either reason."""

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
"""The reasons of finished responses. Batch files store a reason's index in this tuple."""


@dataclass(frozen=True)
class Problem:
    """A data row, tokenised.

    Attributes:
        problem_id: Position in the data (from 0). It identifies the problem in trajectories and checkpoints.
        prompt: Text of the problem.
        answer: The answer; empty if the row has no answer.
        prompt_ids: Token ids of the whole prompt.
        messages: The whole prompt as chat messages; empty if the whole prompt is the text ``prompt``.
        metadata: The row's metadata, for rewards.
        tools: Definitions of functions in the prompt.
    """

    problem_id: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)


class VersionSpan(NamedTuple):
    """The weights ``weight_version`` sampled the tokens ``start <= i < end``, counted among the sampled tokens."""

    weight_version: int
    start: int
    end: int


@dataclass(frozen=True)
class Stamp:
    """The origin of a response, and its hashes at the moment when it was complete (``data/seal.py``).

    Attributes:
        sampling: The requested sampling settings, without the seed.
        seed: The requested seed; None without one.
        digests: The result of ``Trajectory.digests``.
        reward: The reward; None before the response is scored.
        returns: The returns of the response's turns, if turns have separate advantages
            (``algorithms.advantages.turn_relative``).
    """

    sampling: Mapping[str, Any]
    seed: int | None
    digests: Mapping[str, str]
    reward: float | None = None
    returns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # A stamp that was read from JSON has a list.
        object.__setattr__(self, "returns", tuple(self.returns))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One response to a problem, with the columns of its tokens.

    Batch files store the attributes from ``problem_id`` to ``stamp``, except ``text``.

    Attributes:
        problem_id: The problem's id.
        sample_index: The response's number in its group.
        token_ids: int32 [S].
        loss_mask: Bool [S]: whether the policy sampled the token. False for prompts and an environment's observations.
        columns: Arrays by the names of ``data/columns.py``.
        finish_reason: Why the response ended.
        text: Text of the last sampled turn.
        reward: The reward; 0 until the response is scored.
        advantage: The advantage; 0 until the response is scored.
        stamp: The origin; None if it is unknown.
        components: Components of the reward, if this process scored the response.
        reason: The reward's reason, if this process scored the response.
        prompt_tokens: Number of prompt tokens of all engine calls for this response.
        cached_tokens: Number of these tokens that were in the engine's prefix cache.
        verify_steps: Number of steps of the engine that verified drafted tokens for this response; 0 without
            speculation.
        ended_by: The limit that cut an episode off, in words.
        turn_rewards: An environment's rewards of the turns, in the order of the tokens.
        turn_times: The position of each turn in the order of sampling. If it is empty, the turns were sampled in the
            order of the tokens.
        wants_score: Whether the run's rewards score ``text``, in addition to an environment's rewards.
        scored_text: The text that the run's rewards score, if this process played the episode; None: the whole
            response.

    Raises:
        ValueError: Shapes or types disagree with each other or with a declaration; the first token of a branch is
            marked as sampled, although no token before it could predict it; or the advantage is not finite.
    """

    problem_id: int
    sample_index: int
    token_ids: np.ndarray
    loss_mask: np.ndarray
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    text: str = ""
    reward: float = 0.0
    advantage: float = 0.0
    stamp: Stamp | None = None
    components: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    verify_steps: int = 0
    ended_by: str = ""
    turn_rewards: tuple[float, ...] = ()
    turn_times: tuple[int, ...] = ()
    wants_score: bool = True
    scored_text: TurnText | None = None

    def __post_init__(self) -> None:
        tokens = read_only(np.asarray(self.token_ids, np.int32))
        mask = read_only(np.asarray(self.loss_mask, np.bool_))
        if tokens.ndim != 1 or tokens.shape != mask.shape:
            raise ValueError(
                f"{self}: token_ids {tokens.shape} and loss_mask {mask.shape}, expected one [S]"
            )
        if not len(tokens) or mask[0]:
            raise ValueError(f"{self}: the prompt is empty, expected at least one token")
        if not math.isfinite(self.advantage):
            raise ValueError(f"{self}: advantage {self.advantage}, expected a finite number")
        columns: dict[str, np.ndarray] = {}
        for name, values in self.columns.items():
            columns[name] = declared_column(name).array(values, mask, self)
        object.__setattr__(self, "token_ids", tokens)
        object.__setattr__(self, "loss_mask", mask)
        object.__setattr__(self, "columns", MappingProxyType(columns))
        if mask[self._branch_starts].any():
            raise ValueError(f"{self}: a branch begins with a sampled token, expected its prompt")

    @classmethod
    def of_response(
        cls,
        prompt_ids: Sequence[int] | np.ndarray,
        response_ids: Sequence[int] | np.ndarray,
        **fields: Any,
    ) -> Self:
        """Build the trajectory of a prompt and one response.

        ``fields`` are its other attributes; ``problem_id`` and ``sample_index`` default to 0.
        """
        fields.setdefault("problem_id", 0)
        fields.setdefault("sample_index", 0)
        tokens = np.concatenate(
            [np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)]
        )
        mask = np.arange(len(tokens)) >= len(prompt_ids)
        return cls(**fields, token_ids=tokens, loss_mask=mask)

    @classmethod
    def of_branches(cls, branches: Sequence[Self]) -> Self:
        """Join ``branches`` end to end.

        A column that a branch lacks is left out. The numbers of prompt tokens, cached tokens and verify steps are added
        up; all other attributes come from the first branch.
        """
        if len(branches) == 1:
            return branches[0]
        parts = [branch._with_routing_version() for branch in branches]
        common_names = set(parts[0].columns)
        for part in parts:
            common_names &= set(part.columns)
        columns: dict[str, np.ndarray] = {}
        for name in common_names:
            has_input_rows = declared_column(name).rows is Rows.INPUT
            arrays = []
            for part in parts:
                arrays.append(part.columns[name])
                # The last token of a branch has no row in columns of the input, but the joined column needs a row.
                # Repeat the row before as a filler. ``branches`` removes this filler again.
                if has_input_rows and part is not parts[-1]:
                    arrays.append(part.columns[name][-1:])
            columns[name] = np.concatenate(arrays)
        branch_numbers = np.arange(len(parts), dtype=np.uint16)
        branch_of_token = np.repeat(branch_numbers, [part.length for part in parts])
        # ``branch`` is a column of the input: the last token has no row.
        columns["branch"] = branch_of_token[:-1]
        return replace(
            parts[0],
            token_ids=np.concatenate([p.token_ids for p in parts]),
            loss_mask=np.concatenate([p.loss_mask for p in parts]),
            columns=columns,
            prompt_tokens=sum(p.prompt_tokens for p in parts),
            cached_tokens=sum(p.cached_tokens for p in parts),
            verify_steps=sum(p.verify_steps for p in parts),
        )

    def _with_routing_version(self) -> Self:
        """A copy with an explicit column ``routing_version``, if the trajectory has recorded routing.

        Without the column, the last version of the joined trajectory would count for all rows. This version may belong
        to another branch.
        """
        if "routed_experts" not in self.columns or "routing_version" in self.columns:
            return self
        versions = self.column("weight_version")
        return self.with_columns(routing_version=np.repeat(versions[-1:], len(versions)))

    def __str__(self) -> str:
        return f"response {self.sample_index} to problem {self.problem_id}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a mapping cannot be pickled. Unpickling calls the constructor, so it validates again.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["columns"] = dict(self.columns)
        return type(self), tuple(values.values())

    @property
    def length(self) -> int:
        """S."""
        return len(self.token_ids)

    @cached_property
    def sampled(self) -> int:
        """N."""
        return int(np.count_nonzero(self.loss_mask))

    @cached_property
    def branch_lengths(self) -> tuple[int, ...]:
        """Number of tokens of each branch."""
        return tuple(np.diff([*self._branch_starts, self.length]).tolist())

    @property
    def _branch_starts(self) -> list[int]:
        numbers = self.columns.get("branch")
        if numbers is None:
            return [0]
        return [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]

    @property
    def branches(self) -> tuple[Self, ...]:
        """The branches, each as a trajectory without stamp and rewards of turns.

        If there is one branch, it is the trajectory itself.
        """
        if "branch" not in self.columns:
            return (self,)
        whole = replace(self.without("branch"), stamp=None, turn_rewards=(), turn_times=())
        ends = np.cumsum(self.branch_lengths).tolist()
        return tuple(whole.part(*bounds) for bounds in zip(self._branch_starts, ends, strict=True))

    def part(self, start: int, end: int) -> Self:
        """Return the trajectory of the tokens from ``start`` to before ``end``, with their rows."""
        first_sampled = int(np.count_nonzero(self.loss_mask[:start]))
        mask = self.loss_mask[start:end]
        rows = {
            Rows.SAMPLED: slice(first_sampled, first_sampled + int(np.count_nonzero(mask))),
            # The last token is never an input, so it has no row in columns of inputs.
            Rows.INPUT: slice(start, end - 1),
        }
        columns: dict[str, np.ndarray] = {}
        for name, array in self.columns.items():
            columns[name] = array[rows[declared_column(name).rows]]
        return replace(self, token_ids=self.token_ids[start:end], loss_mask=mask, columns=columns)

    @cached_property
    def turns(self) -> int:
        """Number of turns: runs of sampled tokens, with tokens of an environment between them."""
        return int(np.count_nonzero(self._turn_starts))

    @property
    def _turn_starts(self) -> np.ndarray:
        """Whether each token but the first is the first sampled token of a turn: bool [S - 1]."""
        return self.loss_mask[1:] & ~self.loss_mask[:-1]

    def by_token(self, by_turn: Sequence[float]) -> np.ndarray:
        """Repeat each turn's value for its sampled tokens: float32 [N].

        Raises ValueError unless ``by_turn`` has a value for each turn.
        """
        if len(by_turn) != self.turns:
            raise ValueError(f"{self}: {len(by_turn)} values of turns, expected {self.turns}")
        turn_of_sampled = np.cumsum(self._turn_starts)[self.loss_mask[1:]] - 1
        return np.asarray(by_turn, np.float32)[turn_of_sampled]

    @property
    def advantages(self) -> np.ndarray:
        """A of each sampled token: float32 [N].

        It is the advantage of the token's turn if turns have separate advantages, else the advantage of the response.
        A trajectory that was read with ``LOSS_COLUMNS`` of a run with a teacher has the advantages of the loss.
        """
        advantages = self.columns.get("loss_advantages", self.columns.get("advantages"))
        if advantages is None:
            return np.full(self.sampled, self.advantage, np.float32)
        return advantages

    @property
    def advantages_by_turn(self) -> list[float]:
        """A of each turn."""
        is_first_of_turn = self._turn_starts[self.loss_mask[1:]]
        return self.advantages[is_first_of_turn].tolist()

    @cached_property
    def has_advantage(self) -> bool:
        """Whether a token has an advantage other than 0."""
        return bool(self.advantages.any())

    @property
    def prompt_ids(self) -> np.ndarray:
        """The tokens before the first sampled token; all tokens if none was sampled."""
        if not self.sampled:
            return self.token_ids
        first_sampled = int(np.argmax(self.loss_mask))
        return self.token_ids[:first_sampled]

    @property
    def response_ids(self) -> np.ndarray:
        """The sampled tokens: int32 [N]."""
        return self.token_ids[self.loss_mask]

    @cached_property
    def response_digest(self) -> str:
        """A hash of the sampled tokens."""
        return digest(self.response_ids)

    @property
    def log_prob(self) -> float:
        """log mu of the whole response, nats; 0 without the engine's log-probabilities."""
        return float(self.columns.get("rollout_log_probs", np.zeros(0)).sum(dtype=np.float64))

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the length limit."""
        return self.finish_reason == "length"

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Runs of sampled tokens that the same weights sampled; empty if the versions are unknown."""
        versions = self.columns.get("weight_version")
        if versions is None or not len(versions):
            return ()
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
        ends = [*starts[1:], len(versions)]
        return tuple(map(VersionSpan, versions[starts].tolist(), starts, ends))

    @property
    def interruptions(self) -> tuple[int, ...]:
        """For each weight update in the middle of a turn, the number of earlier tokens in the branch.

        The engine prefills these tokens again. An update between turns interrupts nothing.
        """
        sampled_positions = np.flatnonzero(self.loss_mask)
        token_counts = []
        for span in self.version_spans[1:]:
            position = int(sampled_positions[span.start])
            is_within_turn = self.loss_mask[position - 1]
            if is_within_turn:
                earlier_starts = [start for start in self._branch_starts if start <= position]
                token_counts.append(position - max(earlier_starts))
        return tuple(token_counts)

    @cached_property
    def discarded_rows(self) -> int:
        """The number of rows that ``usable_rows`` excludes, also for a trajectory without recorded routing."""
        usable = usable_rows(self.loss_mask, self.columns)
        return len(usable) - int(np.count_nonzero(usable))

    def digests(self) -> dict[str, str]:
        """The contents of the trajectory as name -> text.

        Prompt, tokens, loss mask and each column are arrays: the text of an array is its number of rows and its hash.
        The text of ``finish_reason`` is the reason.
        """
        arrays = {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            **self.columns,
        }
        digests: dict[str, str] = {}
        for name, array in arrays.items():
            digests[name] = f"{len(array)} rows of {digest(array)}"
        digests["finish_reason"] = self.finish_reason
        return digests

    def column(self, name: str) -> np.ndarray:
        """The column's array. Raises ValueError if the trajectory has none."""
        if name not in self.columns:
            raise ValueError(f"{self} has no {name}; it has {sorted(self.columns)}")
        return self.columns[name]

    def check(self, rows: Rows | None = None) -> None:
        """Raise ValueError if a column has invalid values. Call it for data from a file, and before training.

        ``rows`` selects the columns with these rows; None: all columns.
        """
        for name, array in self.columns.items():
            column = declared_column(name)
            if column.check is not None and rows in (None, column.rows):
                column.check(array, self.columns, str(self))

    def with_columns(self, **columns: Any) -> Self:
        """A copy with ``columns`` added or replaced."""
        return replace(self, columns={**self.columns, **columns})

    def extended(self, **columns: Any) -> Self:
        """A copy with ``columns`` added that belong to the response's origin, so the stamp has their digests too."""
        copy = self.with_columns(**columns)
        if self.stamp is None:
            return copy
        return replace(copy, stamp=replace(self.stamp, digests=copy.digests()))

    def without(self, *names: str) -> Self:
        """A copy without these columns, or the trajectory itself if it has none of them."""
        if self.columns.keys().isdisjoint(names):
            return self
        columns = {name: array for name, array in self.columns.items() if name not in names}
        return replace(self, columns=columns)

    def stamped(self, sampling: Mapping[str, Any], seed: int | None) -> Self:
        """A copy with a stamp of its present state. ``sampling`` and ``seed`` are the settings of the request."""
        return replace(self, stamp=Stamp(sampling, seed, self.digests()))

    def scored(self, reward: float, advantage: float, **details: Any) -> Self:
        """A copy with a reward and an advantage. ``details`` are the components and the reason."""
        stamp = None
        if self.stamp is not None:
            stamp = replace(self.stamp, reward=reward)
        return replace(self, reward=reward, advantage=advantage, stamp=stamp, **details)

    def credited(self, returns: Sequence[float], by_turn: Sequence[float]) -> Self:
        """A copy with an advantage for each turn, computed from ``returns``."""
        stamp = None
        if self.stamp is not None:
            stamp = replace(self.stamp, returns=tuple(returns))
        return replace(self.with_columns(advantages=self.by_token(by_turn)), stamp=stamp)


def forms_of(trajectories: Sequence[Trajectory]) -> dict[str, Form]:
    """Type and trailing shape of each column of a batch, sorted by name.

    Raises ValueError if arrays of one column differ in type or trailing shape, if two columns differ in a size that
    both declare, or if only some trajectories have a complete column.
    """
    names: set[str] = set()
    for t in trajectories:
        names |= t.columns.keys()
    forms: dict[str, Form] = {}
    for name in sorted(names):
        arrays = [t.columns[name] for t in trajectories if name in t.columns]
        check_complete(declared_column(name), len(arrays), len(trajectories))
        array_forms = {Form.of(array) for array in arrays}
        if len(array_forms) > 1:
            texts = sorted(f"{form.dtype} {list(form.trailing)}" for form in array_forms)
            raise ValueError(f"{name} of different forms in one batch: {', '.join(texts)}")
        (forms[name],) = array_forms
    sizes_of(forms)
    return forms


def sizes_of(forms: Mapping[str, Form]) -> dict[str, int]:
    """The trailing sizes by their declared names. Raises ValueError if two columns differ in a size."""
    sizes: dict[str, int] = {}
    for name, form in forms.items():
        for size, value in zip(declared_column(name).trailing, form.trailing, strict=True):
            if sizes.setdefault(size, value) != value:
                raise ValueError(f"{name} has {size} {value}, another column {sizes[size]}")
    return sizes


def check_complete(column: Column, present: int, trajectories: int) -> None:
    """Raise ValueError if the column is complete, and only ``present`` of the ``trajectories`` have it."""
    if column.complete and present not in (0, trajectories):
        raise ValueError(
            f"{column.name}: {trajectories - present} of {trajectories} trajectories have none, "
            "expected all or none of them"
        )


class Outline(NamedTuple):
    """A summary of a trajectory that every rank has: enough to plan a step, without tokens.

    The fields are properties of Trajectory with the same names.
    """

    problem_id: int
    sample_index: int
    length: int
    sampled: int
    finish_reason: FinishReason
    reward: float
    advantage: float
    has_advantage: bool
    discarded_rows: int
    response_digest: str
    log_prob: float
    turns: int
    prompt_tokens: int
    cached_tokens: int
    verify_steps: int
    branch_lengths: tuple[int, ...]
    interruptions: tuple[int, ...]
    version_spans: tuple[VersionSpan, ...]

    @classmethod
    def of(cls, t: Trajectory) -> Self:
        return cls._make(getattr(t, name) for name in cls._fields)

    def __str__(self) -> str:
        return f"response {self.sample_index} to problem {self.problem_id}"

    @property
    def truncated(self) -> bool:
        """Whether the response was cut at the length limit."""
        return self.finish_reason == "length"

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Build an outline from its JSON. JSON has lists where the outline has tuples."""
        *plain_values, branch_lengths, interruptions, spans = row
        version_spans = tuple(VersionSpan(*span) for span in spans)
        return cls._make(
            [*plain_values, tuple(branch_lengths), tuple(interruptions), version_spans]
        )


TrajectoryFacts = Outline | Trajectory
"""An outline or a trajectory. Both have the properties that a batch's plan and figures are computed from."""


def sampled_versions(trajectories: Iterable[TrajectoryFacts]) -> set[int]:
    """Return the weight versions that sampled tokens of ``trajectories``."""
    versions: set[int] = set()
    for trajectory in trajectories:
        versions.update(span.weight_version for span in trajectory.version_spans)
    return versions


def row_count(column: Column, trajectory: TrajectoryFacts) -> int:
    """The number of rows that the trajectory has in ``column``."""
    if column.rows is Rows.SAMPLED:
        return trajectory.sampled
    return trajectory.length - 1
