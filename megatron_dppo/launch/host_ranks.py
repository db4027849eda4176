"""The ranks of a run on several hosts: their variables, and the file that asks them to stop."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path

from megatron_dppo.launch.placement import Placement
from megatron_dppo.launch.run_directory import RunDirectory
from megatron_dppo.launch.supervisor import RankFailure, failed_at, failure_mark, keep_previous
from megatron_dppo.system import processes
from megatron_dppo.system.lease import START_VARIABLE


class HostRanks(ABC):
    """Ranks on several hosts: their variables and their stop file. Subclasses start them; see Ranks.

    Args:
        directory: the run's directory.
        placement: the run's placement.
        variables: environment variables for every rank, added to this process's variables.
    """

    def __init__(
        self, directory: RunDirectory, placement: Placement, variables: Mapping[str, str]
    ) -> None:
        self._directory = directory
        self._placement = placement
        self._variables = {
            "WORLD_SIZE": str(len(placement.ranks)),
            "MASTER_ADDR": placement.master_address,
            "PYTHONUNBUFFERED": "1",
            processes.STOP_FILE_VARIABLE: str(directory.stop_file.absolute()),
            **variables,
        }

    def ask_to_stop(self) -> None:
        # The ranks read a file: a signal through a remote shell or srun would also reach the ranks' child processes.
        processes.ask_to_stop(self._directory.stop_file)

    def clear(self) -> None:
        self.kill()

    @abstractmethod
    def kill(self) -> None: ...

    def _failure(self, process: int, per_process: int, code: int, output: Path) -> RankFailure:
        """Return the failure of the ``per_process`` ranks of ``process``, which ended with ``code``.

        The failed rank is the rank that noted its failure first. If no rank noted a failure, the failure has the first
        rank's number, and the ``output`` of the process.
        """
        first_rank = process * per_process
        ranks = range(first_rank, first_rank + per_process)
        outputs = {rank: self._directory.rank_output(rank) for rank in ranks}
        marked_ranks = [rank for rank in ranks if failure_mark(outputs[rank]).exists()]
        if not marked_ranks:
            return RankFailure(first_rank, code, output, failed_at(output))
        rank = min(marked_ranks, key=lambda number: failed_at(outputs[number]))
        return RankFailure(rank, code, outputs[rank], failed_at(outputs[rank]))

    def _begin(self, number: int) -> dict[str, str]:
        """Set the outputs of the earlier start aside; return the ranks' variables in the ``number``-th start."""
        for place in self._placement.ranks:
            keep_previous(self._directory.rank_output(place.rank))
        processes.withdraw_stop(self._directory.stop_file)
        return {
            **os.environ,
            **self._variables,
            "MASTER_PORT": str(self._placement.master_port_of(number)),
            START_VARIABLE: str(number),
        }
