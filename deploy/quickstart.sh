#!/usr/bin/env bash
# From a fresh Debian 12 to a prompt that survived a kill -9: installs what is missing, builds, and runs the main job of
# kvmill with a small model. Everything it starts and writes is gone afterwards, unless --keep says otherwise.
set -euo pipefail

usage() {
  cat <<'USAGE'
Usage: deploy/quickstart.sh [--cluster | --keep] [--json FILE] [--jobs N] [--no-install]

  --cluster     two nodes and an etcd on the loopback: prompts are computed on one and continued on the other
  --keep        leave the daemon running and say how to reach and stop it
  --json FILE   also write the numbers of the report to FILE
  --jobs N      compile N files at a time (default: the number of processors)
  --no-install  do not look for missing Debian packages

Environment: when KVMILL_EXTRA_DATA names a folder with kv/ (K and V of a 0.5B model, 20 layers, head_dim 64), what
tiles lose is shown for that too.
Exit code: 0 when every block came back as it must, 1 otherwise, 2 for bad options.
USAGE
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
jobs="$(nproc)" install=1 cluster=0 keep=0 job_options=()
script=quickstart
# shellcheck source=deploy/options.sh
source "$root/deploy/options.sh"
while (($# > 0)); do
  case "$1" in
    --cluster) cluster=1; job_options+=(--cluster) ;;
    --keep) keep=1; job_options+=(--keep) ;;
    --json) need "$1" "${2:-}"; job_options+=(--json "$(realpath -m "$2")"); shift ;;
    --jobs) need "$1" "${2:-}"; jobs="$2"; shift ;;
    --no-install) install=0 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "quickstart: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
need_count --jobs "$jobs"
if ((cluster && keep)); then
  echo "quickstart: --keep leaves one daemon running, and --cluster starts two" >&2
  exit 2
fi
cd "$root"

step() { printf '\n== %s\n' "$*"; }

if ((install)); then
  step "Packages"
  deploy/install_packages.sh
fi

step "Build kvmilld and kvmill (build/release, $jobs jobs; some minutes the first time)"
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
if ! cmake --preset release --log-level=WARNING >"$log" 2>&1; then
  cat "$log" >&2
  echo "quickstart: cmake could not configure (its output is above)" >&2
  exit 1
fi
# On a terminal ninja shows its own progress on one line; elsewhere only what goes wrong is worth reading.
if [[ -t 1 ]]; then
  cmake --build --preset release -j "$jobs" --target kvmilld kvmill
elif ! cmake --build --preset release -j "$jobs" --target kvmilld kvmill >"$log" 2>&1; then
  cat "$log" >&2
  echo "quickstart: the build failed (its output is above)" >&2
  exit 1
fi
echo "build/release/bin/kvmilld and build/release/bin/kvmill are up to date"

rm -f "$log"
exec python3 deploy/quickstart_job.py --bin-dir build/release/bin "${job_options[@]}"
