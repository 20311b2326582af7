#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types and tests, on a machine without a GPU and against the installed wheel.
# Arguments go to pytest: scripts/test.sh -k packaging
# PORTABLE_BACKEND_TEST_VENV names another environment than .venv-cpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$(scripts/install.sh --device cpu --extra test \
  ${PORTABLE_BACKEND_TEST_VENV:+--venv "$PORTABLE_BACKEND_TEST_VENV"})
python=$(realpath --no-symlinks "$venv")/bin/python
# No script's or working folder on sys.path: the checkout's kernels/ would shadow a package.
export PYTHONSAFEPATH=1

failed=()
check() {
  echo "== $1"
  "${@:2}" || failed+=("$1")
}

check_types() {
  # On a copy with the installed names: type checkers know nothing of mapped folders.
  local installed
  installed=$("$python" -c 'import portable_backend; print(*portable_backend.__path__)')
  rm -rf build/typecheck
  mkdir -p build/typecheck
  cp -r "$installed" build/typecheck
  (cd build/typecheck &&
    "$python" -m mypy --config-file ../../pyproject.toml --cache-dir ../../.mypy_cache \
      -p portable_backend)
}

report_types() {
  local status=0
  wait "$types" || status=$?
  cat build/types.log
  return "$status"
}

check lint "$python" -m ruff check .
check format "$python" -m ruff format --check .
# Beside the tests: each command leaves a core idle at times.
mkdir -p build
check_types >build/types.log 2>&1 &
types=$!
# Two workers; tests of one xdist_group, such as those that start an engine, stay in one.
check tests env TRITON_INTERPRET=1 "$python" -m pytest -n 2 --dist loadgroup "$@"
check types report_types

if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
