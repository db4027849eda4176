"""Seals: what made a batch, taken down while it is made, and compared before it is trained on.

A response gets a ``Stamp`` (``data/trajectory.py``) as soon as it is whole: the settings and the seed that it was asked
for with, and a hash of each of its arrays; its reward follows when it is scored. The ``Seal`` of a batch adds what all
its responses share: the hash of the weights of each version that sampled them, the template, the rows of the data.
A batch file carries it. docs/replay.md tells which faults this sees, and which it can't.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import xxhash

from megatron_dppo.algorithms.advantages import group_relative, turn_relative
from megatron_dppo.algorithms.table import AdvantageName
from megatron_dppo.data.trajectory import Outline, Problem, Stamp, Trajectory
from megatron_dppo.system.errors import RunError

SHOWN = 3
"""Faults that an error names."""
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Settings that decide what a token's log-probability is of."""


class SealError(RunError):
    """A batch is not the one that was made, or not made as the run says."""

    @classmethod
    def of(cls, step: int, faults: Sequence[str]) -> Self:
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        return cls(
            f"the batch of step {step} is not what its seal says and was not trained on: "
            f"{'; '.join(faults[:SHOWN])}{more}"
        )


class AlteredWeightsError(RunError):
    """The trainer's weights are not those that its last step made."""


def text_digest(*values: Any) -> str:
    """Hash of JSON-able values: 32 hexadecimal digits."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def row_digest(problem: Problem) -> str:
    """Of a row of the data as the run uses it: prompt, its tokens, answer, and metadata where it has any."""
    metadata = (
        [json.dumps(problem.metadata, sort_keys=True, default=str)] if problem.metadata else []
    )
    return text_digest(problem.prompt, problem.answer, list(problem.prompt_ids), *metadata)


@dataclass(frozen=True)
class Origin:
    """What every batch of a run is made with, as its configuration says.

    ``sampling``: as ``SamplingParams.as_json``, without a seed. ``template``: hash of the chat template and of the form
    around a prompt. ``group_size``: responses to a prompt. ``problems``: of the training set, by id. ``credit``: as
    ``environment.credit``. ``generation_tokens``: the last ones of a prompt, before which an environment may put a
    first observation; None without an environment. ``makes_prompts``: an environment does, in place of the problems'.
    ``advantage``: as ``algorithm.advantage``.
    """

    sampling: Mapping[str, Any]
    template: str
    group_size: int
    problems: Mapping[int, Problem]
    credit: str = "trajectory"
    generation_tokens: int | None = None
    makes_prompts: bool = False
    advantage: AdvantageName = "group-mean"

    def has_prompt(self, t: Trajectory) -> bool:
        """Whether ``t`` answers the prompt of its problem, or that and an environment's first observation, or one that
        an environment made."""
        problem = self.problems.get(t.problem_id)
        if problem is None or self.makes_prompts:
            return problem is not None
        prompt, expected = t.prompt_ids.tolist(), list(problem.prompt_ids)
        shared = len(expected) - (self.generation_tokens or 0)
        continues = self.generation_tokens is not None and len(prompt) > len(expected)
        return prompt[:shared] == expected[:shared] if continues else prompt == expected


@dataclass(frozen=True)
class Seal:
    """What made the batch of ``step``. By position in it: ``stamps``.

    ``weights``: by version, the hash of the trainer's weights: of those that sampled, of those that the batch is
    trained from and, once it was, of those that this made (version ``step``). ``rows``: by problem id.
    """

    step: int
    template: str
    weights: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[int, str] = field(default_factory=dict)
    stamps: Sequence[Stamp] = ()

    def trained(self, digest: str) -> Self:
        """The same once the batch was trained on, which made weights of this hash."""
        return replace(self, weights={**self.weights, self.step: digest})

    def to_text(self) -> str:
        """JSON. Settings that all stamps share stand there once."""
        kinds = list(dict.fromkeys(json.dumps(stamp.sampling) for stamp in self.stamps))
        stamps = [
            [kinds.index(json.dumps(s.sampling)), s.seed, dict(s.digests), s.reward, s.returns]
            for s in self.stamps
        ]
        values = {
            "step": self.step,
            "template": self.template,
            "weights": [[version, digest] for version, digest in self.weights.items()],
            "rows": [[problem, digest] for problem, digest in self.rows.items()],
            "sampling": [json.loads(kind) for kind in kinds],
            "stamps": stamps,
        }
        return json.dumps({**values, "digest": text_digest(values)})

    @classmethod
    def from_text(cls, text: str) -> Self:
        """What ``to_text`` gave. Raises ValueError where it was altered."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
            if digest != text_digest(values):
                raise ValueError("altered: the seal is not that of its hash")
            kinds = values["sampling"]
            return cls(
                step=values["step"],
                template=values["template"],
                weights=dict(values["weights"]),
                rows=dict(values["rows"]),
                stamps=[Stamp(kinds[kind], *others) for kind, *others in values["stamps"]],
            )
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"altered: the seal can't be read: {error!r}") from error


# --- what is compared


def response_faults(t: Trajectory, origin: Origin, versions: Mapping[int, str]) -> Iterator[str]:
    """What is wrong with one response, beside its stamp and the run's ``origin``.

    ``versions``: of the weights that may have sampled it.
    """
    if not origin.has_prompt(t):
        yield f"{t}: its prompt is not that of the problem in data.train, or there is none"
    if t.sampled and not t.version_spans:
        yield f"{t}: weights: nothing says which version sampled it"
    for span in t.version_spans:
        if span.weight_version not in versions:
            yield (
                f"{t}: weights: tokens {span.start} to {span.end - 1} are of version {span.weight_version}, "
                f"expected one of {sorted(versions)}, whose hashes are known"
            )
    if t.stamp is None:
        yield f"{t}: nothing says what made it, expected a stamp"
        return
    digests = t.digests()
    for name, expected in t.stamp.digests.items():
        if digests.get(name) != expected:
            yield f"{t}: {name}: got {digests.get(name, 'none')}, expected {expected}, as sampled"
    if t.stamp.reward is None:
        yield f"{t}: reward: nothing says that it was scored"
    elif t.stamp.reward != t.reward:
        yield f"{t}: reward: got {t.reward:g}, expected {t.stamp.reward:g}, as scored"


def sampling_faults(
    stamps: Sequence[Stamp], expected: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[str]:
    """Settings (``names``; None: all) of responses that are not the ``expected`` ones."""
    for name, value in expected.items():
        if names is not None and name not in names:
            continue
        others = [s.sampling.get(name) for s in stamps if s.sampling.get(name) != value]
        if others:
            yield f"{name}: {len(others)} responses were asked for with {others[0]!r}, expected {value!r}"


def advantage_faults(outlines: Sequence[Outline], origin: Origin) -> Iterator[str]:
    """Advantages that are not those of their group's rewards."""
    rewards = [t.reward for t in outlines]
    expected = group_relative(rewards, origin.group_size, origin.advantage).tolist()
    for t, advantage in zip(outlines, expected, strict=True):
        if t.advantage != advantage:
            yield f"{t}: advantage: got {t.advantage:g}, expected {advantage:g} by its group's rewards"


def credit_faults(trajectories: Sequence[Trajectory], origin: Origin) -> Iterator[str]:
    """Whole groups whose advantages by turn are not those of their returns, or not what the run trains with."""
    for t in trajectories:
        credit = "turn" if "advantages" in t.columns else "trajectory"
        if credit != origin.credit:
            yield f"{t}: credit: got {credit}, expected {origin.credit} (environment.credit)"
            return
    returns = [t.stamp.returns for t in trajectories if t.stamp is not None]
    # Whoever has no stamp was named already.
    if origin.credit == "trajectory" or len(returns) < len(trajectories):
        return
    for t, of_turns in zip(trajectories, returns, strict=True):
        if len(of_turns) != t.turns or of_turns[0] != t.reward:
            yield f"{t}: returns of turns: got {of_turns}, expected {t.turns}, the first {t.reward:g}"
            return
    expected = turn_relative(returns, origin.group_size, origin.advantage)
    for t, by_turn in zip(trajectories, expected, strict=True):
        if not np.array_equal(t.advantages, t.by_token(by_turn)):
            yield f"{t}: advantages: got others than {by_turn}, those of its turns"


def group_faults(outlines: Sequence[Outline], group_size: int) -> Iterator[str]:
    """Groups that are not ``group_size`` different answers to one problem."""
    for start in range(0, len(outlines), group_size):
        group = outlines[start : start + group_size]
        named = [(t.problem_id, t.sample_index) for t in group]
        expected = [(group[0].problem_id, i) for i in range(group_size)]
        if named != expected:
            yield f"group {start // group_size}: got (problem, sample) {named}, expected {expected}"


def seed_faults(seeds: Sequence[int | None]) -> Iterator[str]:
    """Seeds that more than one response of a batch was drawn with."""
    counts = Counter(seed for seed in seeds if seed is not None)
    equal = [seed for seed, count in counts.items() if count > 1]
    if equal:
        drawn = sum(counts[seed] for seed in equal)
        yield f"seed: {drawn} responses were drawn with {len(equal)} seeds, expected one each"


def file_faults(seal: Seal, step: int, origin: Origin) -> Iterator[str]:
    """What is wrong with the seal of a saved batch that is about to be trained on as the batch of ``step``."""
    if seal.step != step:
        yield f"step: it was made for step {seal.step}, expected {step}"
    if seal.template != origin.template:
        yield f"template: got the hash {seal.template}, expected {origin.template}"
    for problem_id, digest in seal.rows.items():
        problem = origin.problems.get(problem_id)
        expected = "none" if problem is None else row_digest(problem)
        if digest != expected:
            yield f"data row {problem_id}: got the hash {digest}, expected {expected}"
    # Lengths and stops bound a response; they change nothing in the meaning of its log-probabilities.
    yield from sampling_faults(seal.stamps, origin.sampling, _DISTRIBUTION)
