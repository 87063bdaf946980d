// Cases of attention over a cache.
#include <math.h>

#include <algorithm>

#include "attention.h"
#include "cases.h"
#include "operands.h"
#include "team.h"

namespace jax_w4a8 {
namespace {

struct Heads {
  int64_t heads, kv_heads, dim, width;

  std::string Name() const {
    return std::to_string(heads) + "of" + std::to_string(kv_heads) + "x" + std::to_string(dim) +
           "x" + std::to_string(width);
  }
};

// A run of tokens behind `start` others. In a batch, row r starts r places later and has r tokens
// fewer.
struct Span {
  int64_t start, tokens;
};

struct Kind {
  int64_t batch = 1;
  int64_t window = 0;
  bool sinks = false;
  int order = 0;          // binary order of the queries: scores are far apart where it is high
  float odd_query = 0;    // takes the place of one input of token 1, where there is one
  bool odd_slot = false;  // the middle token's own slot holds infinities: earlier tokens' bits stay
  int threads = 1;

  std::string Name() const {
    std::string name = batch > 1 ? ".batch" + std::to_string(batch) : "";
    if (window) name += ".window" + std::to_string(window);
    if (sinks) name += ".sinks";
    if (order) name += ".order" + std::to_string(order);
    if (isnan(odd_query)) name += ".one_nan";
    if (isinf(odd_query)) name += ".one_infinity";
    if (odd_slot) name += ".infinite_slot";
    return name + (threads > 1 ? ".threads" + std::to_string(threads) : "");
  }
};

void RunCase(const Heads& heads, const Span& span, const Kind& kind, const Kernels& kernels,
             Checksum& out) {
  const int64_t seen = span.start + kind.batch - 1 + span.tokens;
  // A step of slots that no token sees: what is there must not matter.
  const int64_t slots = (seen + kAttendStep - 1) / kAttendStep * kAttendStep + kAttendStep;
  Random random(static_cast<uint64_t>(seen));
  std::vector<float> queries =
      random.Floats(kind.batch * span.tokens * heads.heads * heads.dim, kind.order - 3, kind.order);
  if (span.tokens > 1 && kind.odd_query != 0) {
    queries[static_cast<size_t>(heads.heads * heads.dim)] = kind.odd_query;
  }
  const auto keys = random.Floats(kind.batch * heads.kv_heads * heads.dim * slots, -4, 0);
  auto values = random.Floats(kind.batch * heads.kv_heads * slots * heads.width, -6, 2);
  if (kind.odd_slot) {
    const int64_t slot = span.start + span.tokens / 2;
    for (int64_t head = 0; head < kind.batch * heads.kv_heads; ++head) {
      const auto row = values.begin() + (head * slots + slot) * heads.width;
      std::fill(row, row + heads.width, INFINITY);
    }
  }
  const auto sinks = random.Floats(heads.heads, -3, 3);
  std::vector<int32_t> starts, lengths;
  for (int64_t row = 0; row < kind.batch; ++row) {
    starts.push_back(static_cast<int32_t>(span.start + row));
    lengths.push_back(static_cast<int32_t>(std::max<int64_t>(span.tokens - row, 0)));
  }
  std::vector<float> y(static_cast<size_t>(kind.batch * span.tokens * heads.heads * heads.width),
                       1.0f);
  AttendCall call = {};
  call.queries = queries.data();
  call.keys = keys.data();
  call.values = values.data();
  call.starts = starts.data();
  call.lengths = lengths.data();
  call.sinks = kind.sinks ? sinks.data() : nullptr;
  call.batch = kind.batch;
  call.tokens = span.tokens;
  call.heads = heads.heads;
  call.kv_heads = heads.kv_heads;
  call.slots = slots;
  call.dim = heads.dim;
  call.width = heads.width;
  call.window = kind.window;
  call.scale = 0.125f;
  call.out = y.data();
  WithTeam(kind.threads, [&](Team& team) { out.AddInt(RunAttend(call, kernels, team)); });
  out.AddFloats(y);
}

void AddCase(Cases& cases, const Heads& heads, const Span& span, const Kind& kind) {
  const std::string name = "attend." + heads.Name() + ".start" + std::to_string(span.start) +
                           ".tokens" + std::to_string(span.tokens) + kind.Name();
  cases.push_back(
      {name, [=](const Kernels& k, Checksum& out) { RunCase(heads, span, kind, k, out); }});
}

Kind Threads(Kind kind, int threads) {
  kind.threads = threads;
  return kind;
}

}  // namespace

void AddAttentionCases(Cases& cases) {
  // Heads that fill tiles and that don't, a width of one vector left over.
  const Heads shapes[] = {{1, 1, 16, 16}, {8, 2, 64, 64}, {6, 2, 20, 48}, {7, 1, 128, 80}};
  // One token and several, on both sides of steps of 64 and segments of 256.
  const Span spans[] = {{0, 1}, {63, 1}, {64, 3}, {255, 2}, {700, 1}, {0, 70}, {230, 33}};
  Kind windowed, sinking, far, both, odd, infinite, odd_slot, odd_in_window;
  windowed.window = 50;
  sinking.sinks = true;
  far.order = 12;
  both.batch = 3;
  both.window = 300;
  both.sinks = true;
  odd.odd_query = NAN;
  infinite.odd_query = INFINITY;
  odd_slot.odd_slot = true;
  odd_in_window = odd_slot;
  odd_in_window.window = 5;
  for (const Heads& heads : shapes) {
    for (const Span& span : spans) AddCase(cases, heads, span, {});
    for (const Kind& kind :
         {windowed, sinking, far, both, odd, infinite, odd_slot, odd_in_window}) {
      AddCase(cases, heads, {230, 33}, kind);
    }
    for (const Kind& kind : {Kind(), windowed, both}) {
      AddCase(cases, heads, {700, 1}, Threads(kind, 3));   // split by segments
      AddCase(cases, heads, {400, 90}, Threads(kind, 3));  // split by tokens alone
    }
  }
}

}  // namespace jax_w4a8
