#!/usr/bin/env bash
# Runs a command in a clean clone of HEAD on a Debian where only what the project's own files install exists.
set -euo pipefail
usage() {
  cat <<'END'
usage: tools/environment/fresh.sh [--keep] [--python 3.11|3.13] [--suite NAME] COMMAND [WORD...]
       tools/environment/fresh.sh --prepare

Runs COMMAND in a clean clone of HEAD (what is not committed is left out) on a plain Debian that holds what the README
asks for (Python, make, g++, git) and nothing else: no .venv, no Slurm, no compiled kernels. Its output, its exit code
and Ctrl-C are the command's own. Afterwards every process and mount of it is gone, and its files too.

  fresh.sh make demo
  fresh.sh make test
  fresh.sh bash .ci/run        installs Slurm by the project's own script
  fresh.sh bash                to look around

  --prepare        only make the Debian tree, and try that it starts
  --keep           leave the clone and the tree, and say where
  --python X       the Debian release with this Python: bookworm has 3.11, trixie 3.13
  --suite NAME     the Debian release by its name (default: this machine's, else bookworm)

The first call makes the tree with debootstrap (a minute); it is kept in $XDG_CACHE_HOME/megatron_dppo/fresh
(~/.cache/...) beside a cache of pip's own, so that later calls start in seconds. Carried in: the
network's configuration, certificates, pip's and apt's (index, proxies, local folders of packages).

Exit code 77, and one line that says why: this machine does not allow it (needs root, mount and process namespaces).
END
}
NOT_HERE=77
say() { printf '[fresh] %s\n' "$*" >&2; }
not_here() { say "$*"; exit "$NOT_HERE"; }
. "$(dirname "$0")/progress.sh"

keep='' suite='' prepare=''
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit ;;
    --keep) keep=1 ;;
    --prepare) prepare=1 ;;
    --suite) suite=${2:?a Debian release}; shift ;;
    --python)
      case "${2:-}" in
        3.11) suite=bookworm ;;
        3.13) suite=trixie ;;
        *) say "no Debian release has Python '${2:-}': 3.11 (bookworm) or 3.13 (trixie)"; exit 2 ;;
      esac
      shift
      ;;
    -*) usage >&2; exit 2 ;;
    *) break ;;
  esac
  shift
done
[ -n "$prepare" ] || [ $# -gt 0 ] || { usage >&2; exit 2; }

export PATH=$PATH:/usr/sbin:/sbin
repository=$(cd "$(dirname "$0")/../.." && pwd)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/megatron_dppo/fresh
packages=python3,python3-venv,make,g++,git,ca-certificates
KEYS=/usr/share/keyrings/debian-archive-keyring.gpg

# -- what the machine allows

[ "$(uname -s)" = Linux ] || not_here "needs Linux, this is $(uname -s)"
[ "$(id -u)" = 0 ] || not_here "needs root (mounts and namespaces): run it with sudo"
for tool in unshare setpriv pivot_root mount git flock; do
  command -v "$tool" >/dev/null || not_here "needs $tool, which is not on this machine"
done
unshare --mount --pid --fork --mount-proc mount --make-rprivate / 2>/dev/null ||
  not_here "this machine allows no mount or process namespaces (a container without CAP_SYS_ADMIN?)"
mkdir -p "$cache"/{runs,pip} || not_here "$cache can't be written"

# -- the tree

apt_value() { # the first Debian mirror of this machine's own sources
  { cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null | sed -nE 's/^deb (\[[^]]*\] )?([^ ]+).*/\2/p'
    sed -nE 's/^URIs: *([^ ]+).*/\1/p' /etc/apt/sources.list.d/*.sources 2>/dev/null; } |
    grep -E '/debian/?$' | head -1
}
is_debian() { (. /etc/os-release 2>/dev/null; [ "${ID:-}" = debian ]); }

install_debootstrap() {
  command -v debootstrap >/dev/null && [ -e "$KEYS" ] && return
  command -v apt-get >/dev/null || { say "needs debootstrap, and there is no apt-get to install it"; return 1; }
  say "installing debootstrap"
  local words=(env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=5)
  { "${words[@]}" update -q && "${words[@]}" install -qy --no-install-recommends debootstrap debian-archive-keyring; } \
    >"$cache/log" 2>&1 || { tail -5 "$cache/log" >&2; say "debootstrap could not be installed"; return 1; }
}

make_tree() { # makes $tree; debootstrap writes into $tree.part
  local mirror ticker code=0
  install_debootstrap || return 1
  mirror=$(apt_value || true)
  mirror=${mirror:-http://deb.debian.org/debian}
  say "making a Debian tree once: $suite from $mirror, about a minute"
  rm -rf --one-file-system "$cache/$suite"-*
  tell() { say "... $SECONDS s: $(tail -1 "$cache/log" | cut -c1-100)"; }
  every 15 tell
  ticker=$!
  timeout 600 debootstrap --variant=minbase --include="$packages" "$suite" "$tree.part" "$mirror" >"$cache/log" 2>&1 || code=$?
  kill "$ticker" 2>/dev/null
  if [ "$code" != 0 ]; then
    tail -5 "$cache/log" >&2
    say "no Debian tree: debootstrap ended with $code (its words above and in $cache/log)"
    rm -rf --one-file-system "$tree.part"
    return 1
  fi
  rm -rf "$tree".part/var/cache/apt/archives/*.deb "$tree".part/var/lib/apt/lists/*
  mv "$tree.part" "$tree"
}

if [ -z "$suite" ]; then
  suite=bookworm
  ! is_debian || suite=$(. /etc/os-release; echo "${VERSION_CODENAME:-bookworm}")
fi
tree=$cache/$suite-$(sha256sum <<<"$packages" | cut -c1-12)
exec 8>"$cache/lock"
flock 8 # of several calls at the same time, one makes the tree
[ -d "$tree" ] || make_tree || exit "$NOT_HERE"
for old in "$cache"/runs/*/; do # remove the folders of killed calls; a living call holds the lock of its folder
  [ ! -d "$old" ] || (flock -n 7 && rm -rf --one-file-system "$old") 7>>"$old/lock" || true
done
run=$(mktemp -d "$cache/runs/XXXXXX")
exec 7>"$run/lock"
flock 7
exec 8>&-

# -- this call's files: a layer over the tree; a copy of the tree if the kernel or the file system has no overlays

trap 'rm -rf --one-file-system "$run"' EXIT
trap 'exit 143' TERM # bash waits until the current command has ended, which may write into $run
root=$run/root
mkdir "$root" "$run"/{work,merged}
layers=lowerdir=$tree,upperdir=$root,workdir=$run/work
if ! unshare --mount mount -t overlay -o "$layers" fresh "$run/merged" 2>/dev/null; then
  layers=''
  cp -a --reflink=auto "$tree/." "$root"
fi
clone=$root/root/megatron_dppo
head=$(git -C "$repository" rev-parse --short HEAD) &&
  git clone -q --no-hardlinks --no-checkout "$repository" "$clone" &&
  git -C "$clone" checkout -q --detach "$(git -C "$repository" rev-parse HEAD)" || not_here "no clean clone of $repository"
changes=$(git -C "$repository" status --porcelain | wc -l)
[ "$changes" = 0 ] || say "$changes files are not committed and left out: what runs is $head"

carry_file() { # copies a file of this machine to the same path inside the tree
  [ -f "$1" ] || return 0
  mkdir -p "$root/$(dirname "$1")"
  cp -L "$1" "$root/$1"
}
for file in /etc/resolv.conf /etc/hosts /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do carry_file "$file"; done
configuration=()
for file in ${PIP_CONFIG_FILE:+"$PIP_CONFIG_FILE"} "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf" /etc/pip.conf; do
  [ -f "$file" ] && configuration+=("$file")
done
for file in "$HOME/.config/pip/pip.conf" "$HOME/.pip/pip.conf"; do
  [ ! -f "$file" ] || install -D -m 600 "$file" "$root/root/${file#"$HOME"/}"
done
mkdir -p "$root/etc/apt/apt.conf.d"
apt-config dump 2>/dev/null | grep -iE '^Acquire::.*(proxy|CaInfo)' >"$root/etc/apt/apt.conf.d/90machine" || true

variables=(HOME=/root PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 MEGATRON_DPPO_FRESH=1)
while IFS= read -r name; do
  case "$name" in
    PIP_CACHE_DIR | PIP_TARGET | PIP_PREFIX | PIP_USER) ;;
    PIP_* | UV_*INDEX* | SSL_* | REQUESTS_* | CURL_CA_BUNDLE | GIT_SSL_* | TORCH_CPU_INDEX | TERM | COLUMNS | LINES) variables+=("$name=${!name}") ;;
    http_proxy | https_proxy | no_proxy | all_proxy | HTTP_PROXY | HTTPS_PROXY | NO_PROXY | ALL_PROXY) variables+=("$name=${!name}") ;;
  esac
done < <(compgen -e)
# Every path that pip's configuration names: a file is copied, a folder is bound. For an index, bind the folder above simple/: the
# packages' files are beside simple/.
folders=()
while IFS= read -r path; do
  if [ ! -d "$path" ]; then carry_file "$path"; elif [ ! -d "$tree$path" ]; then folders+=("${path%/simple}"); fi
done < <({ [ ${#configuration[@]} = 0 ] || cat "${configuration[@]}"; printf '%s\n' "${variables[@]:4}"; } |
  sed -E 's,[a-z+]+://[^/ ][^ ]*, ,g' | grep -oE '(file://)?/[^ ,="'"'"']+' | sed -E 's,^file://,,; s,/$,,' | sort -u)

# -- inside

# Process 1 of the namespace is a shell. It reaps orphans, and signals have their usual effect on the command.
inside='
root=$1 layers=$2 cache=$3 count=$4; shift 4
folders=("${@:1:count}"); shift "$count"
mount --make-rprivate /
if [ -n "$layers" ]; then
  mount -t overlay -o "$layers" fresh "$root/../merged"
  root=$root/../merged
else
  mount --bind "$root" "$root"
fi
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mkdir -p "$root/dev/shm" && mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
bind() { mkdir -p "$root/$2"; mount --bind "$1" "$root/$2"; }
bind "$cache/pip" /root/.cache/pip
for folder in "${folders[@]}"; do bind "$folder" "$folder"; mount -o remount,bind,ro "$root/$folder"; done
cd "$root"
pivot_root . .
umount -l .
cd /root/megatron_dppo
exec 7>&-
trap - ERR
set +e
trap : INT TERM HUP QUIT
(echo >&9; exec env -i "$@" 9>&-)
exit $?
'
enter() { # replaces the current process by the one that holds the namespaces, which ends when this script ends for any reason
  exec env --default-signal=INT,QUIT setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child \
    bash -c "set -eEuo pipefail; trap 'echo \"[fresh] the tree does not start here\" >&2; exit $NOT_HERE' ERR
$inside" fresh "$root" "$layers" "$cache" "${#folders[@]}" "${folders[@]}" "${variables[@]}" "$@"
}
forward() { # SIGNAL: sends SIGNAL to the command inside; a signal that is sent only to this script does not reach the command
  local first
  [ -n "$child" ] || exit 143
  until [ -s "$run/started" ] || ! kill -0 "$child" 2>/dev/null; do sleep 0.1; done
  for first in $(cat "/proc/$child/task/$child/children"); do
    kill -s "$1" $(cat "/proc/$first/task/$first/children") 2>/dev/null || true
  done
}

[ -z "$prepare" ] || set -- true
[ -e /proc/self/fd/0 ] || exec </dev/null
say "in $suite, $(git -C "$clone" log -1 --format='%h %s' | cut -c1-80), after $SECONDS s"
child=''
trap 'forward TERM' TERM
trap 'forward HUP' HUP
trap : INT # a terminal sends Ctrl-C's signal to the command too
enter "$@" <&0 9>"$run/started" &
child=$!
while kill -0 "$child" 2>/dev/null; do wait "$child" || true; done # a signal ends a wait early, with another exit code
code=0
wait "$child" || code=$?
if [ -n "$keep" ]; then
  trap - EXIT
  mv "$run" "$cache/kept-${run##*/}"
  say "kept: $cache/kept-${run##*/}${clone#"$run"} (remove $cache/kept-${run##*/} when done)"
fi
exit "$code"
