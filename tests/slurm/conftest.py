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
    """Skip the tests of this folder if Slurm's programs are missing, or fail if ``CI`` is set."""
    if missing := what_is_missing():
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


@pytest.fixture(scope="session")
def slurm_session(slurm_programs: None) -> Iterator[Cluster]:
    """Four nodes with eight GPUs that exist only for Slurm. The nodes are isolated if this process runs as root."""
    with Cluster(shared=[ROOT, Path(sys.prefix), Path(sys.base_prefix)]) as cluster:
        yield cluster


@pytest.fixture
def cluster(slurm_session: Cluster) -> Iterator[Cluster]:
    """The cluster with idle nodes. Jobs that a test leaves are cancelled."""
    yield slurm_session
    slurm_session.client.cancel_all()
    slurm_session.wait_idle()
    slurm_session.recount_gpus()


@pytest.fixture
def folder(cluster: Cluster, request: pytest.FixtureRequest) -> Path:
    """The test's own folder, which all nodes see."""
    path = cluster.shared / request.node.name.replace("[", "-").replace("]", "")
    path.mkdir()
    return path


@pytest.fixture
def isolated(cluster: Cluster) -> Cluster:
    """The cluster. The test is skipped if the nodes are not isolated."""
    if not cluster.isolated:
        pytest.skip("needs a process that may make namespaces: run the tests as root")
    return cluster
