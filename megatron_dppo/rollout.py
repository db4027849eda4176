"""Generate and score rollout batches without a trainer, and save them.

``megatron-dppo rollout CONFIG.yaml [key.path=value ...] [--checkpoint FOLDER] [--out FOLDER]``.

SGLang servers load the checkpoint themselves and generate the batches of ``run.steps`` steps. The problems are drawn,
and the responses sampled and scored, as in a run of this configuration, but the weights do not change. ``OUT/rollouts``
has a file for each batch, with its seal (``data/seal.py``). ``rollout.replay_from: OUT/rollouts`` trains on the
batches, and ``megatron-dppo explain OUT --policy FOLDER`` shows their tokens. A further call with the same
configuration continues after the last saved batch.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_dppo.config import ConfigError, TrainConfig, load_config, resolved_yaml
from megatron_dppo.config.layout import missing_weights
from megatron_dppo.launch.arguments import add_config_arguments
from megatron_dppo.logging import INTERRUPTED, LOGS_FOLDER, configure_logging, fatal
from megatron_dppo.metrics.records import CONFIG_FILE, ROLLOUTS_FOLDER
from megatron_dppo.own_fleet import OwnFleet, own_fleet, own_fleet_faults
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.errors import RunError
from megatron_dppo.system.files import folder_fault, write_atomically
from megatron_dppo.system.secret_variables import hide_secrets

if TYPE_CHECKING:
    from megatron_dppo.data.trajectory import Trajectory
    from megatron_dppo.fleet.generation import GenerationJob
    from megatron_dppo.loop.inputs import RunData
    from megatron_dppo.loop.scorer import Scorer

REPORT = "rollouts.jsonl"
"""File with a line for each batch: its figures, and the state of the data sampler after it."""
_WEIGHT_VERSION = 0
"""Version of the weights that sample every batch."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Generate all batches; return the exit code: 0 done, 1 failed, 2 refused, 130 interrupted."""
    options = _parser().parse_intermixed_args(arguments)
    hide_secrets()
    try:
        overrides = list(options.overrides)
        if options.checkpoint is not None:
            overrides.append(f"model.hf_checkpoint={options.checkpoint}")
        config = load_config(options.config, overrides)
        spec = RunSpec.of(config, options.config)
        out = Path(options.out or config.run.directory)
        faults = [*own_fleet_faults(config), *_faults(config, out)]
        if faults:
            raise ConfigError(faults, options.config)
        return _generate(config, spec, out)
    except (ConfigError, RunError) as error:
        fatal(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _faults(config: TrainConfig, out: Path) -> Iterator[str]:
    """Yield the reasons why batches can't be generated into the folder ``out``."""
    if config.rollout.replays:
        yield f"rollout.replay_from: got {config.rollout.replay_from!r}, expected null: batches are generated"
    for fault in missing_weights(config.model.hf_checkpoint):
        yield f"model.hf_checkpoint: {fault}"
    reason = folder_fault(out)
    if reason:
        yield f"--out: {reason}"
        return
    path = out / CONFIG_FILE
    if path.is_file() and path.read_text(encoding="utf-8") != _config_text(config):
        yield f"--out: {out} has batches of another configuration ({path}), expected batches of this configuration"


def _config_text(config: TrainConfig) -> str:
    """Return the text of config.yaml in the folder of the batches.

    In this text ``run.steps`` is always 1, because a later call may generate more batches into the folder.
    """
    run = config.run.model_copy(update={"steps": 1})
    return resolved_yaml(config.model_copy(update={"run": run}))


def _generate(config: TrainConfig, spec: RunSpec, out: Path) -> int:
    from megatron_dppo.loop.inputs import RunData
    from megatron_dppo.loop.scorer import Scorer

    (out / LOGS_FOLDER).mkdir(parents=True, exist_ok=True)
    configure_logging(out, None)
    data = RunData(config)
    data.refuse_or_drop(data.bad_answers())
    write_atomically(out / CONFIG_FILE, _config_text(config))
    with (
        Scorer.of(config, data) as scorer,
        own_fleet(config, spec, data, out / LOGS_FOLDER) as (fleet, job),
    ):
        batches = _Batches(config, data, fleet, scorer, job, out)
        for step in batches.remaining():
            print(batches.save(step), flush=True)
    print(
        f"train on them: rollout.replay_from={out / ROLLOUTS_FOLDER}; "
        f"look at them: megatron-dppo explain {out} --policy {config.model.hf_checkpoint}"
    )
    return 0


class _Batches:
    """The batches of a run whose weights do not change, in their order."""

    def __init__(
        self,
        config: TrainConfig,
        data: RunData,
        fleet: OwnFleet,
        scorer: Scorer,
        job: GenerationJob,
        out: Path,
    ) -> None:
        self._config = config
        self._data = data
        self._fleet = fleet
        self._scorer = scorer
        self._job = job
        self._out = out
        self._sampler = data.sampler()

    def remaining(self) -> range:
        """Move the data sampler past the last saved batch, and return the steps after this batch."""
        path = self._out / REPORT
        lines = []
        if path.is_file():
            lines = path.read_text(encoding="utf-8").splitlines()
        if lines:
            self._sampler.load_state_dict(json.loads(lines[-1])["sampler"])
        return range(len(lines) + 1, self._config.run.steps + 1)

    def save(self, step: int) -> str:
        """Generate, score and save the batch of ``step``; return a line about it."""
        from megatron_dppo.data.batch_file import save_batch

        start_time = time.monotonic()
        batch, figures = self._generated(step)
        save_batch(self._out / ROLLOUTS_FOLDER, step, batch, self._seal(step, batch))
        row: dict[str, Any] = {"step": step, **figures, "sampler": self._sampler.state_dict()}
        with open(self._out / REPORT, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        mean_reward = sum(t.reward for t in batch) / len(batch)
        return (
            f"batch {step} of {self._config.run.steps}: {len(batch)} responses, mean reward {mean_reward:.3f}, "
            f"{time.monotonic() - start_time:.0f} s"
        )

    def _generated(self, step: int) -> tuple[list[Trajectory], dict[str, float]]:
        """Generate groups until the batch is complete; return its responses, and figures of all generated groups."""
        from megatron_dppo.loop.group_quota import GroupQuota
        from megatron_dppo.loop.rollout_figures import GroupRow, generated_figures

        config = self._config
        size = self._job.group_size
        quota = GroupQuota.of(config.rollout)
        groups: list[list[Trajectory]] = []
        rows: list[GroupRow] = []
        rounds = 0
        # ``flat``: the group's responses have equal rewards.
        while count := quota.next_count([row.flat for row in rows], rounds):
            positions = range(len(groups), len(groups) + count)
            problems = [self._data.train.problems[i] for i in self._sampler.next(count)]
            job = self._job.for_problems(problems, f"step {step}", positions)
            responses = self._fleet.scored(
                job, f"batch {step}", self._scorer, config.algorithm, config.environment.credit
            )
            new_groups = [responses[i : i + size] for i in range(0, len(responses), size)]
            groups += new_groups
            rows += [GroupRow.of(group) for group in new_groups]
            rounds += 1
        batch: list[Trajectory] = []
        for position in quota.choose([row.flat for row in rows]).positions:
            batch += groups[position]
        return batch, generated_figures(rows)

    def _seal(self, step: int, batch: Sequence[Trajectory]) -> Any:
        """Return the seal of a batch.

        Names and sizes of the checkpoint's files stand for the hash of the weights, which only a trainer computes.
        """
        from megatron_dppo.data.seal import Seal, row_digest, text_digest
        from megatron_dppo.loop.inputs import model_files

        origin = self._data.origin()
        files = model_files(self._config.model.hf_checkpoint, None).items()
        checkpoint = text_digest([[name, path.stat().st_size] for name, path in files])
        problems = dict.fromkeys(t.problem_id for t in batch)
        return Seal(
            step,
            origin.template,
            {_WEIGHT_VERSION: f"checkpoint:{checkpoint}"},
            {problem: row_digest(origin.problems[problem]) for problem in problems},
            [t.stamp for t in batch if t.stamp is not None],
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megatron-dppo rollout",
        description="Generate, score and save rollout batches: SGLang servers, no trainer.",
        epilog=(
            "The sections rollout, data, reward and environment describe the batches; run.steps is their number. "
            "Exit codes: 0 done, 1 failed, 2 refused, 130 interrupted."
        ),
    )
    add_config_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="FOLDER",
        help="the Hugging Face folder that generates (default: model.hf_checkpoint)",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="folder for the batches (default: run.directory)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
