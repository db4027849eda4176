#!/usr/bin/env bash
# Runs the RUN lines of Dockerfile.cpu, then `megatron-dppo` with the given words, on a machine without docker. It runs them in the
# plain Debian of tools/environment/fresh.sh, whose clone of HEAD takes the place of COPY.
#
#   tools/containers/try_cpu.sh demo
set -euo pipefail
folder=$(cd "$(dirname "$0")" && pwd)
steps=$(sed -e ':more' -e '/\\$/{N;s/\\\n *//;b more' -e '}' "$folder/Dockerfile.cpu" | sed -n 's/^RUN //p')
[ "$(wc -l <<<"$steps")" -ge 2 ] || { echo "no RUN lines in $folder/Dockerfile.cpu" >&2; exit 1; }
exec "$folder/../environment/fresh.sh" bash -euc "clone=\$PWD
while IFS= read -r step; do echo \"RUN \$step\"; bash -euc \"\$step\" </dev/null; done <<'END'
$steps
END
mkdir -p /work && cd /work
PATH=\$clone/.venv/bin:\$PATH
exec megatron-dppo \"\$@\"" megatron-dppo "$@"
