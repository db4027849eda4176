"""Evaluate checkpoints on the held-out sets of a configuration, without a trainer.

``megatron-dppo evaluate CONFIG.yaml [key.path=value ...] [--checkpoint FOLDER ...]``.

SGLang servers load each checkpoint themselves and generate ``evaluation.samples_per_prompt`` responses to every
problem of ``data.evaluation``. The reward of the configuration scores the responses. The results are a table,
``evaluation.json`` with avg@k, pass@j and cons@k, and ``samples.jsonl`` with every response. ``--alpaca-eval SET`` also
writes the responses to one set in the form that AlpacaEval reads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_dppo.config import ConfigError, TrainConfig, check_config, load_config
from megatron_dppo.config.layout import missing_weights
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.logging import INTERRUPTED, LOGS_FOLDER, aligned, configure_logging, fatal
from megatron_dppo.metrics.records import SAMPLES_FILE
from megatron_dppo.own_fleet import OwnFleet, own_fleet, own_fleet_faults
from megatron_dppo.rewards import find_reward
from megatron_dppo.rewards.notation import plain_notation
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.arguments import finite_number
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.secret_variables import hide_secrets

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Problem, Trajectory
    from megatron_dppo.fleet.generation import GenerationJob
    from megatron_dppo.loop.inputs import RunData
    from megatron_dppo.loop.scorer import Scorer

    Keep = Callable[[str, str, Problem, Trajectory], None]
    """Keeps a response. Arguments: the checkpoint, the name of the set, the problem, and its response."""

REPORT = "evaluation.json"
MODEL_OUTPUTS = "model_outputs_{number}.json"
"""The responses of a checkpoint in AlpacaEval's form; ``number``: its position in the command, from 0."""
PASS_REWARD = 0.5
"""Default of the smallest reward that counts as passed."""


@dataclass(frozen=True)
class SetResult:
    """The result of one checkpoint on one held-out set.

    Attributes:
        rewards: rewards of each problem's responses, by problem.
        truncated: number of responses that hit the length limit.
        mean_tokens: mean number of tokens of a response.
        answers: the final answer of each response, by problem; an empty text for a response without an answer. Empty
            if the reward compares no final answer.
    """

    rewards: Sequence[Sequence[float]]
    truncated: int
    mean_tokens: float
    answers: Sequence[Sequence[str]] = ()

    @property
    def average(self) -> float:
        """The mean reward over all responses (avg@k)."""
        return statistics.fmean(reward for group in self.rewards for reward in group)

    @property
    def standard_error(self) -> float | None:
        """Standard error of avg@k over the problems; None for one problem."""
        if len(self.rewards) < 2:
            return None
        means = [statistics.fmean(group) for group in self.rewards]
        return statistics.stdev(means) / len(means) ** 0.5

    def pass_at(self, tries: int, pass_reward: float) -> float:
        """Estimate pass@tries: the probability that at least one of ``tries`` responses earns ``pass_reward`` or more.

        The unbiased estimator of one problem with n responses, of which c pass, is 1 - C(n - c, tries) / C(n, tries)
        (Chen et al., arXiv 2107.03374, eq. 1). The result is the mean over the problems.
        """
        estimates = []
        for group in self.rewards:
            passed = sum(reward >= pass_reward for reward in group)
            estimates.append(1 - comb(len(group) - passed, tries) / comb(len(group), tries))
        return statistics.fmean(estimates)

    @property
    def consensus(self) -> float | None:
        """The mean reward of the most frequent answer to each problem (cons@k, majority voting).

        Responses without an answer do not vote. Among answers that are equally frequent, the mean counts. A problem
        without any answer has the mean reward of its responses. None if the reward compares no final answer.
        """
        if not self.answers:
            return None
        rewards: list[float] = []
        for answers, group in zip(self.answers, self.rewards, strict=True):
            votes = Counter(answer for answer in answers if answer)
            most_votes = max(votes.values(), default=0)
            winning_rewards: dict[str, list[float]] = {}
            for answer, reward in zip(answers, group, strict=True):
                if votes[answer] == most_votes:
                    winning_rewards.setdefault(answer, []).append(reward)
            rewards.append(statistics.fmean(map(statistics.fmean, winning_rewards.values())))
        return statistics.fmean(rewards)

    def to_json(self, pass_reward: float) -> dict[str, object]:
        size = len(self.rewards[0])
        # 1, 2, 4, ... up to the number of responses.
        tries = [2**i for i in range(size.bit_length())]
        return {
            "problems": len(self.rewards),
            "responses_per_problem": size,
            "average": self.average,
            "standard_error": self.standard_error,
            "pass": {str(j): self.pass_at(j, pass_reward) for j in tries},
            "pass_reward": pass_reward,
            "consensus": self.consensus,
            "truncated": self.truncated,
            "mean_tokens": self.mean_tokens,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate all checkpoints; return the exit code: 0 done, 1 failed, 2 refused, 130 interrupted."""
    options = _parser().parse_intermixed_args(arguments)
    hide_secrets()
    try:
        config = load_config(options.config, options.overrides)
        check_config(config, options.config)
        checkpoints = [str(folder) for folder in options.checkpoint]
        checkpoints = checkpoints or [config.model.hf_checkpoint]
        faults = [
            *own_fleet_faults(config),
            *_faults(config, checkpoints),
            *_judged_set_faults(config, options.alpaca_eval),
        ]
        if faults:
            raise ConfigError(faults, options.config)
        out = Path(options.out or Path(config.run.directory) / "evaluation")
        return _evaluate(config, checkpoints, out, options.pass_reward, options.alpaca_eval)
    except (ConfigError, RunError) as error:
        fatal(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _faults(config: TrainConfig, checkpoints: Sequence[str]) -> Iterator[str]:
    """Yield the reasons why the checkpoints can't be evaluated."""
    if not config.data.evaluation_files:
        yield "data.evaluation: names no held-out set, expected at least one"
    for folder in checkpoints:
        for fault in missing_weights(folder):
            yield (
                f"--checkpoint: {fault}; a Megatron checkpoint is converted by "
                "megatron-dppo convert megatron-to-hf"
            )


def _judged_set_faults(config: TrainConfig, judged_set: str | None) -> Iterator[str]:
    """Yield the reasons why AlpacaEval can't judge the responses to ``judged_set``. None: it judges no set."""
    if judged_set is None:
        return
    if judged_set not in config.data.evaluation_files:
        names = ", ".join(config.data.evaluation_files)
        yield f"--alpaca-eval: got {judged_set}, expected a set of data.evaluation: {names}"
    if config.evaluation.samples_per_prompt != 1:
        yield (
            f"evaluation.samples_per_prompt: got {config.evaluation.samples_per_prompt}, expected 1 with "
            "--alpaca-eval, which judges one answer to each instruction"
        )


def _evaluate(
    config: TrainConfig,
    checkpoints: Sequence[str],
    out: Path,
    pass_reward: float,
    judged_set: str | None,
) -> int:
    from megatron_dppo.loop.inputs import RunData
    from megatron_dppo.loop.sample_maker import SampleMaker
    from megatron_dppo.loop.scorer import Scorer

    out.mkdir(parents=True, exist_ok=True)
    configure_logging(out, None)
    data = RunData(config)
    samples = SampleMaker.of(config, data)
    results: dict[str, dict[str, SetResult]] = {}
    with Scorer.of(config, data) as scorer, open(out / SAMPLES_FILE, "w", encoding="utf-8") as file:
        outputs: dict[str, list[dict[str, str]]] = {checkpoint: [] for checkpoint in checkpoints}

        def keep(checkpoint: str, name: str, problem: Problem, response: Trajectory) -> None:
            sample = samples.of_response(name, problem, response)
            file.write(json.dumps({"checkpoint": checkpoint, **sample.to_json()}) + "\n")
            if name == judged_set:
                output = {"instruction": problem.prompt, "output": response.text}
                outputs[checkpoint].append({**output, "generator": checkpoint})

        for number, checkpoint in enumerate(checkpoints):
            folder = out / LOGS_FOLDER / f"{number}"
            evaluated = _Checkpoint(config, checkpoint, folder, data, scorer, keep)
            results[checkpoint] = evaluated.results()
            _write_report(out / REPORT, results, pass_reward)
            if judged_set is not None:
                path = out / MODEL_OUTPUTS.format(number=number)
                path.write_text(json.dumps(outputs[checkpoint], indent=1) + "\n", encoding="utf-8")
                print(f"{path}: for alpaca_eval --model_outputs")
    print("\n".join(aligned(_rows(results, pass_reward))))
    print(f"every number is in {out / REPORT}, every response in {out / SAMPLES_FILE}")
    return 0


@dataclass(frozen=True)
class _Checkpoint:
    """The evaluation of one checkpoint."""

    config: TrainConfig
    checkpoint: str
    logs: Path
    data: RunData
    scorer: Scorer
    keep: Keep

    def results(self) -> dict[str, SetResult]:
        """Start the servers, evaluate every set, and stop the servers."""
        model = self.config.model.model_copy(update={"hf_checkpoint": self.checkpoint})
        # The servers generate, even if the run replays saved batches.
        rollout = self.config.rollout.model_copy(update={"replay_from": None})
        config = self.config.model_copy(update={"model": model, "rollout": rollout})
        spec = RunSpec.of_checked(config)
        with own_fleet(config, spec, self.data, self.logs, topk=0) as (fleet, template):
            results: dict[str, SetResult] = {}
            for name, problems in self.data.held_out.items():
                results[name] = self._result(fleet, name, template, problems)
            return results

    def _result(
        self, fleet: OwnFleet, name: str, template: GenerationJob, problems: Sequence[Problem]
    ) -> SetResult:
        from megatron_dppo.loop.evaluation import evaluation_job, without_length_penalties

        settings = self.config.evaluation
        job = evaluation_job(
            template, settings, problems, f"evaluation on {name}", range(len(problems))
        )
        description = f"{Path(self.checkpoint).name}: evaluate on {name}"
        unpenalised = without_length_penalties(self.config.algorithm)
        responses = fleet.scored(job, description, self.scorer, unpenalised)
        size = settings.samples_per_prompt
        for number, trajectory in enumerate(responses):
            problem = problems[number // size]
            self.keep(self.checkpoint, name, problem, trajectory)
        rewards = [t.reward for t in responses]
        rewards_by_problem = [
            rewards[start : start + size] for start in range(0, len(rewards), size)
        ]
        answers = self._answers(problems, responses)
        return SetResult(
            rewards_by_problem,
            sum(t.truncated for t in responses),
            statistics.fmean(t.sampled for t in responses),
            [answers[start : start + size] for start in range(0, len(answers), size)],
        )

    def _answers(self, problems: Sequence[Problem], responses: Sequence[Trajectory]) -> list[str]:
        """The final answers of the responses as their first rewards read them; empty if a reward reads none."""
        rewards = self.config.reward
        answers: list[str] = []
        for number, response in enumerate(responses):
            problem = problems[number // self.config.evaluation.samples_per_prompt]
            name, *_ = rewards.names_for(problem.metadata)
            reward = find_reward(rewards.terms[name].name)
            answer = reward.found_answer(self.data.reader.text_of(response).answer)
            if answer is None:
                return []
            answers.append("".join(plain_notation(answer).casefold().split()))
        return answers


def _write_report(
    path: Path, results: Mapping[str, Mapping[str, SetResult]], pass_reward: float
) -> None:
    report: dict[str, dict[str, object]] = {}
    for checkpoint, sets in results.items():
        report[checkpoint] = {name: result.to_json(pass_reward) for name, result in sets.items()}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _rows(
    results: Mapping[str, Mapping[str, SetResult]], pass_reward: float
) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("CHECKPOINT", "SET", "PROBLEMS", "AVG@K", "PASS@K", "CONS@K", "TRUNCATED", "TOKENS")
    ]
    for checkpoint, sets in results.items():
        for name, result in sets.items():
            size = len(result.rewards[0])
            error = result.standard_error
            average = f"avg@{size} {result.average:.3f}"
            if error is not None:
                average += f" ± {error:.3f}"
            passed = f"pass@{size} {result.pass_at(size, pass_reward):.3f}"
            responses = len(result.rewards) * size
            truncated = f"{result.truncated / responses:.1%}"
            consensus = "-"
            if result.consensus is not None:
                consensus = f"cons@{size} {result.consensus:.3f}"
            figures = (f"{len(result.rewards)}", average, passed, consensus, truncated)
            rows.append((checkpoint, name, *figures, f"{result.mean_tokens:.0f}"))
    return rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo evaluate",
        description="Evaluate checkpoints on a configuration's held-out sets: SGLang servers, no trainer.",
        epilog=(
            "Sampling, k and length come from the configuration's section evaluation; servers, reward, template and "
            "environment are those of a run. Exit codes: 0 done, 1 failed, 2 refused, 130 interrupted."
        ),
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        type=Path,
        metavar="FOLDER",
        help="a Hugging Face folder; may be given several times (default: model.hf_checkpoint)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help="folder for the results (default: run.directory/evaluation)",
    )
    parser.add_argument(
        "--alpaca-eval",
        metavar="SET",
        help="also write the responses to this set of data.evaluation as AlpacaEval's model outputs",
    )
    parser.add_argument(
        "--pass-reward",
        type=finite_number(),
        default=PASS_REWARD,
        metavar="REWARD",
        help=f"smallest reward of a response that counts as passed in pass@k (default: {PASS_REWARD})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
