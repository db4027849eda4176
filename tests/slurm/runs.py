"""Runs of a tiny model on the test cluster, submitted as a user submits them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.runs import records_of, write_material
from tests.patience import Patience, family_of
from tools.slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "megatron_dppo" / "cluster" / "slurm" / "run.sbatch"
PATIENT_S = 900.0
TRAINER_METRICS = ("loss/", "mask/", "mismatch/", "optimizer/", "policy/", "r3/", "reward/")
"""Prefixes of the metrics that the trainer computes. Other metrics are times, and sizes on this machine."""


def trainer_metrics(directory: Path, step: int) -> dict[str, float | None]:
    """Return the metrics that the trainer computed in ``step``, by name."""
    [record] = [r for r in records_of(directory) if r["step"] == step]
    return {name: value for name, value in record.items() if name.startswith(TRAINER_METRICS)}


class SlurmRun:
    """A run of two ranks and ``servers`` servers, each on its own node, and the job of the run."""

    def __init__(
        self, cluster: Cluster, folder: Path, *overrides: str, servers: int = 1, **site: Any
    ) -> None:
        self.cluster = cluster
        self.directory = folder / "run"
        self.config = folder / "config.yaml"
        if not self.config.exists():
            write_material(folder)
        self.overrides = [f"engine.servers={servers}", "rollout.router_replay=true", *overrides]
        site = {"gpus_per_node": 0, "checkpoint_margin_s": 30, "preflight": False, **site}
        self.site = folder / "site.yaml"
        self.site.write_text(json.dumps(site))
        self.job = 0

    def submit(self, *flags: str) -> SlurmRun:
        """Submit the run by sbatch."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        self.job = self.cluster.client.submit(
            "--nodes=4", "--ntasks-per-node=1", f"--chdir={ROOT}",
            f"--output={self.directory}/logs/slurm-%j.out", *flags,
            SCRIPT, self.config, *self.overrides, f"--site={self.site}",
            environment={"MEGATRON_DPPO_PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        return self

    @property
    def log(self) -> str:
        """The output of the job."""
        path = self.directory / "logs" / f"slurm-{self.job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def attempts(self) -> list[dict[str, Any]]:
        """The reason files, in order."""
        paths = sorted((self.directory / "attempts").glob("*.json"), key=os.path.basename)
        return [json.loads(path.read_text()) for path in paths]

    def wait(self, condition: Callable[[], object], timeout_s: float = PATIENT_S) -> None:
        """Wait until ``condition`` holds. Fail with the job's log if that takes too long."""
        patience = Patience(timeout_s, lambda: family_of(os.getpid()))
        while not condition():
            assert not patience.is_exhausted(), self.log
            time.sleep(0.2)

    def wait_for_end(self, timeout_s: float = PATIENT_S) -> dict[str, str]:
        """Wait for the job's end, and return its record."""
        try:
            return self.cluster.client.wait(self.job, timeout_s=timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log}") from error
