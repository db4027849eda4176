"""Settings of every process of the tests and of what it starts."""

import os

# torch and numpy read it when they are imported. Several test processes share the cores: with a thread for each core
# in all of them, a parallel loop spins until its last thread gets a core, and costs ten times as much.
os.environ.setdefault("OMP_NUM_THREADS", "1")
