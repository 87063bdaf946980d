# Toolchain file: builds for 64-bit Arm Linux with Debian's cross compiler, as static programs, which
# qemu-aarch64 runs without a system of that kind.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_EXE_LINKER_FLAGS_INIT -static)
