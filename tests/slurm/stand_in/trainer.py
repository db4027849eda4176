"""One rank that counts steps: ``python -m tests.slurm.stand_in.trainer CONFIG [--check]``.

Rank 0 writes records, checkpoints and the summary under the run's fence; a step takes ``STEP_S`` seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_dppo.config import load_config
from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.fleet.endpoint import ENDPOINT_VARIABLE, RecordClient
from megatron_dppo.fleet.record import Keys
from megatron_dppo.launch.srun import adopt_slurm_rank
from megatron_dppo.metrics.records import (
    RECORDS_FILE,
    SUMMARY_FILE,
    decode_records,
    encode_record,
    read_history,
    remember_checkpoint,
)
from megatron_dppo.system.files import write_atomically
from megatron_dppo.system.lease import NONCE_VARIABLE, Fence
from megatron_dppo.system.processes import STOP_FILE_VARIABLE, StopFile
from megatron_dppo.system.secret_variables import hide_secrets

STEP_S = 0.1


def main() -> None:
    """Check the configuration, or run to the last step, to a stop request, or until the fence raises."""
    hide_secrets()
    path, *flags = sys.argv[1:]
    config = load_config(path, [])
    if "--check" in flags:
        return
    adopt_slurm_rank()
    rank = int(os.environ["RANK"])
    stop = stop_flag()
    wait_for_servers(config)
    run = Path(config.run.directory)
    fence = Fence(run, os.environ[NONCE_VARIABLE])
    step = read_history(run).saved_step or 0
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} begins after step {step}", flush=True)
    drop_records(run, step, rank)
    while step < config.run.steps and not stop():
        time.sleep(STEP_S)
        step += 1
        fence.check()
        if rank == 0:
            with (run / RECORDS_FILE).open("a") as file:
                file.write(encode_record(step, {"job": int(os.environ["SLURM_JOB_ID"])}) + "\n")
            if step % config.checkpoint.every == 0:
                remember_checkpoint(run, step)
    if rank == 0:
        finish(config, run, step)


def stop_flag() -> Callable[[], bool]:
    """Return a function that says whether SIGTERM or the stop file came. It is the real trainer's without torch."""
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    file = StopFile(Path(os.environ[STOP_FILE_VARIABLE]))
    return lambda: bool(signals) or file()


def wait_for_servers(config: TrainConfig) -> None:
    """Wait until all servers are published, as the real trainer does."""
    record = RecordClient(os.environ[ENDPOINT_VARIABLE], Keys.handed_down())
    while len(record.servers()) < config.engine.servers_to_start:
        time.sleep(0.05)


def drop_records(run: Path, step: int, rank: int) -> None:
    """Drop the records after the checkpoint, as the real trainer does."""
    path = run / RECORDS_FILE
    if rank == 0 and path.exists():
        kept = [r for r in decode_records(path.open(), str(path)) if (r["step"] or 0) <= step]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def finish(config: TrainConfig, run: Path, step: int) -> None:
    """Write a last checkpoint, and after the last step the summary."""
    remember_checkpoint(run, step)
    if step == config.run.steps:
        write_atomically(run / SUMMARY_FILE, json.dumps({"steps": step}))


if __name__ == "__main__":
    main()
