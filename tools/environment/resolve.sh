#!/usr/bin/env bash
# Prints for each Python whether every pinned package has a wheel for it, and whether the pins for GPUs meet each other's
# requirements. Installs nothing; needs uv (pip install uv).
# manylinux_2_34: of all pins, sglang requires the newest glibc, 2.34. Debian 12 and Ubuntu 22.04 have it.
set -euo pipefail
cd "$(dirname "$0")"
target=$(mktemp -d)
trap 'rm -rf "$target"' EXIT
failed=0
for python in ${*:-3.11 3.12 3.13}; do
  answer=$(uv pip install --dry-run --no-deps --only-binary :all: --target "$target" --python-version "$python" \
    --python-platform x86_64-manylinux_2_34 -r cpu.txt -r dev.txt -r docs.txt -r trackers.txt 2>&1) || failed=1
  printf 'Python %s: %s\n' "$python" "$(grep -E '^Resolved|cause:|^error' <<<"$answer" | tail -1)"
done
answer=$(uv pip install --dry-run --no-deps --only-binary :all: --target "$target" --python-version 3.11 \
  --python-platform x86_64-manylinux_2_34 -r agents.txt 2>&1) || failed=1
printf 'agents, Python 3.11: %s\n' "$(grep -E '^Resolved|cause:|^error' <<<"$answer" | tail -1)"
answer=$(uv pip install --dry-run --only-binary :all: --target "$target" --python-version 3.12 \
  --python-platform x86_64-manylinux_2_34 -r gpu.txt 2>&1) || failed=1
printf 'GPUs, Python 3.12: %s\n' "$(grep -E '^Resolved|cause:|^error' <<<"$answer" | tail -1)"
exit "$failed"
