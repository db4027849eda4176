"""A real Slurm cluster in one folder of one machine: for the tests and for `make slurm-demo`."""

from tools.slurm_cluster.cluster import Cluster
from tools.slurm_cluster.packages import what_is_missing
from tools.slurm_cluster.settings import NodeSize

__all__ = ["Cluster", "NodeSize", "what_is_missing"]
