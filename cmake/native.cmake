# The native library without its bindings: kernels, one object library for each instruction set, and `runtime`,
# which chooses and calls them. Needs neither Python nor jaxlib. The extension and the native test program are
# both built from what this file defines:
#
#   KERNEL_OBJECTS  object libraries to link beside `runtime`
#   WARNINGS        the project's warning flags
#
# JAX_W4A8_SANITIZE has all of it watched by sanitizers, named as the compiler names them.

include_guard(DIRECTORY)
include(CheckCXXCompilerFlag)

set(JAX_W4A8_SANITIZE "" CACHE STRING "sanitizers to build with: address,undefined or thread")
set(KERNEL_OPTIMIZATION -O3)
if(JAX_W4A8_SANITIZE)
  # Beyond -O1 the checks in unrolled kernels take compilers many minutes.
  set(KERNEL_OPTIMIZATION -O1)
  add_compile_options(-fsanitize=${JAX_W4A8_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_link_options(-fsanitize=${JAX_W4A8_SANITIZE})
endif()

set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_CXX_VISIBILITY_PRESET hidden)

get_filename_component(NATIVE_SOURCES "${CMAKE_CURRENT_LIST_DIR}/../xla_ffi" ABSOLUTE)

if(MSVC)
  set(WARNINGS /W4)
else()
  # In Clang, unlike GCC, -Wconversion has signs in it.
  set(WARNINGS -Wall -Wextra -Wshadow -Wconversion -Wno-sign-conversion)
endif()

# One object library for each instruction set, with its own flags; only its file sees them.
set(KERNEL_OBJECTS)
function(add_kernels name)
  add_library(kernels_${name} OBJECT ${NATIVE_SOURCES}/kernels/${name}.cc)
  target_include_directories(kernels_${name} PRIVATE ${NATIVE_SOURCES})
  if(NOT MSVC)
    # No contraction: a product and a sum may become one rounding only where the code says so.
    target_compile_options(kernels_${name} PRIVATE ${KERNEL_OPTIMIZATION} -ffp-contract=off -fno-math-errno
                           ${WARNINGS})
  endif()
  target_compile_options(kernels_${name} PRIVATE ${ARGN})
  target_compile_definitions(kernels_${name} PRIVATE ${TARGET_DEFINITIONS})
  set(KERNEL_OBJECTS ${KERNEL_OBJECTS} kernels_${name} PARENT_SCOPE)
endfunction()

set(TARGET_DEFINITIONS)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$" AND NOT MSVC)
  set(TARGET_DEFINITIONS JAX_W4A8_X86_64)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64|ARM64)$" AND NOT MSVC)
  set(TARGET_DEFINITIONS JAX_W4A8_AARCH64)
endif()
add_kernels(portable)
add_kernels(weights_portable $<$<NOT:$<CXX_COMPILER_ID:MSVC>>:-fno-trapping-math>)
if(TARGET_DEFINITIONS MATCHES X86_64)
  add_kernels(avx2 -mavx2 -mfma -mf16c)
  check_cxx_compiler_flag("-mavxvnni" COMPILER_HAS_AVX_VNNI)
  if(COMPILER_HAS_AVX_VNNI)
    list(APPEND TARGET_DEFINITIONS JAX_W4A8_AVX_VNNI)
    add_kernels(avx_vnni -mavx2 -mfma -mf16c -mavxvnni)
  endif()
  set(AVX512_VNNI -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c)
  # GCC's own intrinsics headers trip these two warnings (GCC bug 105593).
  set(INTRINSICS_WARNINGS $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized>
                          $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  add_kernels(avx512_vnni ${AVX512_VNNI} ${INTRINSICS_WARNINGS})
  check_cxx_compiler_flag("-mgfni -mamx-tile -mamx-int8" COMPILER_HAS_AMX)
  if(COMPILER_HAS_AMX)
    list(APPEND TARGET_DEFINITIONS JAX_W4A8_AMX)
    add_kernels(amx_int8 ${AVX512_VNNI} -mgfni -mamx-tile -mamx-int8 ${INTRINSICS_WARNINGS})
  endif()
  add_kernels(weights_avx2 -mavx2 -mfma -fno-trapping-math)
  add_kernels(weights_avx512_vnni ${AVX512_VNNI} -fno-trapping-math)
elseif(TARGET_DEFINITIONS MATCHES AARCH64)
  # Quantisation of weights is plain loops: weights_portable has NEON, which is part of the architecture.
  # Before registers are given out, GCC would move a tile's loads away from their products: its sums, which fill
  # the registers, would then live on the stack.
  set(IN_ORDER $<$<CXX_COMPILER_ID:GNU>:-fno-schedule-insns>)
  add_kernels(neon -march=armv8-a ${IN_ORDER})
  add_kernels(neon_dotprod -march=armv8.2-a+dotprod ${IN_ORDER})
  add_kernels(neon_i8mm -march=armv8.2-a+dotprod+i8mm ${IN_ORDER})
endif()

add_library(runtime OBJECT
            ${NATIVE_SOURCES}/attention.cc
            ${NATIVE_SOURCES}/kernels/cpu_arm.cc ${NATIVE_SOURCES}/kernels/cpu_x86.cc
            ${NATIVE_SOURCES}/kernels/dispatch.cc ${NATIVE_SOURCES}/matmul.cc ${NATIVE_SOURCES}/moe.cc
            ${NATIVE_SOURCES}/pack.cc ${NATIVE_SOURCES}/parallel.cc ${NATIVE_SOURCES}/probes.cc
            ${NATIVE_SOURCES}/scratch.cc)
target_include_directories(runtime PUBLIC ${NATIVE_SOURCES})
target_compile_definitions(runtime PUBLIC ${TARGET_DEFINITIONS})
target_compile_options(runtime PRIVATE ${WARNINGS} $<$<NOT:$<CXX_COMPILER_ID:MSVC>>:-O2>)

if(NOT MSVC)
  # Packed sums must have the bits that numpy computes: no contraction. Its loops work on whole words and
  # are short; made into vectors they take up to half as long again.
  set_source_files_properties(${NATIVE_SOURCES}/pack.cc PROPERTIES COMPILE_OPTIONS
                              "-O3;-ffp-contract=off;-fno-tree-vectorize")
endif()
