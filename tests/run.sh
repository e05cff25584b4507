#!/usr/bin/env bash
# Installs what is missing, builds kvmill and runs its tests. The last line is 'N passed, N failed, N skipped'.
set -euo pipefail

usage() {
  cat <<'USAGE'
Usage: tests/run.sh [--long] [--sanitizers] [--stress] [--only REGEX] [--jobs N] [--no-install]

  (no options)     build the release preset and run every test that is not labelled 'long'
  --long           also run the tests labelled 'long', and the long forms of the others (KVMILL_LONG=1)
  --sanitizers     afterwards build the asan and tsan presets and run their tests, without those labelled
                   'slow' or 'long'
  --stress         only stress_test, and all of its seconds, in the release preset; with --sanitizers in those two
                   instead. Builds no more than that needs
  --only REGEX     only tests whose name matches (everything is built all the same)
  --jobs N         build and test N at a time (default: the number of processors)
  --no-install     do not look for missing Debian packages

Environment: KVMILL_EXTRA_DATA names a folder with more real K/V and traces; tests that want it say that they
skip when it is not set.
Exit code: 0 when everything passed, 1 when a build or a test failed, 2 for bad options.
USAGE
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

long=0 sanitizers=0 stress=0 only="" jobs="$(nproc)" install=1
script=run.sh
# shellcheck source=deploy/options.sh
source "$root/deploy/options.sh"
while (($# > 0)); do
  case "$1" in
    --long) long=1 ;;
    --sanitizers) sanitizers=1 ;;
    --stress) stress=1 ;;
    --only) need "$1" "${2:-}"; only="$2"; shift ;;
    --jobs) need "$1" "${2:-}"; jobs="$2"; shift ;;
    --no-install) install=0 ;;
    -h | --help) usage; exit 0 ;;
    *) echo "run.sh: unknown option '$1'" >&2; usage >&2; exit 2 ;;
  esac
  shift
done
need_count --jobs "$jobs"
targets=()
if ((stress)); then
  [[ -z "$only" ]] || { echo "run.sh: --stress and --only exclude each other" >&2; exit 2; }
  only='^stress_test$' targets=(--target stress_test)
  export KVMILL_LONG=1
fi

step() { printf '\n== %s\n' "$*"; }

passed=0 failed=0 skipped=0 broken=0 flaky=()

# Adds the counts of one ctest run, read from its JUnit report, to the totals.
count() {
  local report="$1" attributes total bad off
  attributes="$(grep -m1 -A8 '<testsuite' "$report" | tr '\n' ' ')"
  number() { sed -E "s/.*[[:space:]]$1=\"([0-9]+)\".*/\1/" <<<"$attributes"; }
  total="$(number tests)" bad="$(number failures)"
  off=$(($(number skipped) + $(number disabled)))
  passed=$((passed + total - bad - off)) failed=$((failed + bad)) skipped=$((skipped + off))
}

# Builds one preset and runs its tests. Extra arguments go to ctest.
build_and_test() {
  local preset="$1"
  shift
  step "$preset: configure and build ($jobs jobs)"
  if ! cmake --preset "$preset" --log-level=WARNING -DKVMILL_TESTS=ON ||
    ! cmake --build --preset "$preset" -j "$jobs" "${targets[@]}"; then
    echo "run.sh: the $preset build failed" >&2
    broken=1
    return
  fi
  step "$preset: test"
  local report="$root/build/$preset/junit.xml" log="$root/build/$preset/ctest.log"
  local arguments=(--test-dir "build/$preset" --output-on-failure --no-tests=error --output-junit "$report")
  [[ -z "$only" ]] || arguments+=(-R "$only")
  rm -f "$report"
  local ok=1
  ctest "${arguments[@]}" -j "$jobs" "$@" | tee "$log" || ok=0
  if [[ -f "$report" ]]; then count "$report"; else broken=1; fi
  if ((ok)) || repeat_alone "$preset" "$log"; then return; fi
  broken=1
}

# Tests of real processes in real time can fail because a machine was busy. One or two that failed are run again, alone,
# and pass as flaky if they pass now: each is named in the end, for somebody to mend. Nothing else is forgiven: neither
# a crash nor a timeout, nor more than two, nor what is the same whenever it runs (lints), nor whatever looks for wrong
# bytes and races by chance (stress).
repeat_alone() {
  local preset="$1" log="$2" names listed
  # As ctest lists them: '  12 - name (Failed)'.
  mapfile -t names < <(sed -nE 's/^[[:space:]]+[0-9]+ - ([^ ]+) \(Failed\).*/\1/p' "$log")
  listed="$(sed -n '/^The following tests FAILED:/,$p' "$log" | grep -cE '^[[:space:]]+[0-9]+ - ' || true)"
  ((${#names[@]} >= 1 && ${#names[@]} <= 2 && listed == ${#names[@]})) || return 1
  step "$preset: again, alone: ${names[*]}"
  local again=(--test-dir "build/$preset" -R "^($(IFS='|'; echo "${names[*]}"))\$" --no-tests=error -j 1 --output-on-failure)
  # Everything that failed has to be among what may be repeated.
  local repeatable
  repeatable="$(ctest "${again[@]}" -N -LE '^(stress|lint)$' | grep -c '^ *Test *#' || true)"
  [[ "$repeatable" == "${#names[@]}" ]] || return 1
  ctest "${again[@]}" || return 1
  flaky+=("${names[@]}")
  passed=$((passed + repeatable)) failed=$((failed - repeatable))
}

if ((install)); then
  step "packages"
  deploy/install_packages.sh
fi

if ((stress)); then
  if ((sanitizers)); then presets=(asan tsan); else presets=(release); fi
  for preset in "${presets[@]}"; do build_and_test "$preset"; done
elif ((long)); then
  export KVMILL_LONG=1
  build_and_test release
else
  build_and_test release -LE '^long$'
fi
if ((sanitizers && !stress && !broken)); then
  build_and_test asan -LE '^(slow|long|lint)$'
  build_and_test tsan -LE '^(slow|long|lint)$'
fi

if ((broken && failed == 0)); then
  echo "run.sh: a build or ctest itself failed; see above" >&2
fi
((${#flaky[@]} == 0)) || printf '\nflaky: %s failed beside others and passed alone\n' "${flaky[*]}"
printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
((broken == 0 && failed == 0)) || exit 1
