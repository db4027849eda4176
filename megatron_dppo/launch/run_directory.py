"""The files that the supervisor and the trainer ranks exchange.

    <run.directory>/
      config.yaml            the resolved configuration, which the ranks read
      lease.json, lease/     held by the supervisor; see megatron_dppo/system/lease.py
      engine/...             the servers; see megatron_dppo/fleet/record.py
      starts                 the number of starts of the run, for the engine's seed
      stop                   under Slurm: requests that the ranks end their step and save a checkpoint
      logs/rank<N>.out       standard output and error of rank N
      logs/<server>-<I>.log  output of the I-th incarnation of a server or of the router

Files are renamed into place, so a reader sees a whole file or none.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.fleet.record import FleetRecord
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.logging import say
from megatron_dppo.metrics import records
from megatron_dppo.system.files import remove_unfinished, with_hash, write_atomically
from megatron_dppo.system.lease import Lease, LeaseError
from megatron_dppo.system.private_files import make_private_folder
from megatron_dppo.system.scratch import remove_left_behind


class RunDirectory:
    """The paths of a run, as a context manager that holds the run's lease.

    Entering creates the folders, and removes the published servers and temporary files of a start that was killed.
    Raises LaunchError where another start of the run holds the lease.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / records.CONFIG_FILE
        self.lease = Lease(self.path, say)
        self._fleet: FleetRecord | None = None

    def rank_output(self, rank: int) -> Path:
        return self.path / "logs" / f"rank{rank}.out"

    @property
    def step_messages(self) -> Path:
        return self.path / "logs" / "ranks.srun"

    @property
    def stop_file(self) -> Path:
        """File whose content ``stop`` requests that ranks on other hosts end their step and save a checkpoint."""
        return self.path / "stop"

    def server_log(self, name: str, incarnation: int) -> Path:
        """Output of the ``incarnation``-th start of a server in this run, counted from 1."""
        return self.path / "logs" / f"{name}-{incarnation}.log"

    @property
    def fleet(self) -> FleetRecord:
        assert self._fleet is not None
        return self._fleet

    def __enter__(self) -> RunDirectory:
        try:
            (self.path / "logs").mkdir(parents=True, exist_ok=True)
            make_private_folder(self.path / "engine")
            self.lease.take()
        except LeaseError as error:
            raise LaunchError(
                f"run.directory: {self.path}: {error}, or give this one another run.directory"
            ) from error
        except OSError as error:
            raise LaunchError(f"run.directory: can't write in {self.path}: {error}") from error
        remove_left_behind()
        # Only the holder of the lease publishes files, so unfinished ones are left from earlier starts.
        remove_unfinished(self.path)
        # Read the registry now: until the lease was taken, its last holder could write it.
        self._fleet = FleetRecord(self.path, self.lease.fence.check)
        self._fleet.withdraw_started()
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.withdraw_started()
        remove_left_behind()
        self.lease.release()

    def count_start(self) -> int:
        path = self.path / "starts"
        before = int(path.read_text()) if path.exists() else 0
        write_atomically(path, f"{before + 1}\n")
        return before

    def write_config(self, text: str) -> None:
        """Write the resolved configuration below its hash, which readers compare."""
        write_atomically(self.config, with_hash(text))


def is_finished(config: TrainConfig) -> bool:
    """Whether a run with exactly this configuration has finished in its folder, and all of its results are there.

    False if a file is missing, unreadable or of another configuration: then the run starts.
    """
    directory = Path(config.run.directory)
    repository = config.checkpoint.upload
    if config.run.resume == "never":
        return False
    try:
        summary = json.loads((directory / records.SUMMARY_FILE).read_text(encoding="utf-8"))
        text = (directory / records.CONFIG_FILE).read_text(encoding="utf-8")
        same = text in (with_hash(resolved_yaml(config)), resolved_yaml(config))
        last = records.read_records(directory)[-1]
        uploaded = repository is None or json.loads((directory / records.UPLOAD_FILE).read_text())
    except (OSError, ValueError, RecursionError, records.RecordsError, IndexError):
        return False
    steps = config.run.steps
    ended = isinstance(summary, dict) and summary.get("steps") == steps == records.step_of(last)
    evaluated = not config.data.evaluation or records.mean_accuracy(last) is not None
    exported = not config.checkpoint.export_hf or (directory / records.EXPORT_FOLDER).is_dir()
    sent = repository is None or uploaded == {"repository": repository, "steps": steps}
    return same and ended and evaluated and exported and sent
