"""Settings of every process of the tests and of its child processes."""

import os

# torch and numpy read this variable when they are imported. Several test processes share the cores. If each process had
# a thread for each core, a parallel loop would spin until its last thread gets a core, and cost ten times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
