#!/usr/bin/env bash
# Installs Slurm's programs on Debian and Ubuntu, where they are missing.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
command -v slurmctld slurmd munged sbatch srun ip >/dev/null && exit 0
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
# The packages would start daemons of their own; the cluster needs the programs alone.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
"${as_root[@]}" apt-get -o Acquire::Retries=5 update -q
"${as_root[@]}" apt-get -o Acquire::Retries=5 install -y --no-install-recommends slurm-wlm munge iproute2
