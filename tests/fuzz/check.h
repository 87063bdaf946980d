// A check that ends the process, so that a fuzzer keeps the input.
#ifndef JAX_W4A8_TESTS_FUZZ_CHECK_H_
#define JAX_W4A8_TESTS_FUZZ_CHECK_H_

#include <stdio.h>
#include <stdlib.h>

// Further arguments are those of printf.
#define JAX_W4A8_CHECK(condition, ...)                                \
  do {                                                                \
    if (!(condition)) {                                               \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      fprintf(stderr, __VA_ARGS__);                                   \
      fputc('\n', stderr);                                            \
      abort();                                                        \
    }                                                                 \
  } while (false)

#endif  // JAX_W4A8_TESTS_FUZZ_CHECK_H_
