# Functions for scripts that build a package against the CUDA of $python's torch. The scripts source this file after they have
# defined say and stop.
. tools/environment/progress.sh
python=${PYTHON:-.venv/bin/python}

torch_cuda() { # PACKAGE: sets wanted, the version that torch is built for
  wanted=$("$python" -c 'import torch; print(torch.version.cuda or "")') || stop "$python has no torch; set PYTHON"
  [ -n "$wanted" ] || stop "the torch of $python is built for CPUs; $1 needs the packages of tools/environment/gpu.txt"
}

find_toolkit() { # sets and exports CUDA_HOME; sets found, its version
  CUDA_HOME=$("$python" -c 'import os; from megatron_dppo.system.toolkit import toolkit_home; print(toolkit_home(os.environ) or "")')
  [ -n "$CUDA_HOME" ] || stop "no CUDA toolkit: no CUDA_HOME, no nvcc on PATH, no /usr/local/cuda; install CUDA $wanted's (its headers and nvcc)"
  export CUDA_HOME
  found=$("$CUDA_HOME/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\).*/\1/p') || true
  [ -n "$found" ] || stop "$CUDA_HOME has no nvcc that answers"
}

build() { # MODULE WORD...: calls pip install with the words, and prints a line every minute; MODULE must load afterwards
  local log ticker module=$1
  shift
  log=$(mktemp)
  say "building with $CUDA_HOME; its output goes to $log"
  tell() { say "... ${SECONDS} s: $(tail -n 1 "$log" | cut -c 1-100)"; }
  every 60 tell
  ticker=$!
  trap "kill $ticker 2>/dev/null || true" EXIT
  "$python" -m pip -v install --disable-pip-version-check --no-deps --no-build-isolation "$@" >"$log" 2>&1 ||
    { tail -n 30 "$log" >&2; stop "the build failed; all of it is in $log"; }
  "$python" -c "import torch, $module" || stop "it was installed, but $module does not load"
  say "ready after ${SECONDS} s"
}
