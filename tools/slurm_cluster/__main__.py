"""Run a cluster to try things on: ``python -m tools.slurm_cluster``. Ctrl-C or the end of its input stops it."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools.slurm_cluster import Cluster, what_is_missing
from tools.slurm_cluster.shell import CommandError
from tools.slurm_cluster.signals import Interrupted, raise_interrupted

_VERBS = {
    "crash": Cluster.crash,
    "boot": Cluster.boot,
    "cut": Cluster.cut_network,
    "mend": Cluster.mend_network,
}


def main() -> int:
    """Start the cluster, print how to use it, and execute lines of input, for example ``crash n1``."""
    options = _parser().parse_args()
    missing = what_is_missing()
    if missing:
        print(missing, file=sys.stderr)
        return 1
    raise_interrupted()
    try:
        _run(options)
    except Interrupted as end:
        print(f"\n{end.name}: the cluster is gone")
        return end.code
    return 0


def _run(options: argparse.Namespace) -> None:
    shared = [Path.cwd(), Path(sys.prefix), *options.shared]
    isolated = False if options.plain else None
    with Cluster(options.nodes, isolated=isolated, shared=shared) as cluster:
        kind = "isolated" if cluster.isolated else "plain"
        print(f"{len(cluster.nodes)} {kind} nodes: {' '.join(cluster.nodes)}")
        print(f"folder that all nodes share: {cluster.shared}")
        print(f"in another terminal: export SLURM_CONF={cluster.configuration}")
        print(f"here: {', '.join(_VERBS)} and a node's name; Ctrl-C ends the cluster", flush=True)
        for line in sys.stdin:
            _execute(cluster, line.split())


def _execute(cluster: Cluster, words: list[str]) -> None:
    if len(words) != 2 or words[0] not in _VERBS or words[1] not in cluster.nodes:
        print(f"expected one of {', '.join(_VERBS)} and one of {', '.join(cluster.nodes)}")
        return
    try:
        _VERBS[words[0]](cluster, words[1])
    except (CommandError, ValueError) as error:
        print(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.slurm_cluster", description=__doc__)
    parser.add_argument("--nodes", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--plain", action="store_true", help="no namespaces, also as root")
    parser.add_argument(
        "--shared", type=Path, action="append", default=[], help="a folder below /tmp for all nodes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
