#!/usr/bin/env bash
# Formatting, lint and types, with the tools that are on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff check .
ruff format --check .
git ls-files '*.cc' '*.h' | xargs clang-format --dry-run --Werror
mypy
