#!/usr/bin/env bash
# Makes .venv on any Linux machine: `setup.sh` (make setup) with everything that `make demo` and `make test` need without a
# GPU, `setup.sh gpu` (make setup GPU=1) with everything that runs on GPUs. Done once: a second run sees that nothing
# changed and returns at once; in a clone that was moved or copied it points the environment at this one.
# Nothing is installed over an environment of the other kind, or over one that this script did not make.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$(pwd -P)
stamp=.venv/.installed
say() { printf '[setup] %s\n' "$*"; }
stop() { say "$*" >&2; exit 1; }
. tools/environment/progress.sh
case "${1:-}" in '' | gpu) ;; *) stop "expected nothing or gpu, got '$1'" ;; esac

exec 9>.venv.lock
flock 9 # `make demo` and `make test` started together install once

# -- what is there: kind (cpu or gpu), the clone that it was made for, a hash of what it was made from

there='' place='' made=''
if [ -f "$stamp" ]; then
  there=cpu # of a stamp that was only a hash
  while IFS='=' read -r key value; do
    case "$key" in kind) there=$value ;; place) place=$value ;; pins) made=$value ;; esac
  done <"$stamp"
elif [ -n "$(ls -A .venv 2>/dev/null)" ]; then
  stop ".venv was not made by make setup, or its making was interrupted long ago: nothing is installed over it; remove it (rm -rf .venv), or run with its own .venv/bin/python what you want to run"
fi
# The environment behind a link is another clone's if it was made for one: it is left as it is.
if [ -L .venv ] && [ -n "$there" ] && [ -d "$place" ] && [ "$place" != "$here" ]; then
  stop ".venv is a link to $(readlink -f .venv), the environment of the clone $place: nothing of it is changed. Remove the link (rm .venv) for an environment of this clone, or run with .venv/bin/python what you want to run"
fi
kind=${1:-${there:-cpu}}
case "${there:-$kind}-$kind" in
  cpu-gpu) stop ".venv is the environment without GPUs, and nothing is installed over it: remove it (rm -rf .venv) and run make setup GPU=1, or use a clone for each" ;;
  gpu-cpu) stop ".venv is the environment for GPUs, and nothing is installed over it" ;;
esac
pins=("tools/environment/$kind.txt" tools/environment/dev.txt)
transformer_engine=$(grep '^transformer-engine==' tools/environment/gpu.txt || true)
want=$({ echo "$transformer_engine"; cat "${pins[@]}" tools/environment/reasoning_gym.txt pyproject.toml tools/environment/{setup,find_python}.sh; } | sha256sum | cut -d' ' -f1)
[ "$made" != "$want" ] || [ "$place" != "$here" ] || exit 0
[ "$made" = "$want" ] || [ "$there" != gpu ] || [ -n "${1:-}" ] ||
  stop ".venv is the environment for GPUs, made from other pins than this clone's: make setup GPU=1 renews it, other targets leave it alone"

log=$(mktemp)
ticker=''
trap 'rm -f "$log"; [ -z "$ticker" ] || kill "$ticker" 2>/dev/null || true' EXIT
quietly() { "$@" >"$log" 2>&1 || { cat "$log" >&2; return 1; }; }
write_stamp() { printf 'kind=%s\nplace=%s\npins=%s\n' "$kind" "$1" "$2" >"$stamp.new" && mv "$stamp.new" "$stamp"; }
pip=(.venv/bin/python -m pip --disable-pip-version-check --no-input)
install_project() {
  say "installing megatron_dppo itself"
  quietly "${pip[@]}" install --no-deps --no-build-isolation -e . || stop "the project could not be installed; pip's words are above"
}

# -- a clone that was moved or copied

# `sed -i` makes new files: the old ones may be hard links of a clone that lives on.
redirect() { # the environment's own scripts name its folder, and so does what says where the project lies
  local old
  old=$(sed -n 's/^command = .* -m venv //p' .venv/pyvenv.cfg)
  say "this environment was made for ${place:-$old}: it is pointed at $here"
  [ -z "$old" ] || [ "$old" = "$here/.venv" ] || grep -rlIFZ -- "$old" .venv/bin .venv/pyvenv.cfg |
    xargs -0r sed -i "s|$(sed 's/[.[\*^$|]/\\&/g' <<<"$old")|$(sed 's/[&|\\]/\\&/g' <<<"$here")/.venv|g"
  install_project
}
if [ -n "$there" ] && [ "$place" != "$here" ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
  redirect
  write_stamp "$here" "$made"
  [ "$made" != "$want" ] || exit 0
fi

# -- a new one, or other pins

[ "$(uname -s)" = Linux ] || stop "this needs Linux (found $(uname -s)): gloo, SGLang and process supervision are used as they are there"
versions=() needed_mib=4000
[ "$kind" = cpu ] || versions=(3.12) needed_mib=25000 # gpu.txt is pinned for one Python
python=$(tools/environment/find_python.sh "${versions[@]}")
free_mib=$(df -Pm . | awk 'NR==2 {print $4}')
[ "$free_mib" -gt "$needed_mib" ] || stop "$needed_mib MiB are needed in $here; $free_mib MiB are free"
command -v g++ >/dev/null || say "no g++ here (apt install g++): the C++ kernel's tests will fail, and the demo uses the slower eager statistics"

if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  say "virtual environment .venv with $("$python" --version)"
  rm -rf .venv # what an interrupted attempt left
  mkdir .venv
  write_stamp "$here" unfinished
  "$python" -m venv .venv || stop "the virtual environment could not be made; on Debian and Ubuntu: apt install python3-venv"
fi
write_stamp "$here" unfinished

extra=()
find_torch_index() { # PyPI's Linux build of torch brings several GB of CUDA; the CPU build has its own index
  local index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
  if .venv/bin/python -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=15)" "$index/torch/" 2>/dev/null; then
    extra=(--extra-index-url "$index")
  else
    say "$index does not answer: torch comes from your configured package source"
  fi
}
# The file that pip would take, by the line in which it says so; pip is ended there, before it has fetched it. (`--dry-run`
# fetches it whole where the index serves no metadata.)
torch_file() {
  local folder line pid file=''
  folder=$(mktemp -d)
  exec 8< <(PYTHONUNBUFFERED=1 exec "${pip[@]}" download --no-deps --no-cache-dir --progress-bar off --dest "$folder" "${extra[@]}" "$1" 2>&1)
  pid=$!
  while IFS= read -r line <&8; do
    file=$(grep -oE 'torch-[^/ ]+\.whl' <<<"$line") && break
  done
  kill "$pid" 2>/dev/null || true
  exec 8<&-
  rm -rf "$folder"
  echo "$file"
}
refuse_cuda_build() {
  local file
  file=$(torch_file "$1")
  case "$file" in
    '' | *+cpu* | *%2Bcpu*) ;; # where there is none, the installation says so
    *) stop "pip would take $file, which is built for CUDA and brings several GB of it. This needs the CPU build: set TORCH_CPU_INDEX to an index that has ${1/==/-}+cpu, or PIP_FIND_LINKS to a folder with it; on a machine with GPUs: make setup GPU=1" ;;
  esac
}
torch=$(grep -E '^torch==' "tools/environment/$kind.txt" || true)
if [ "$kind" = cpu ] && [ -n "$torch" ] && ! compgen -G ".venv/lib/python3*/site-packages/torch-${torch#torch==}*.dist-info" >/dev/null; then
  find_torch_index
  refuse_cuda_build "$torch"
fi

total=$(cat "${pins[@]}" | grep -vc '^#' || true)
[ "$kind" = cpu ] && size="about 2 GB: two to five minutes" || size="about 10 GB"
say "installing $total pinned packages, $size"
tell() { say "... $(ls .venv/lib/python3.*/site-packages 2>/dev/null | grep -c dist-info || true) of $total installed, ${SECONDS} s"; }
every 15 tell
ticker=$!
failed="the packages could not be installed; pip's words are above"
if [ "$kind" = cpu ]; then
  quietly "${pip[@]}" install --no-deps "${extra[@]}" -r "${pins[0]}" -r "${pins[1]}" || stop "$failed"
else
  quietly "${pip[@]}" install -r "${pins[0]}" || stop "$failed"
  quietly "${pip[@]}" install --no-deps -r "${pins[1]}" || stop "$failed"
fi
# For the tests of one extra, which say so where it is missing; the rest needs no compiler.
quietly "${pip[@]}" install --no-deps -r tools/environment/reasoning_gym.txt ||
  say "reasoning-gym could not be installed (it compiles pycosat: apt install gcc python3-dev): its tests are skipped, nothing else needs it"
# Not into the environment, where Megatron-Core would build its layers of it: tests of what needs no GPU alone read it.
if [ -n "$transformer_engine" ]; then
  rm -rf .venv/gpu_sources
  quietly "${pip[@]}" install --no-deps --target .venv/gpu_sources "$transformer_engine" ||
    stop "the Python sources of $transformer_engine (1 MB) could not be fetched; pip's words are above"
fi
kill "$ticker" 2>/dev/null || true
install_project
[ "$kind" = cpu ] || tools/environment/build_transformer_engine.sh
say "trying the libraries"
quietly .venv/bin/python -c "import torch, sglang, transformers, megatron_dppo.trainer, megatron.core" || stop "the libraries do not load (above)"
write_stamp "$here" "$want"
say "ready after ${SECONDS} s"
