#!/usr/bin/env bash
# Sets everything up in .venv, runs the pages' code and all notebooks, and builds the pages with warnings as
# errors; the result is docs/_build/html/index.html. PYTHON names the interpreter (3.11 or newer).
# With --update, notebooks keep the output of this run.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
python=$venv/bin/python
"$python" -m pip install --quiet --editable '.[docs]'
overwrite=()
if [ "${1:-}" = --update ]; then
  "$python" -m jupytext --quiet --update --to ipynb notebooks/*.py
  overwrite=(--overwrite)
fi
"$python" -m pytest -p no:cacheprovider tests/test_docs.py tests/test_qwix.py
# A kernel of its own for each notebook: they set up devices and time themselves.
"$python" -m pytest -p no:cacheprovider --nbmake --nbmake-timeout=300 --durations=0 "${overwrite[@]}" notebooks/*.ipynb
"$python" -m sphinx -W --keep-going -b html docs docs/_build/html
