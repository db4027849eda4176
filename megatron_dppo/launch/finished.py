"""Whether a run has nothing left to do, told from its folder alone."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.metrics.history import EXPORT_FOLDER
from megatron_dppo.metrics.records import RecordsError, mean_accuracy, read_records, step_of
from megatron_dppo.metrics.summary import SUMMARY_FILE


def is_finished(config: TrainConfig) -> bool:
    """Whether this very configuration ran to its end here, and left all that it would leave again.

    False wherever anything is missing, unreadable or configured in another way: the run then starts
    and sees for itself.
    """
    directory = Path(config.run.directory)
    if config.run.resume == "never":
        return False
    try:
        summary = json.loads((directory / SUMMARY_FILE).read_text(encoding="utf-8"))
        same = (directory / "config.yaml").read_text(encoding="utf-8") == resolved_yaml(config)
        last = read_records(directory)[-1]
    except (OSError, ValueError, RecursionError, RecordsError, IndexError):
        return False
    steps = config.run.steps
    ended = isinstance(summary, dict) and summary.get("steps") == steps == step_of(last)
    evaluated = not config.data.evaluation or mean_accuracy(last) is not None
    exported = not config.checkpoint.export_hf or (directory / EXPORT_FOLDER).is_dir()
    return same and ended and evaluated and exported
