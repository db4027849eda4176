"""Seals: records of a batch's origin, written while the batch is made and compared before training on it.

A response gets a ``Stamp`` (``data/trajectory.py``) as soon as it is complete. The stamp has the requested settings and
seed, and a hash of each array of the response. The reward is added to the stamp when the response is scored. The
``Seal`` of a batch has the stamps, and hashes of the weights, of the chat template and of the data rows. Batch files
contain the seal. docs/replay.md lists the errors that a seal detects, and the errors that it cannot detect.
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
from megatron_dppo.system.text import first_of

SHOWN = 3
"""Number of faults that an error message lists."""
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Sampling settings that change the distribution that a token is drawn from."""


class SealError(RunError):
    """A batch was altered, or was not made with the run's settings."""

    @classmethod
    def of(cls, step: int, faults: Sequence[str]) -> Self:
        return cls(
            f"the batch of step {step} is not what its seal says and was not trained on: "
            f"{first_of(faults, SHOWN)}"
        )


def text_digest(*values: Any) -> str:
    """Hash values that JSON can represent: 32 hexadecimal digits."""
    return xxhash.xxh3_128(json.dumps(values, sort_keys=True).encode()).hexdigest()


def row_digest(problem: Problem) -> str:
    """Hash a data row as the run uses it: prompt, its tokens, answer, and metadata if it has any."""
    metadata = []
    if problem.metadata:
        metadata = [json.dumps(problem.metadata, sort_keys=True, default=str)]
    return text_digest(problem.prompt, problem.answer, list(problem.prompt_ids), *metadata)


@dataclass(frozen=True)
class Origin:
    """The settings of a run that are equal for all its batches.

    Attributes:
        sampling: The result of ``SamplingParams.as_json``, without a seed.
        template: Hash of the chat template and of the form of prompts.
        group_size: Number of responses to a prompt.
        problems: The training set, by problem id.
        credit: ``environment.credit``.
        generation_tokens: Number of tokens of the generation prompt, the end of a prompt. An environment may insert a
            first observation before these tokens. None without an environment.
        makes_prompts: Whether an environment makes the prompts instead of the data set.
        advantage: ``algorithm.advantage``.
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
        """Whether the prompt of ``t`` is its problem's prompt, perhaps with an environment's first observation.

        If an environment makes the prompts, the result is True for every prompt of a known problem.
        """
        problem = self.problems.get(t.problem_id)
        if problem is None:
            return False
        if self.makes_prompts:
            return True
        prompt_ids = t.prompt_ids.tolist()
        expected_ids = list(problem.prompt_ids)
        if self.generation_tokens is None or len(prompt_ids) <= len(expected_ids):
            return prompt_ids == expected_ids
        # The observation is before the generation prompt: compare the tokens before both.
        prefix = len(expected_ids) - self.generation_tokens
        return prompt_ids[:prefix] == expected_ids[:prefix]


@dataclass(frozen=True)
class Seal:
    """The origin of the batch of ``step``.

    Attributes:
        step: The step.
        template: Hash of the chat template and of the form of prompts.
        weights: Weight version -> hash of the trainer's weights. The mapping has the versions that sampled the batch,
            and the version before the step. ``trained`` adds the version that the step made; its number is ``step``.
        rows: Problem id -> hash of its data row.
        stamps: Stamps of the responses, by position in the batch.
    """

    step: int
    template: str
    weights: Mapping[int, str] = field(default_factory=dict)
    rows: Mapping[int, str] = field(default_factory=dict)
    stamps: Sequence[Stamp] = ()

    def trained(self, digest: str) -> Self:
        """A copy that also has ``digest``, the hash of the weights after training on the batch."""
        return replace(self, weights={**self.weights, self.step: digest})

    def to_text(self) -> str:
        """Convert to JSON. A list has each of the different sampling settings once. Each stamp has the index of its
        settings in this list.
        """
        settings: list[dict[str, Any]] = []
        index_of: dict[str, int] = {}
        stamps: list[list[Any]] = []
        for stamp in self.stamps:
            sampling_json = json.dumps(stamp.sampling)
            if sampling_json not in index_of:
                index_of[sampling_json] = len(settings)
                settings.append(json.loads(sampling_json))
            index = index_of[sampling_json]
            digests = dict(stamp.digests)
            stamps.append([index, stamp.seed, digests, stamp.reward, stamp.returns])
        values = {
            "step": self.step,
            "template": self.template,
            # JSON has no integer keys: store pairs.
            "weights": list(map(list, self.weights.items())),
            "rows": list(map(list, self.rows.items())),
            "sampling": settings,
            "stamps": stamps,
        }
        return json.dumps({**values, "digest": text_digest(values)})

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the result of ``to_text``. Raises ValueError if it was altered."""
        try:
            values = json.loads(text)
            digest = values.pop("digest")
            if digest != text_digest(values):
                raise ValueError("altered: the seal does not have the recorded hash")
            settings = values["sampling"]
            stamps: list[Stamp] = []
            for index, *stamp_fields in values["stamps"]:
                stamps.append(Stamp(settings[index], *stamp_fields))
            return cls(
                step=values["step"],
                template=values["template"],
                weights=dict(values["weights"]),
                rows=dict(values["rows"]),
                stamps=stamps,
            )
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"altered: the seal can't be read: {error!r}") from error


def response_faults(t: Trajectory, origin: Origin, versions: Mapping[int, str]) -> Iterator[str]:
    """Compare one response with its stamp and the run's ``origin``, and yield the differences.

    ``versions`` has the hashes of the weights that may have sampled the response, by version.
    """
    if not origin.has_prompt(t):
        yield f"{t}: its prompt is not the prompt of the problem in data.train, or data.train has no such problem"
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
    for name, digest in t.stamp.digests.items():
        if digests.get(name) != digest:
            yield f"{t}: {name}: got {digests.get(name, 'none')}, expected {digest}, as sampled"
    if t.stamp.reward is None:
        yield f"{t}: reward: nothing says that it was scored"
    elif t.stamp.reward != t.reward:
        yield f"{t}: reward: got {t.reward:g}, expected {t.stamp.reward:g}, as scored"


def sampling_faults(
    stamps: Sequence[Stamp], settings: Mapping[str, Any], names: Sequence[str] | None = None
) -> Iterator[str]:
    """Compare the sampling settings of responses with the expected ``settings``, and yield the differences.

    ``names``: the settings to compare; None: all.
    """
    for name, expected_value in settings.items():
        if names is not None and name not in names:
            continue
        wrong_values: list[Any] = []
        for stamp in stamps:
            value = stamp.sampling.get(name)
            if value != expected_value:
                wrong_values.append(value)
        if wrong_values:
            yield (
                f"{name}: {len(wrong_values)} responses were asked for with {wrong_values[0]!r}, expected "
                f"{expected_value!r}"
            )


def advantage_faults(outlines: Sequence[Outline], origin: Origin) -> Iterator[str]:
    """Yield the advantages that differ from the advantages computed from the rewards of their group."""
    rewards = [t.reward for t in outlines]
    expected_advantages = group_relative(rewards, origin.group_size, origin.advantage).tolist()
    for t, advantage in zip(outlines, expected_advantages, strict=True):
        if t.advantage != advantage:
            yield f"{t}: advantage: got {t.advantage:g}, expected {advantage:g} by its group's rewards"


def credit_faults(trajectories: Sequence[Trajectory], origin: Origin) -> Iterator[str]:
    """Yield errors in the advantages of turns. ``trajectories``: whole groups.

    The errors are: another kind of credit than ``origin.credit``, returns that do not fit the turns and the reward, and
    advantages that differ from the advantages computed from the returns.
    """
    for t in trajectories:
        credit = "trajectory"
        if "advantages" in t.columns:
            credit = "turn"
        if credit != origin.credit:
            yield f"{t}: credit: got {credit}, expected {origin.credit} (environment.credit)"
            return
    returns = [t.stamp.returns for t in trajectories if t.stamp is not None]
    # ``response_faults`` reports responses without a stamp.
    if origin.credit == "trajectory" or len(returns) < len(trajectories):
        return
    for t, turn_returns in zip(trajectories, returns, strict=True):
        if len(turn_returns) != t.turns or turn_returns[0] != t.reward:
            yield (
                f"{t}: returns of turns: got {turn_returns}, expected {t.turns} values, and the first equal to the "
                f"reward {t.reward:g}"
            )
            return
    expected_advantages = turn_relative(returns, origin.group_size, origin.advantage)
    for t, turn_advantages in zip(trajectories, expected_advantages, strict=True):
        if not np.array_equal(t.advantages, t.by_token(turn_advantages)):
            yield f"{t}: advantages: they differ from its turns' advantages {turn_advantages}"


def group_faults(outlines: Sequence[Outline], group_size: int) -> Iterator[str]:
    """Yield the groups that are not ``group_size`` different responses to one problem."""
    for start in range(0, len(outlines), group_size):
        group = outlines[start : start + group_size]
        pairs = [(t.problem_id, t.sample_index) for t in group]
        expected_pairs = [(group[0].problem_id, i) for i in range(group_size)]
        if pairs != expected_pairs:
            yield f"group {start // group_size}: got (problem, sample) {pairs}, expected {expected_pairs}"


def seed_faults(seeds: Sequence[int | None]) -> Iterator[str]:
    """Yield an error if two responses of a batch have the same seed."""
    counts = Counter(seed for seed in seeds if seed is not None)
    repeated_seeds = [seed for seed, count in counts.items() if count > 1]
    if repeated_seeds:
        count = sum(counts[seed] for seed in repeated_seeds)
        yield f"seed: {count} responses were drawn with {len(repeated_seeds)} seeds, expected one each"


def file_faults(seal: Seal, step: int, origin: Origin) -> Iterator[str]:
    """Yield the errors in the seal of a saved batch that is to be trained on as the batch of ``step``."""
    if seal.step != step:
        yield f"step: it was made for step {seal.step}, expected {step}"
    if seal.template != origin.template:
        yield f"template: got the hash {seal.template}, expected {origin.template}"
    for problem_id, digest in seal.rows.items():
        problem = origin.problems.get(problem_id)
        expected_digest = "none"
        if problem is not None:
            expected_digest = row_digest(problem)
        if digest != expected_digest:
            yield f"data row {problem_id}: got the hash {digest}, expected {expected_digest}"
    # Limits of length and stop texts do not change the distribution of a token, so they may differ.
    yield from sampling_faults(seal.stamps, origin.sampling, _DISTRIBUTION)
