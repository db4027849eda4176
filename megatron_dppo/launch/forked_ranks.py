"""The ranks of one machine without GPUs are forks of one process (``system.fork_server``), so they share its imports.

The process outlives its ranks, so a restart of the ranks imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megatron_dppo.config.schema import TrainConfig
from megatron_dppo.engine.options import server_environment
from megatron_dppo.engine.process import LIBRARIES as SERVER_LIBRARIES
from megatron_dppo.launch.local import RankGroup, cores_of_ranks, ranks_environment, terminal_of
from megatron_dppo.launch.supervisor import keep_previous
from megatron_dppo.logging import TERMINAL_VARIABLE
from megatron_dppo.spec import RunSpec
from megatron_dppo.system.fork_server import (
    ForkedProcess,
    ForkRequest,
    ForkServer,
    SharedForkServers,
)
from megatron_dppo.system.processes import kill_families
from megatron_dppo.system.scratch import remove_shared_tensors

TRAIN = "megatron_dppo.train"
LIBRARIES: Mapping[str, Sequence[str]] = {
    TRAIN: ("megatron_dppo.loop.run", "megatron_dppo.loop"),
    "megatron_dppo.supervised": ("megatron_dppo.data.problems", "megatron_dppo.trainer.trainer"),
}
"""Module of a rank's command -> further modules that the fork server imports before it forks the rank."""


class ForkedRankGroup(RankGroup):
    """A RankGroup whose ranks one fork server starts. The command is ``python -m MODULE ARGUMENT ...``."""

    _server: ForkServer | None = None
    _ranks: Sequence[ForkedProcess] = ()

    def start(self, number: int = 1) -> None:
        for path in self._outputs:
            keep_previous(path)
        if self._server is None or not self._server.is_alive:
            libraries = libraries_of(self._command[2])
            with self._outputs[0].open("wb") as file:
                self._server = ForkServer(libraries, self.environment(), file.fileno())
        variables = self.start_variables(number)
        ranks = range(len(self._outputs))
        self._ranks = [self._fork(self._server, rank, variables) for rank in ranks]

    def _fork(self, server: ForkServer, rank: int, variables: Mapping[str, str]) -> ForkedProcess:
        # A fork runs no interpreter, so it gets the words after ``python -m``.
        _, _, module, *arguments = self._command
        variables = {**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with self._outputs[rank].open("ab") as file, terminal_of(rank) as terminal:
            descriptors = [file.fileno()]
            descriptor_variables = []
            if terminal is not None:
                descriptors.append(terminal)
                descriptor_variables.append(TERMINAL_VARIABLE)
            request = ForkRequest(module, arguments, variables, descriptor_variables)
            return server.fork(request, descriptors)

    def codes(self) -> list[int | None]:
        if self._server is None:
            return []
        # Poll before reading the codes. If the server has ended by the poll, all its reports are in the socket already.
        server_code = self._server.process.poll()
        codes = [rank.reported_code() for rank in self._ranks]
        has_first_ended = not codes or codes[0] is not None
        if server_code is not None and not has_first_ended:
            # The kernel ends the ranks with the server. The server writes to the first rank's output, so report the
            # first rank as failed.
            codes[0] = server_code or 1
        return codes

    def ask_to_stop(self) -> None:
        for rank in self._ranks:
            rank.terminate()

    def clear(self) -> None:
        forked = []
        for rank in self._ranks:
            # A cancelled rank has no process: the server has not forked the rank yet.
            was_cancelled = rank.cancel()
            if not was_cancelled:
                forked.append(rank)
        kill_families(forked)
        remove_shared_tensors(rank.pid for rank in forked)

    def kill(self) -> None:
        if self._server is None:
            return
        kill_families([self._server.process])
        remove_shared_tensors(self._server.pids())


def libraries_of(module: str) -> tuple[str, ...]:
    """Return the modules that a fork server imports for ranks that run ``module``."""
    return (module, *LIBRARIES.get(module, ()))


def shares_imports(ranks: int, gpus: int) -> bool:
    """Return whether ranks are forks of one process: several ranks on a machine without GPUs.

    Ranks with GPUs are no forks, because the state of a GPU's driver does not survive a fork.
    """
    return ranks > 1 and gpus == 0


def share_imports(fork_servers: SharedForkServers, config: TrainConfig, output: int) -> None:
    """Add to ``fork_servers`` the fork servers that a run of ``config`` needs on a machine without GPUs.

    The fork servers have this process's environment variables, and write to the descriptor ``output``.
    """
    spec = RunSpec.of_checked(config)
    ranks = spec.roles.ranks
    if shares_imports(ranks, gpus=0):
        variables = ranks_environment(ranks, cores_of_ranks(spec.roles))
        fork_servers.add(libraries_of(TRAIN), variables, output)
    if spec.servers.started:
        variables = server_environment(config.engine, spec.servers)
        fork_servers.add([SERVER_LIBRARIES], variables, output)
