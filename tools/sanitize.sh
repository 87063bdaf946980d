#!/usr/bin/env bash
# Builds the native code with sanitizers and runs it; any report ends the run with an error.
#
#   bash tools/sanitize.sh            the steps address, fuzz and thread, as tests/test_sanitizers.py runs them
#   bash tools/sanitize.sh STEP...    some of
#     address   AddressSanitizer and UBSan over the native test program, every instruction set
#     fuzz      each input in tests/fuzz/corpus, then FUZZ_SECONDS (5) of libFuzzer for every target
#     thread    ThreadSanitizer over tests/native/threads.cc
#     python    AddressSanitizer and UBSan over tests of kernels in Python: PYTEST_ARGS, or some that take minutes
#     valgrind  memcheck over the native test program, on the instruction sets that valgrind knows
#
# Takes Clang where there is one, which has libFuzzer and compiles the checks in kernels in seconds; CXX names
# another compiler. With GCC the step fuzz only runs the inputs it has. PYTHON names an interpreter with jaxlib, for
# its FFI headers. Builds stay in build/sanitize. Where a tool is missing it ends with code 77, saying which.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-.venv/bin/python}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")  # CMake looks for another one if told a relative path
if [ -z "${CXX:-}" ]; then
  CXX=$(compgen -c clang++ | grep -E '^clang\+\+(-[0-9]+)?$' | sort -V | tail -1) || CXX=c++
fi
export CXX
builds=build/sanitize/$(basename "$CXX")
mkdir -p "$builds"
memory=address,undefined,float-cast-overflow
# Where GCC (12, for one) watches uses after return it moves locals to memory that isn't aligned for 64-byte vectors,
# and stores to them end the program: only Clang watches these.
after_return=0
if [[ $CXX == *clang* ]]; then after_return=1; fi
export ASAN_OPTIONS=detect_leaks=1:detect_stack_use_after_return=$after_return
export UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1

missing() {
  echo "needs $1"
  exit 77
}

command -v cmake >/dev/null || missing cmake

# build NAME SANITIZERS SOURCES TARGET OPTION...: prints what cmake says only if it fails
build() {
  local directory=$builds/$1 sanitizers=$2 sources=$3 target=$4
  shift 4
  if [ -n "$sanitizers" ]; then
    { echo 'int main() { return 0; }' | "$CXX" -x c++ -fsanitize="$sanitizers" - -o "$builds/empty" &&
      "$builds/empty"; } 2>/dev/null || missing "a compiler with -fsanitize=$sanitizers, which $CXX isn't"
  fi
  { cmake -S "$sources" -B "$directory" -DCMAKE_BUILD_TYPE=None -DPython_EXECUTABLE="$python" \
      -DJAX_W4A8_SANITIZE="$sanitizers" "$@" &&
    cmake --build "$directory" --target "$target" -j 2; } >"$directory.log" 2>&1 || { cat "$directory.log"; return 1; }
}

# Handlers are built on the headers of the oldest jaxlib; newer ones lack what the fake of XLA's interface gives them.
oldest_headers() {
  "$python" -c 'import jaxlib.version as v; raise SystemExit(not v.__version__.startswith("0.10."))' ||
    missing "an interpreter with jaxlib 0.10"
}

address() {
  oldest_headers
  build address $memory tests/fuzz all
  "$builds/address/native/native_tests"
  "$builds/address/native/native_threads"
}

fuzz() {
  oldest_headers
  build address $memory tests/fuzz all
  local target log found
  for target in handlers kernels pack; do
    log=$builds/fuzz_$target.log found=$builds/found_$target
    rm -rf "$found" && mkdir "$found"
    { "$builds/address/fuzz_$target" -runs=0 "tests/fuzz/corpus/$target" &&
      "$builds/address/fuzz_$target" -seed=1 -max_len=128 -len_control=0 -timeout=20 \
        -max_total_time="${FUZZ_SECONDS:-5}" -artifact_prefix="$builds/" "$found" "tests/fuzz/corpus/$target"; \
    } >"$log" 2>&1 || { cat "$log"; return 1; }
    echo "fuzz_$target: $(grep '^Done' "$log")"
  done
}

thread() {
  build thread thread tests/native native_threads
  "$builds/thread/native_threads"
}

python() {
  local asan=libasan.so link=
  if [[ $CXX == *clang* ]]; then
    asan=libclang_rt.asan-$(uname -m).so link=-shared-libasan
  fi
  "$python" -m pip install --quiet nanobind
  build python $memory . _native -DCMAKE_MODULE_LINKER_FLAGS=$link \
    -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)"
  # The interpreter isn't built for it: the runtime has to come first, and with it the C++ library whose exceptions
  # it intercepts. Leaks are not looked for, since Python ends with much of its memory unfreed.
  LD_PRELOAD="$("$CXX" -print-file-name=$asan):$("$CXX" -print-file-name=libstdc++.so.6)" \
    ASAN_OPTIONS=detect_leaks=0 "$python" tools/with_native.py "$builds"/python/_native*.so -p no:cacheprovider \
    ${PYTEST_ARGS:-tests/test_attend.py tests/test_bit_equality.py tests/test_primitive.py tests/test_numerics.py \
      tests/test_packing.py tests/test_weights.py tests/test_bad_input.py}
}

valgrind() {
  command -v valgrind >/dev/null || missing valgrind
  build plain '' tests/native native_tests '-DCMAKE_CXX_FLAGS=-g1 -gdwarf-4'  # what every valgrind reads
  command valgrind --quiet --error-exitcode=1 "$builds/plain/native_tests"
}

[ $# -gt 0 ] || set -- address fuzz thread
for step in "$@"; do
  echo "== $step ($CXX)"
  "$step"
done
