"""Jobs on the test cluster whose trainer and server are stand-ins."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron_dppo.fleet.record import FleetRecord, Server
from tests.integration.runs import records_of, steps_of
from tests.patience import Patience, family_of
from tests.slurm.recipes import SMALL_ROLLOUTS, write_config
from tools.slurm_cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
PATIENT_S = 240.0
TRAINER = "tests.slurm.stand_in.trainer"
SERVER = "server.py"


class StandInJob:
    """A job of two ranks and one server on three nodes. The ranks count to ``steps``, and save every five steps.

    ``parallel``, ``rollout``, ``sglang``: values of these sections; ``max_restarts``: of the ranks; ``site``: values of
    the site file.
    """

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        steps: int = 20,
        *,
        parallel: dict[str, int] | None = None,
        rollout: dict[str, int] | None = None,
        sglang: dict[str, int] | None = None,
        max_restarts: int = 3,
        **site: Any,
    ) -> None:
        self.cluster = cluster
        self.folder = folder
        self.directory = folder / "run"
        self.config = write_config(
            folder,
            run={"directory": str(self.directory), "steps": steps, "max_restarts": max_restarts},
            model={"hf_checkpoint": str(self._model())},
            parallel=parallel or {"world_size": 2},
            rollout=SMALL_ROLLOUTS | (rollout or {}),
            sglang=sglang or {},
            checkpoint={"every": 5, "export_hf": False},
            engine={"device": "cpu", "servers": 1, "python": str(self._engine_python())},
        )
        defaults = {"gpus_per_node": 0, "checkpoint_margin_s": 10, "preflight": False}
        self.site = folder / "site.yaml"
        self.site.write_text(json.dumps(defaults | site))
        self.job = 0

    def _model(self) -> Path:
        """Write a real model's config with one layer, so that any machine has the room that the preflight requires."""
        source = ROOT / "examples/model_configs/qwen3-1.7b-base/config.json"
        shape = json.loads(source.read_text()) | {"num_hidden_layers": 1, "vocab_size": 1024}
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(shape))
        return folder

    def _engine_python(self) -> Path:
        """Write an interpreter that runs the stand-in in place of any module, and runs scripts as they are."""
        path = self.folder / "engine_python"
        stand_in = Path(__file__).parent / "stand_in" / "server.py"
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -m ] && set -- {stand_in} "$@"\nexec {sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def submit(self, *flags: str) -> StandInJob:
        """Submit the job by sbatch."""
        self.directory.mkdir()
        self.job = self._submit("out", *flags)
        return self

    def submit_again(self, *flags: str) -> int:
        """Submit another job for the same run, and return its id. Its output goes to ``out-<id>``."""
        return self._submit("out-%j", *flags)

    def _submit(self, output: str, *flags: str) -> int:
        script = self.folder / "job.sbatch"
        command = f"{sys.executable} -m tests.slurm.stand_in.job"
        script.write_text(f"#!/bin/bash\nexec {command} {self.config} --site {self.site}\n")
        return self.cluster.client.submit(
            *("--nodes=3", "--ntasks-per-node=1", "--exclusive", "--requeue", "--time=10"),
            *("--open-mode=append", f"--chdir={ROOT}", f"--output={self.folder}/{output}"),
            *flags,
            script,
        )

    @property
    def log(self) -> str:
        """The output of the job and of its ranks."""
        paths = [self.folder / "out", *sorted((self.directory / "logs").glob("rank*"))]
        texts = [p.read_text(errors="replace") for p in paths if p.exists()]
        return "\n".join(texts)

    def attempts(self) -> list[dict[str, Any]]:
        """The reason files, in order."""
        paths = sorted((self.directory / "attempts").glob("*.json"))
        return [json.loads(path.read_text()) for path in paths]

    def ends(self) -> list[str]:
        """Why each attempt ended."""
        return [attempt["why"] for attempt in self.attempts()]

    def steps(self) -> list[int]:
        """Recorded steps."""
        return steps_of(self.directory)

    def jobs_of_steps(self) -> set[int]:
        """Jobs whose ranks recorded the steps."""
        return {int(record["job"]) for record in records_of(self.directory)}

    def server(self) -> Server | None:
        """The published server."""
        return next(iter(FleetRecord(self.directory).servers()), None)

    def wait(self, condition: Callable[[], object], timeout_s: float = PATIENT_S) -> None:
        """Wait until ``condition`` holds. Fail with the job's log if that takes too long."""
        patience = Patience(timeout_s, lambda: family_of(os.getpid()))
        while not condition():
            assert not patience.is_exhausted(), f"not in time\n{self.log}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until ``step`` is recorded."""
        self.wait(lambda: step in self.steps())

    def wait_for_end(self, timeout_s: float = PATIENT_S) -> dict[str, str]:
        """Wait for the job's end, and return its record."""
        try:
            return self.cluster.client.wait(self.job, timeout_s=timeout_s)
        except TimeoutError as error:
            raise AssertionError(f"{error}\n{self.log}") from error

    def processes(self, word: str) -> list[psutil.Process]:
        """Return this job's processes on all nodes with an argument ending in ``word``, sorted by Slurm's rank."""
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                is_of_job = environment.get("SLURM_JOB_ID") == str(self.job)
                is_of_job &= environment.get("SLURM_CONF") == str(self.cluster.configuration)
                if is_of_job and any(part.endswith(word) for part in process.cmdline()):
                    found.append((int(environment.get("SLURM_PROCID", "0")), process))
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        pythons = [pair for pair in found if "python" in pair[1].name()]
        return [process for _, process in sorted(pythons, key=lambda pair: pair[0])]

    def kill(self, word: str, index: int = -1) -> None:
        """SIGKILL one of ``processes``, as the kernel does when memory runs out."""
        os.kill(self.processes(word)[index].pid, signal.SIGKILL)
