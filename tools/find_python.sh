#!/usr/bin/env bash
# Prints the path of a Python >= 3.11 that can make virtual environments; exits 1 with one line on stderr where there is none.
#
#   tools/find_python.sh            the `python3` of this shell where it is new enough, else the next best
#   tools/find_python.sh newest     the newest one on the machine
#   tools/find_python.sh 3.11       that minor version where there is one, else as without an argument
#
# PYTHON=/path/to/python overrides the search. Every candidate is run, since a pyenv shim may exist and yet run nothing.
set -euo pipefail
want=${1:-any}

# "MINOR PATH" for a final CPython >= 3.11 with venv and pip, nothing otherwise. PATH is sys.executable, so shims resolve to the real one.
probe() {
  "$1" -c '
import sys
if sys.version_info >= (3, 11) and sys.version_info.releaselevel == "final":
    import ensurepip, venv
    print(sys.version_info.minor, sys.executable)' 2>/dev/null || true
}

if [[ -n ${PYTHON:-} ]]; then
  found=$(probe "$PYTHON")
  if [[ -z $found ]]; then
    echo "PYTHON=$PYTHON is not a Python >= 3.11 with the venv and ensurepip modules" >&2
    exit 1
  fi
  echo "${found#* }"
  exit
fi

candidates=(python3 python)
for minor in 15 14 13 12 11; do
  candidates+=("python3.$minor")
  for root in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.local/share/uv/python"; do
    for path in "$root"/*3."$minor".*/bin/python3; do [[ -x $path ]] && candidates+=("$path"); done
  done
  for folder in /usr/local/bin /usr/bin /opt/homebrew/bin; do
    [[ -x $folder/python3.$minor ]] && candidates+=("$folder/python3.$minor")
  done
done

first= newest= newest_minor=0
for candidate in "${candidates[@]}"; do
  found=$(probe "$candidate")
  [[ -z $found ]] && continue
  minor=${found%% *} path=${found#* }
  if [[ $want == "3.$minor" || ( $want == any ) ]]; then echo "$path"; exit; fi
  [[ -z $first ]] && first=$path
  if (( minor > newest_minor )); then newest=$path newest_minor=$minor; fi
done

if [[ -z $first ]]; then
  echo "no Python >= 3.11 with the venv and ensurepip modules found (on Debian: apt-get install python3 python3-venv);" \
    "name one with PYTHON=/path/to/python" >&2
  exit 1
fi
if [[ $want == newest ]]; then echo "$newest"; else echo "$first"; fi
