# The FFI handlers, `handlers`, which need jaxlib's headers but not jaxlib. Python_EXECUTABLE is an interpreter that
# has it.

# XLA's FFI is header-only. pyproject.toml pins the jaxlib whose headers these are to the oldest supported
# one: a handler built on newer headers would break the CPU backend of an older jaxlib.
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import importlib.util, os; \
print(os.path.join(importlib.util.find_spec('jaxlib').submodule_search_locations[0], 'include'))"
  OUTPUT_VARIABLE JAXLIB_INCLUDE
  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT EXISTS "${JAXLIB_INCLUDE}/xla/ffi/api/ffi.h")
  message(FATAL_ERROR "jaxlib has no FFI headers below ${JAXLIB_INCLUDE}")
endif()

add_library(handlers OBJECT ${NATIVE_SOURCES}/handlers.cc)
target_include_directories(handlers PUBLIC ${NATIVE_SOURCES})
target_include_directories(handlers SYSTEM PUBLIC ${JAXLIB_INCLUDE})
target_compile_options(handlers PRIVATE ${WARNINGS} $<$<NOT:$<CXX_COMPILER_ID:MSVC>>:-O2>)
