#!/usr/bin/env bash
# Makes .venv with everything that `make demo` and `make test` need, on any Linux machine with Python 3.11 and no GPU.
# Done once: a second run sees that nothing changed and returns at once.
set -euo pipefail
cd "$(dirname "$0")/../.."
pins=(tools/environment/cpu.txt tools/environment/dev.txt)
stamp=.venv/.installed
want=$(cat "${pins[@]}" pyproject.toml tools/environment/setup.sh | sha256sum | cut -d' ' -f1)
[ -f "$stamp" ] && [ "$(cat "$stamp")" = "$want" ] && exit 0

say() { printf '[setup] %s\n' "$*"; }
python=${PYTHON:-}
if [ -z "$python" ]; then
  for candidate in python3.11 python3 python; do
    if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))'; then
      python=$candidate; break
    fi
  done
fi
[ -n "$python" ] || { say "Python 3.11 was not found on PATH; install it, or name it: PYTHON=/path/to/python3.11 make ..."; exit 1; }
case "$(uname -s)" in Linux) ;; *) say "this needs Linux (found $(uname -s)): gloo, SGLang and process supervision are used as they are there"; exit 1;; esac
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -gt 4000 ] || { say "about 3 GB are needed in $(pwd); $free_mib MiB are free"; exit 1; }

say "virtual environment .venv with $($python --version)"
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input -q)

# PyPI's Linux build of torch brings several GB of CUDA; the CPU build has its own index.
index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
extra=()
if .venv/bin/python -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=5)" "$index/torch/" 2>/dev/null; then
  extra=(--extra-index-url "$index")
else
  say "$index does not answer: torch comes from your configured package index"
fi
say "installing $(grep -vc '^#' "${pins[0]}") pinned packages (about 2 GB; two to five minutes)"
"${pip[@]}" install --no-deps "${extra[@]}" -r "${pins[0]}" -r "${pins[1]}" 2> >(grep -v 'is neither a file nor a directory' >&2)
say "installing megatron_dppo itself"
"${pip[@]}" install --no-deps --no-build-isolation -e . 2>/dev/null || "${pip[@]}" install --no-deps --no-build-isolation -e .
echo "$want" > "$stamp"
say "ready"
