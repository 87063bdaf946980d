// Teams of threads for cases.
#ifndef JAX_W4A8_TESTS_NATIVE_TEAM_H_
#define JAX_W4A8_TESTS_NATIVE_TEAM_H_

#include <functional>

#include "parallel.h"

namespace jax_w4a8 {

// Calls run(team) with a team of that many. All but the caller flush subnormal numbers when they
// come, as XLA's threads do.
void WithTeam(int threads, const std::function<void(Team& team)>& run);

}  // namespace jax_w4a8

#endif  // JAX_W4A8_TESTS_NATIVE_TEAM_H_
