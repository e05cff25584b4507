#!/usr/bin/env bash
# One cache over three nodes, in network namespaces of this machine: K and V computed on one node are attended to on another after
# the first one died, and a node is killed under load. Everything it starts and writes is gone afterwards.
set -euo pipefail

usage() {
  cat <<'USAGE'
Usage: deploy/cluster-demo.sh [--json FILE] [--jobs N] [--no-install]

  --json FILE   also write the numbers of the report to FILE
  --jobs N      compile N files at a time (default: the number of processors)
  --no-install  do not look for missing Debian packages

Needs root, for network namespaces. Environment: when KVMILL_EXTRA_DATA names a folder with kv/ (K and V of a 0.5B model),
the prompt is from there.
Exit code: 0 when nothing but misses came of it, 1 otherwise, 2 for bad options, 77 when this machine cannot make namespaces.
USAGE
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
jobs="$(nproc)" install=1 demo_options=()
script=cluster-demo
# shellcheck source=deploy/options.sh
source "$root/deploy/options.sh"
while (($# > 0)); do
  case "$1" in
    --json) need "$1" "${2:-}"; demo_options+=(--json "$(realpath -m "$2")"); shift ;;
    --jobs) need "$1" "${2:-}"; jobs="$2"; shift ;;
    --no-install) install=0 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "cluster-demo: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
need_count --jobs "$jobs"
if ((EUID != 0)); then
  echo "cluster-demo: needs root: each node gets a network namespace of its own" >&2
  exit 77
fi
cd "$root"

if ((install)); then
  printf '\n== Packages\n'
  deploy/install_packages.sh
fi
printf '\n== Build (build/release, %s jobs; some minutes the first time)\n' "$jobs"
cmake --preset release --log-level=WARNING >/dev/null
cmake --build --preset release -j "$jobs" --target kvmilld kvmill kvmill_python_package | tail -1

export PYTHONPATH="$root/build/release/python" PYTHONDONTWRITEBYTECODE=1
exec /usr/bin/python3 deploy/cluster_demo.py --bin-dir build/release/bin "${demo_options[@]}"
