#!/usr/bin/env bash
# Installs what tests/test_native.py needs for the Arm instruction sets, where this may be done without asking: as
# root, on Debian or Ubuntu. Without them those tests say so and are skipped.
set -uo pipefail
if command -v qemu-aarch64 && command -v aarch64-linux-gnu-g++; then exit 0; fi >/dev/null
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then exit 0; fi
export DEBIAN_FRONTEND=noninteractive
install=(timeout 120 apt-get install -yqq --no-install-recommends g++-aarch64-linux-gnu qemu-user)
"${install[@]}" >/dev/null 2>&1 || { timeout 60 apt-get update -qq && "${install[@]}" >/dev/null; } || true
