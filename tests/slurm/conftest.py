"""A real Slurm cluster for the tests of this folder: one for each pytest process, started in under a second."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.slurm_cluster import Cluster, what_is_missing

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def slurm_programs() -> None:
    """Every test of this folder needs Slurm's programs: else it is skipped, or fails where ``CI`` is set."""
    if missing := what_is_missing():
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def slurm_session(slurm_programs: None) -> Iterator[Cluster]:
    """Four nodes with eight GPUs that only Slurm believes in; isolated where this process is root's."""
    with Cluster(shared=[ROOT, Path(sys.prefix), Path(sys.base_prefix)]) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm_session: Cluster) -> Iterator[Cluster]:
    """The cluster with every node idle; what a test leaves running is cancelled."""
    yield slurm_session
    slurm_session.client.cancel_all()
    slurm_session.wait_idle()
    slurm_session.recount_gpus()


@pytest.fixture
def folder(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own that all nodes see."""
    path = cluster.shared / request.node.name.replace("[", "-").replace("]", "")
    path.mkdir()
    return path


@pytest.fixture
def isolated(cluster: Cluster) -> Cluster:
    """The cluster, where its nodes are machines of their own."""
    if not cluster.isolated:
        pytest.skip("needs a process that may make namespaces: run the tests as root")
    return cluster
