#!/usr/bin/env bash
# Sets everything up in .venv and runs all checks: formatting, lint, types, tests.
# PYTHON names the interpreter (3.11 or newer); arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet --editable '.[test]'
PATH=$PWD/$venv/bin:$PATH bash tools/lint.sh
# Two at once, whole files each: most of the time goes into compiling, which takes one core.
"$venv/bin/python" -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder "$@"
