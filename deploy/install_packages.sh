#!/usr/bin/env bash
# Installs the Debian packages of deploy/packages.txt that are missing; does nothing when none is.
# --without-tests: not those below '# Tests and lints'. --list FILE: those of another list.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
list="$here/packages.txt" tests=1
script=install_packages
# shellcheck source=deploy/options.sh
source "$here/options.sh"
while (($# > 0)); do
  case "$1" in
    --without-tests) tests=0 ;;
    --list) need "$1" "${2:-}"; list="$2"; shift ;;
    *) echo "install_packages: unknown option '$1': want --without-tests or --list FILE" >&2; exit 2 ;;
  esac
  shift
done
[[ -r "$list" ]] || { echo "install_packages: --list $list: cannot be read" >&2; exit 2; }

wanted() {
  if ((tests)); then cat "$list"; else sed '/^# Tests/,$d' "$list"; fi
}
mapfile -t packages < <(wanted | sed -e 's/#.*//' -e 's/[[:space:]]//g' -e '/^$/d')

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_packages: this is not a Debian system (no dpkg-query or apt-get); make sure that the" \
    "equivalents of $list are installed. Going on." >&2
  exit 0
fi

missing=()
for package in "${packages[@]}"; do
  state="$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null || true)"
  [[ "$state" == *installed* && "$state" != *not-installed* ]] || missing+=("$package")
done

if ((${#missing[@]} == 0)); then
  echo "install_packages: all ${#packages[@]} packages are installed"
  exit 0
fi

if (($(id -u) != 0)); then
  echo "install_packages: ${#missing[@]} of ${#packages[@]} packages are missing, and installing them needs root. Run:" >&2
  echo "  sudo apt-get update && sudo apt-get install --no-install-recommends -y ${missing[*]}" >&2
  exit 1
fi

echo "install_packages: installing ${#missing[@]} missing packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
install() {
  apt-get update -q && apt-get install -q -y --no-install-recommends "${missing[@]}"
}
if ! install >"$log" 2>&1 </dev/null; then
  tail -n 40 "$log" >&2
  echo "install_packages: apt-get failed (its last lines are above)" >&2
  exit 1
fi
echo "install_packages: done"
