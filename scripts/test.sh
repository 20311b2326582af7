#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Lint, types and tests, on a machine without a GPU and against the installed wheel.
# Arguments go to pytest: scripts/test.sh -k packaging
# PORTABLE_BACKEND_TEST_VENV names another environment than .venv-cpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=$(scripts/install.sh --device cpu --extra test \
  ${PORTABLE_BACKEND_TEST_VENV:+--venv "$PORTABLE_BACKEND_TEST_VENV"})
# No script's or working folder on sys.path: the checkout's kernels/ would shadow a package.
export PYTHONSAFEPATH=1

echo "ruff"
"$venv/bin/python" -m ruff check .
"$venv/bin/python" -m ruff format --check .

echo "mypy"
# On a copy with the installed names: type checkers know nothing of mapped folders.
rm -rf build/typecheck
mkdir -p build/typecheck
cp -r "$("$venv/bin/python" -c 'import pathlib, portable_backend as p; print(pathlib.Path(p.__file__).parent)')" build/typecheck
(cd build/typecheck && "$venv/bin/python" -m mypy --config-file ../../pyproject.toml \
  --cache-dir ../../.mypy_cache -p portable_backend)

echo "pytest"
# Two workers; tests of one xdist_group, such as those that start an engine, stay in one.
TRITON_INTERPRET=1 "$venv/bin/python" -m pytest -n 2 --dist loadgroup "$@"
