"""A problem, and one trajectory of it from the engine's answer to the loss: tokens, which of them train, and columns.

Nothing changes a trajectory in place: its arrays are read-only, and every step of the way makes a
new one of it. S = tokens, N = sampled tokens.

An episode that went on from an edited history has several branches: token sequences of which none sees another. They
lie end to end in one trajectory, which is one response of its group, and are cut where sequences are packed. What a
branch repeats of another is its prompt, so every sampled token has the loss mask True exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from megatron_dppo.data.columns import Column, Form, Rows, declared, digest, read_only, usable_rows

FinishReason = Literal["stop", "length", "aborted", "failed"]
"""``aborted``: the server ended it early, and the rest is still to be asked for; ``failed``: its environment did, and
nothing was sampled that counts. No batch has such trajectories."""

FINISH_REASONS: tuple[FinishReason, ...] = ("stop", "length")
"""In the order of their numbers in batch files."""


@dataclass(frozen=True)
class Problem:
    """One line of a data set, tokenised.

    ``problem_id``: its position in the file (0-based), which names it in trajectories and checkpoints. ``answer``:
    empty where it has none. ``messages``: all that is put to the model, as chat messages; empty: ``prompt`` alone.
    ``metadata``: whatever else the line says of it, for rewards. ``tools``: definitions of functions in its prompt.
    """

    problem_id: int
    prompt: str
    answer: str
    prompt_ids: tuple[int, ...]
    messages: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tools: tuple[Mapping[str, Any], ...] = field(default=(), hash=False)


class VersionSpan(NamedTuple):
    """The sampled tokens ``start <= i < end`` of a trajectory come from ``weight_version``."""

    weight_version: int
    start: int
    end: int


@dataclass(frozen=True)
class Stamp:
    """What made a response, and what it was when it was whole (``data/seal.py``).

    ``sampling``: the engine's settings as they were asked for, without the seed. ``seed``: None where the server drew
    as it liked. ``digests``: as ``Trajectory.digests``. ``reward``: None before it is scored. ``returns``: of its
    turns, where these have advantages of their own (``algorithms.advantages.turn_relative``).
    """

    sampling: Mapping[str, Any]
    seed: int | None
    digests: Mapping[str, str]
    reward: float | None = None
    returns: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        # JSON has lists.
        object.__setattr__(self, "returns", tuple(self.returns))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One sampled answer to a problem, with what the engine said of its tokens.

    ``token_ids`` int32 [S]; ``loss_mask`` bool [S]: the policy sampled the token (a prompt, a tool's output or an
    environment's turn is not). ``columns``: arrays by the names of ``data/columns.py``. ``sample_index``: the
    answer's number in its group. ``text``: of the turn that was sampled last. ``reward`` and ``advantage`` are 0 until
    it is verified. ``stamp``: None where nothing says what made it. ``components``, ``reason``: of the reward, where it
    was scored by this process and says so. ``ended_by``: the limit that cut an episode off, in words. Of the way to it,
    and in no file: ``prompt_tokens`` of all calls that it took, ``cached_tokens`` of these that the engine had in its
    prefix cache; ``turn_rewards`` by an environment, of the turns as they lie; ``turn_times``, the place of each in the
    order in which they were sampled (empty: that they lie in); and whether the run's rewards score ``text`` beside.

    Raises ValueError where shapes or types disagree with each other or with a declaration, where the first token of
    a branch counts as sampled (nothing predicts it), and where the advantage is not finite.
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
    ended_by: str = ""
    turn_rewards: tuple[float, ...] = ()
    turn_times: tuple[int, ...] = ()
    wants_score: bool = True

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
        columns = {n: declared(n).array(v, mask, self) for n, v in self.columns.items()}
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
        """A prompt and one response to it. ``fields``: the others of the record.

        ``problem_id`` and ``sample_index`` are 0 unless they are given.
        """
        tokens = np.concatenate(
            [np.asarray(prompt_ids, np.int32), np.asarray(response_ids, np.int32)]
        )
        mask = np.arange(len(tokens)) >= len(prompt_ids)
        return cls(
            **{"problem_id": 0, "sample_index": 0, **fields}, token_ids=tokens, loss_mask=mask
        )

    @classmethod
    def of_branches(cls, branches: Sequence[Self]) -> Self:
        """One trajectory of ``branches`` end to end, with what is no token and no column of the first. A column that
        one of them lacks is left out."""
        if len(branches) == 1:
            return branches[0]
        parts = [b._with_recorders() for b in branches]
        shared = set.intersection(*(set(p.columns) for p in parts))
        # The last token of a branch is fed to nothing, and its row cut off again.
        columns = {
            name: np.concatenate(
                [
                    np.concatenate([p.columns[name], p.columns[name][-1:]])
                    if declared(name).rows is Rows.INPUT and p is not parts[-1]
                    else p.columns[name]
                    for p in parts
                ]
            )
            for name in shared
        }
        numbers = np.repeat(np.arange(len(parts), dtype=np.uint16), [p.length for p in parts])
        return replace(
            parts[0],
            token_ids=np.concatenate([p.token_ids for p in parts]),
            loss_mask=np.concatenate([p.loss_mask for p in parts]),
            columns={**columns, "branch": numbers[:-1]},
            prompt_tokens=sum(p.prompt_tokens for p in parts),
            cached_tokens=sum(p.cached_tokens for p in parts),
        )

    def _with_recorders(self) -> Self:
        """With a ``routing_version`` where there is a recording: without one the last version of all stands for it."""
        if "routed_experts" not in self.columns or "routing_version" in self.columns:
            return self
        versions = self.column("weight_version")
        return self.with_columns(routing_version=np.repeat(versions[-1:], len(versions)))

    def __str__(self) -> str:
        return f"response {self.sample_index} to problem {self.problem_id}"

    def __reduce__(self) -> tuple[Any, ...]:
        # A read-only view of a mapping can't be pickled; what is unpickled is checked as a new one is.
        return type(self), tuple(
            dict(self.columns) if field.name == "columns" else getattr(self, field.name)
            for field in fields(self)
        )

    # --- what it is

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
        """S of each branch."""
        return tuple(np.diff([*self._branch_starts, self.length]).tolist())

    @property
    def _branch_starts(self) -> list[int]:
        numbers = self.columns.get("branch")
        return [0] if numbers is None else [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist()]

    @property
    def branches(self) -> tuple[Self, ...]:
        """Its branches, each as a trajectory without stamp and rewards of turns; itself where there is one."""
        if "branch" not in self.columns:
            return (self,)
        branches, before = [], 0
        for start, length in zip(self._branch_starts, self.branch_lengths, strict=True):
            tokens = slice(start, start + length)
            after = before + int(np.count_nonzero(self.loss_mask[tokens]))
            rows = {
                Rows.SAMPLED: slice(before, after),
                Rows.INPUT: slice(start, start + length - 1),
            }
            branch = replace(
                self,
                token_ids=self.token_ids[tokens],
                loss_mask=self.loss_mask[tokens],
                columns={
                    n: a[rows[declared(n).rows]] for n, a in self.columns.items() if n != "branch"
                },
                stamp=None,
                turn_rewards=(),
                turn_times=(),
            )
            branches.append(branch)
            before = after
        return tuple(branches)

    @cached_property
    def turns(self) -> int:
        """Runs of sampled tokens: between two of them somebody else wrote."""
        return int(np.count_nonzero(self._turn_starts))

    @property
    def _turn_starts(self) -> np.ndarray:
        return self.loss_mask[1:] & ~self.loss_mask[:-1]

    def by_token(self, by_turn: Sequence[float]) -> np.ndarray:
        """Values of the turns at each of their sampled tokens: float32 [N]. Raises ValueError unless each turn has
        one."""
        if len(by_turn) != self.turns:
            raise ValueError(f"{self}: {len(by_turn)} values of turns, expected {self.turns}")
        turn_numbers = np.cumsum(self._turn_starts)[self.loss_mask[1:]] - 1
        return np.asarray(by_turn, np.float32)[turn_numbers]

    @property
    def advantages(self) -> np.ndarray:
        """A of each sampled token: float32 [N]. Its turn's where turns have their own, else the response's."""
        advantages = self.columns.get("advantages")
        if advantages is None:
            return np.full(self.sampled, self.advantage, np.float32)
        return advantages

    @property
    def advantages_by_turn(self) -> list[float]:
        """A of each turn."""
        return self.advantages[self._turn_starts[self.loss_mask[1:]]].tolist()

    @cached_property
    def has_advantage(self) -> bool:
        """Whether a token has one other than 0."""
        return bool(self.advantages.any())

    @property
    def prompt_ids(self) -> np.ndarray:
        """What precedes the first sampled token; all of it where nothing was sampled."""
        return self.token_ids[: int(np.argmax(self.loss_mask)) if self.sampled else None]

    @property
    def response_ids(self) -> np.ndarray:
        """The sampled tokens: int32 [N]."""
        return self.token_ids[self.loss_mask]

    @cached_property
    def response_digest(self) -> str:
        """The same for responses of the same tokens, and no others."""
        return digest(self.response_ids)

    @property
    def log_prob(self) -> float:
        """log mu of the whole response, nats; 0 where the engine's log-probabilities are not known."""
        return float(self.columns.get("rollout_log_probs", np.zeros(0)).sum(dtype=np.float64))

    @property
    def truncated(self) -> bool:
        """Whether it hit the length limit instead of ending by itself."""
        return self.finish_reason == "length"

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Runs of sampled tokens that the same weights drew; empty where no version is known."""
        versions = self.columns.get("weight_version")
        if versions is None or not len(versions):
            return ()
        starts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist()]
        ends = [*starts[1:], len(versions)]
        return tuple(map(VersionSpan, versions[starts].tolist(), starts, ends))

    @property
    def interruptions(self) -> tuple[int, ...]:
        """Tokens of its branch before each change of version in the middle of a turn; between turns nothing is
        interrupted."""
        sampled = np.flatnonzero(self.loss_mask)
        starts = [int(sampled[span.start]) for span in self.version_spans[1:]]
        return tuple(
            start - max(begin for begin in self._branch_starts if begin <= start)
            for start in starts
            if self.loss_mask[start - 1]
        )

    @cached_property
    def discarded_rows(self) -> int:
        """Rows of a recorded routing that ``usable_rows`` leaves out, whether there is a recording or not."""
        usable = usable_rows(self.loss_mask, self.columns)
        return len(usable) - int(np.count_nonzero(usable))

    def digests(self) -> dict[str, str]:
        """Rows and hash of the prompt, the tokens, the loss mask and each column, by name; and how it ended."""
        arrays = {
            "prompt_ids": self.prompt_ids,
            "token_ids": self.token_ids,
            "loss_mask": self.loss_mask,
            **self.columns,
        }
        hashes = {name: f"{len(array)} rows of {digest(array)}" for name, array in arrays.items()}
        return {**hashes, "finish_reason": self.finish_reason}

    def column(self, name: str) -> np.ndarray:
        """The column's array. Raises ValueError where the trajectory has none."""
        if name not in self.columns:
            raise ValueError(f"{self} has no {name}; it has {sorted(self.columns)}")
        return self.columns[name]

    def check(self, rows: Rows | None = None) -> None:
        """Raise ValueError where a column (None: of any ``rows``) holds what can't be: for data that comes from a file
        or is about to be trained on."""
        for name, array in self.columns.items():
            check = declared(name).check
            if check is not None and rows in (None, declared(name).rows):
                check(array, self.columns, str(self))

    # --- what becomes of it

    def with_columns(self, **columns: Any) -> Self:
        """The same with ``columns`` beside or instead of its own."""
        return replace(self, columns={**self.columns, **columns})

    def without(self, *names: str) -> Self:
        """The same without these columns, whether it has them or not."""
        if self.columns.keys().isdisjoint(names):
            return self
        columns = {name: array for name, array in self.columns.items() if name not in names}
        return replace(self, columns=columns)

    def stamped(self, sampling: Mapping[str, Any], seed: int | None) -> Self:
        """The same with a stamp of what it is now. ``sampling``, ``seed``: that it was drawn with."""
        return replace(self, stamp=Stamp(sampling, seed, self.digests()))

    def scored(self, reward: float, advantage: float, **details: Any) -> Self:
        """The same with what the rewards come to. ``details``: its components and reason."""
        stamp = None if self.stamp is None else replace(self.stamp, reward=reward)
        return replace(self, reward=reward, advantage=advantage, stamp=stamp, **details)

    def credited(self, returns: Sequence[float], by_turn: Sequence[float]) -> Self:
        """The same with an advantage of each turn. ``returns``: what it was made from."""
        stamp = None if self.stamp is None else replace(self.stamp, returns=tuple(returns))
        return replace(self.with_columns(advantages=self.by_token(by_turn)), stamp=stamp)


def forms_of(trajectories: Sequence[Trajectory]) -> dict[str, Form]:
    """Type and trailing shape of each column that a batch has, by name in order.

    Raises ValueError where arrays of one column differ in them, where columns differ in a size that
    both are declared with, or where a complete column is there for some trajectories alone.
    """
    forms: dict[str, Form] = {}
    for name in sorted({name for t in trajectories for name in t.columns}):
        arrays = [t.columns[name] for t in trajectories if name in t.columns]
        check_complete(declared(name), len(arrays), len(trajectories))
        distinct = {Form.of(array) for array in arrays}
        if len(distinct) > 1:
            shown = sorted(f"{form.dtype} {list(form.trailing)}" for form in distinct)
            raise ValueError(f"{name} of different forms in one batch: {', '.join(shown)}")
        (forms[name],) = distinct
    sizes_of(forms)
    return forms


def sizes_of(forms: Mapping[str, Form]) -> dict[str, int]:
    """The trailing sizes by their declared names. Raises ValueError where two columns disagree."""
    sizes: dict[str, int] = {}
    for name, form in forms.items():
        for size, value in zip(declared(name).trailing, form.trailing, strict=True):
            if sizes.setdefault(size, value) != value:
                raise ValueError(f"{name} has {size} {value}, another column {sizes[size]}")
    return sizes


def check_complete(column: Column, present: int, trajectories: int) -> None:
    """Raise ValueError unless as many of ``trajectories`` have the column as its declaration allows."""
    if column.complete and present not in (0, trajectories):
        raise ValueError(
            f"{column.name}: {trajectories - present} of {trajectories} trajectories have none, "
            "expected all or none of them"
        )


# --- what every rank knows of a trajectory


class Outline(NamedTuple):
    """The properties of the Trajectory of the same names: enough to plan a step, none of its tokens.

    ``length``: S; ``sampled``: N.
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
        """Whether it hit the length limit instead of ending by itself."""
        return self.finish_reason == "length"

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Self:
        """Of an outline that was JSON on its way: a list, as its last fields are."""
        *others, lengths, interruptions, spans = row
        version_spans = tuple(VersionSpan(*span) for span in spans)
        return cls._make([*others, tuple(lengths), tuple(interruptions), version_spans])


TrajectoryFacts = Outline | Trajectory
"""What a plan and the figures of a batch are made from."""


def row_count(column: Column, trajectory: TrajectoryFacts) -> int:
    return trajectory.sampled if column.rows is Rows.SAMPLED else trajectory.length - 1
