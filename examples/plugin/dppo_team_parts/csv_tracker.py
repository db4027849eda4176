"""An experiment tracker that writes one CSV file with the columns step, metric and value."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_dppo.metrics.trackers import TrackedRun

FILE = "scalars.csv"


class CsvTracker:
    """Append every scalar of a run to ``scalars.csv`` in the run's folder for trackers."""

    def start(self, run: TrackedRun) -> None:
        run.folder.mkdir(exist_ok=True)
        self._file = (run.folder / FILE).open("a", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.writerow((step, name, value))

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing: a file of scalars has no place for samples."""

    def figure(self, name: str, path: Path) -> None:
        """Do nothing: a file of scalars has no place for figures."""

    def finish(self) -> None:
        self._file.close()
