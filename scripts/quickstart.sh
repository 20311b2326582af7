#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From nothing to an answer: install, serve a small model with portable, ask it a question.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
install=()
options=()
current=

# What runs scripts/quickstart.py before there is an environment.
is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }
find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if is_recent "$candidate"; then
      echo "$candidate"
      return
    fi
  done
  printf 'quickstart: needs Python 3.11 or later, and finds none on PATH\n' >&2
  exit 1
}

while [ $# -gt 0 ]; do
  case $1 in
    --use-current-env) current=1 && shift ;;
    --venv | --python | --device)
      [ $# -gt 1 ] || { printf 'quickstart: %s needs a value\n' "$1" >&2 && exit 2; }
      install+=("$1" "$2") && shift 2
      ;;
    --venv=* | --python=* | --device=*)
      install+=("${1%%=*}" "${1#*=}") && shift
      ;;
    -h | --help)
      cat <<TXT
usage: scripts/quickstart.sh [--venv DIR] [--python PYTHON] [--device auto|cpu|cuda] [OPTIONS]
       scripts/quickstart.sh --use-current-env [OPTIONS]

The first form makes a virtual environment (scripts/install.sh --help says how) and uses it.
The second installs nothing: python3 on PATH must have vLLM, openai and portable-backend.
OPTIONS are those of scripts/quickstart.py:

TXT
      python=$(find_python)
      exec "$python" -P "$scripts/quickstart.py" --help
      ;;
    --) options+=("$@") && break ;;
    *) options+=("$1") && shift ;;
  esac
done

if [ -n "$current" ]; then
  [ ${#install[@]} = 0 ] || {
    printf 'quickstart: --use-current-env installs nothing, so it takes no %s\n' "${install[0]}" >&2
    exit 2
  }
  is_recent python3 || {
    printf 'quickstart: --use-current-env needs a python3 on PATH that is 3.11 or later\n' >&2
    exit 1
  }
  exec python3 -P "$scripts/quickstart.py" "${options[@]}"
fi
# What is wrong with the options should be said before minutes of installing.
if is_recent python3; then
  python3 -P "$scripts/quickstart.py" --check-only "${options[@]}"
fi
venv=$("$scripts/install.sh" "${install[@]}")
exec "$venv/bin/python" -P "$scripts/quickstart.py" "${options[@]}"
