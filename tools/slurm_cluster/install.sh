#!/usr/bin/env bash
# Installs the programs that a Slurm cluster needs on Debian and Ubuntu, if one of them is missing.
# `install.sh --missing` installs nothing and prints the missing programs, one a line.
set -euo pipefail
programs=(slurmctld slurmd munged sbatch srun scontrol scancel squeue sinfo ip unshare nsenter)
packages=(slurm-wlm munge iproute2 util-linux)
export PATH=$PATH:${DAEMON_FOLDERS=/usr/sbin:/sbin} # a user's PATH may lack these folders
say() { printf '[slurm] %s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

# Look for one program at a time: `command -v a b` succeeds if either exists.
missing() { for name in "${programs[@]}"; do command -v "$name" >/dev/null || echo "$name"; done; }

[ "${1:-}" != --missing ] || { missing; exit 0; }
names=$(missing | paste -sd ' ')
[ -n "$names" ] || exit 0
command -v apt-get >/dev/null || stop "not found: $names; there is no apt-get here: install Slurm, munge and iproute2 with this system's packages"
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
say "not found: $names; installing ${packages[*]}"
# RUNLEVEL=1 keeps the packages from starting daemons: the cluster needs only the programs.
export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
"${as_root[@]}" apt-get -o Acquire::Retries=5 update -q
"${as_root[@]}" apt-get -o Acquire::Retries=5 install -y --no-install-recommends "${packages[@]}"
names=$(missing | paste -sd ' ')
[ -z "$names" ] || stop "still not found after ${packages[*]} were installed: $names"
