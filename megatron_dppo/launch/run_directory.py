"""The files that the supervisor and the trainer ranks exchange.

    <run.directory>/
      config.yaml            the resolved configuration; the ranks read it
      spec.json              the facts that follow from it (``megatron_dppo/spec``), for people and other programs
      lease.json, lease/     held by the supervisor; see megatron_dppo/system/lease.py
      engine/...             the servers; see megatron_dppo/fleet/record.py
      starts                 the number of starts of the run, for the engine's seed
      start_folder           the folder that the run was started in, in which its relative paths begin
      stop                   on several hosts: requests that the ranks end their step and save a checkpoint
      logs/rank<N>.out       standard output and error of rank N
      logs/<server>-<I>.log  output of the I-th incarnation of a server or of the router

Files are renamed into place, so a reader sees a whole file or none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from megatron_dppo.config.loading import resolved_yaml
from megatron_dppo.config.schema import PolicyConfig, TrainConfig
from megatron_dppo.fleet.record import ENGINE_FOLDER, FleetRecord
from megatron_dppo.launch.placement import LaunchError
from megatron_dppo.logging import LOGS_FOLDER, say
from megatron_dppo.metrics import records
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.files import remove_unfinished, with_hash, write_atomically
from megatron_dppo.system.lease import Lease, LeaseError
from megatron_dppo.system.private_files import make_private_folder
from megatron_dppo.system.scratch import remove_left_behind


class RunDirectory:
    """The paths of a run, as a context manager that holds the run's lease.

    Entering creates the folders. If an earlier start was killed, entering also removes that start's servers from the
    registry, and its temporary files. Raises LaunchError if another start of the run holds the lease.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / records.CONFIG_FILE
        self.lease = Lease(self.path, say)
        self._fleet: FleetRecord | None = None

    @property
    def logs(self) -> Path:
        """Folder of the logs of all processes."""
        return self.path / LOGS_FOLDER

    def rank_output(self, rank: int) -> Path:
        return self.logs / f"rank{rank}.out"

    @property
    def step_messages(self) -> Path:
        """File with the messages of the srun command that runs the ranks."""
        return self.logs / "ranks.srun"

    @property
    def stop_file(self) -> Path:
        """File that requests, by its content, that ranks on other hosts end their step and save a checkpoint."""
        return self.path / "stop"

    def server_log(self, name: str, incarnation: int) -> Path:
        """Return the file with the output of the ``incarnation``-th start of a server, counted from 1."""
        return self.logs / f"{name}-{incarnation}.log"

    @property
    def fleet(self) -> FleetRecord:
        assert self._fleet is not None
        return self._fleet

    def __enter__(self) -> RunDirectory:
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
            make_private_folder(self.path / ENGINE_FOLDER)
            self.lease.take()
            write_atomically(self.path / records.START_FOLDER_FILE, f"{os.getcwd()}\n")
        except LeaseError as error:
            raise LaunchError(
                f"run.directory: {self.path}: {error}, or choose another run.directory"
            ) from error
        except OSError as error:
            raise LaunchError(f"run.directory: can't write in {self.path}: {error}") from error
        remove_left_behind()
        # Only the holder of the lease publishes files, so unfinished files are left from earlier starts.
        remove_unfinished(self.path)
        # Read the registry only now: until this start took the lease, the earlier holder could change the registry.
        self._fleet = FleetRecord(self.path, self.lease.fence.check)
        self._fleet.withdraw_started()
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.withdraw_started()
        remove_left_behind()
        self.lease.release()

    def count_start(self) -> int:
        """Count a start of the run; return the number of earlier starts."""
        path = self.path / "starts"
        earlier_starts = int(path.read_text()) if path.exists() else 0
        write_atomically(path, f"{earlier_starts + 1}\n")
        return earlier_starts

    def write_config(self, config: PolicyConfig) -> None:
        """Write the resolved configuration below its hash. Readers check the hash."""
        write_atomically(self.config, with_hash(resolved_yaml(config)))

    def write_spec(self, spec: RunSpec) -> None:
        """Write the facts that follow from the configuration."""
        write_atomically(self.path / records.SPEC_FILE, spec.text())


def is_finished(config: TrainConfig, directory: Path | None = None) -> bool:
    """Return whether a run with exactly this configuration has finished, and its folder has all of its results.

    False if a file is missing, unreadable or of another configuration: then the run starts.

    Args:
        config: the configuration.
        directory: the run's folder; None: ``run.directory``, which may be relative to the folder of the run's start.
    """
    if directory is None:
        directory = Path(config.run.directory)
    repository = config.checkpoint.upload
    upload = None
    if config.run.resume == "never":
        return False
    try:
        summary = json.loads((directory / records.SUMMARY_FILE).read_text(encoding="utf-8"))
        text = (directory / records.CONFIG_FILE).read_text(encoding="utf-8")
        last_record = records.read_records(directory)[-1]
        if repository is not None:
            upload = json.loads((directory / records.UPLOAD_FILE).read_text())
    except (OSError, ValueError, RecursionError, records.RecordsError, IndexError):
        return False
    steps = config.run.steps
    config_text = resolved_yaml(config)
    # A user may have removed the line with the hash.
    has_same_config = text in (with_hash(config_text), config_text)
    has_summary = isinstance(summary, dict) and summary.get("steps") == steps
    has_last_step = records.step_of(last_record) == steps
    has_accuracy = not config.data.evaluation or records.mean_accuracy(last_record) is not None
    has_export = not config.checkpoint.export_hf or (directory / records.EXPORT_FOLDER).is_dir()
    has_upload = repository is None or upload == {"repository": repository, "steps": steps}
    return all((has_same_config, has_summary, has_last_step, has_accuracy, has_export, has_upload))
