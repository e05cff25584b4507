# Checks of option values that the scripts share; sourced, with the script's name in $script.
# shellcheck shell=bash

# need OPTION VALUE: ends the script with 2 when the value is missing.
need() {
  if [[ -z "${2:-}" ]]; then
    echo "${script:?}: $1 needs a value" >&2
    exit 2
  fi
}

# need_count OPTION VALUE: ends the script with 2 when the value is not a number from 1.
need_count() {
  if [[ ! "$2" =~ ^[1-9][0-9]*$ ]]; then
    echo "${script:?}: $1 $2: want a number from 1" >&2
    exit 2
  fi
}
