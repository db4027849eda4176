"""Start the ranks of one host of a cluster as forks of one process, so that they share its imports.

    python -m megatron_dppo.launch.node_ranks COUNT MODULE CONFIG LOGS

The supervisor of a run on several hosts starts this program once on each host without GPUs. The host's number is
``NODE_RANK`` or, in a Slurm step, ``SLURM_PROCID``. The host has the ranks from ``number * COUNT`` to
``(number + 1) * COUNT - 1``. Rank N writes to ``LOGS/rank<N>.out``. Secret variables, such as API keys, come on the
program's standard input.

When a rank fails, the program kills the other ranks of the host, and ends with the failed rank's exit code.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_dppo.launch.forked_ranks import libraries_of
from megatron_dppo.logging import failure_mark
from megatron_dppo.system.fork_server import ForkedProcess, ForkRequest, ForkServer
from megatron_dppo.system.processes import describe_exit, kill_families
from megatron_dppo.system.secret_variables import hide_secrets

MODULE = "megatron_dppo.launch.node_ranks"
NODE_VARIABLE = "NODE_RANK"
_STDOUT = 1
_POLL_S = 0.05


def main() -> int:
    """Start the ranks of this host and wait for them; return the exit code."""
    count, module, config, logs = sys.argv[1:]
    hide_secrets()
    size = int(count)
    first_rank = size * int(os.environ.get(NODE_VARIABLE) or os.environ["SLURM_PROCID"])
    threads = max(1, len(os.sched_getaffinity(0)) // size)
    environment = {"OMP_NUM_THREADS": str(threads), **os.environ, "LOCAL_WORLD_SIZE": count}
    server = ForkServer(libraries_of(module), environment, _STDOUT)
    ranks: dict[Path, ForkedProcess] = {}
    for local in range(size):
        rank = first_rank + local
        output = Path(logs) / f"rank{rank}.out"
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local)}
        request = ForkRequest(module, [config], variables)
        with output.open("ab") as file:
            ranks[output] = server.fork(request, [file.fileno()])
    try:
        return _first_failure(server, ranks)
    finally:
        kill_families([server.process])


def _first_failure(server: ForkServer, ranks: Mapping[Path, ForkedProcess]) -> int:
    """Wait until a rank has failed and return its exit code, or until all ranks have ended and return 0.

    ``ranks``: the process of each output file.
    """
    while True:
        # Poll the server before reading its reports of exit codes. If the poll finds that the server has ended, the
        # socket has all its reports.
        server_code = server.process.poll()
        codes = {output: rank.reported_code() for output, rank in ranks.items()}
        for output, code in codes.items():
            if code:
                _mark_failure(output)
                print(f"{output.stem} {describe_exit(code)}", flush=True)
                # 128 + n for signal n, as in a shell.
                return code if code > 0 else 128 - code
        if None not in codes.values():
            return 0
        if server_code is not None:
            # The ranks without a code were killed together with the fork server.
            return server_code if server_code > 0 else 1
        time.sleep(_POLL_S)


def _mark_failure(output: Path) -> None:
    """Write the time of a rank's failure, unless the rank itself has written it. A killed rank cannot write it."""
    try:
        with open(failure_mark(output), "x") as file:
            file.write(f"{time.time()}")
    except FileExistsError:
        pass


if __name__ == "__main__":
    sys.exit(main())
