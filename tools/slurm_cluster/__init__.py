"""A real Slurm cluster in one folder of one machine: for the tests and for `make slurm-demo`."""

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.packages import INSTALL, missing_programs
from tools.slurm_cluster.settings import NodeSize

__all__ = ["INSTALL", "Cluster", "NodeSize", "missing_programs"]
