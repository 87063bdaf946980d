#include "attention.h"

#include <string.h>

#include <algorithm>

#include "scratch.h"

namespace jax_w4a8 {
namespace {

// Rows that meet a segment's keys while these are in a cache.
constexpr int64_t kChunkRows = 256;
// Chunks of at most so many rows are split by segments too where there are few of them.
constexpr int64_t kMostSplitRows = 128;
constexpr float kLog2E = 0x1.715476p+0f;

// Some tokens of a row of the batch, and one key and value head.
struct Chunk {
  int64_t row;
  int64_t head;
  int64_t token_begin;
  int64_t token_end;   // of those that are text
  int64_t tokens_end;  // padding included
  int64_t slot_begin;
  int64_t slot_end;

  int64_t segments() const { return (slot_end - slot_begin + kAttendSegment - 1) / kAttendSegment; }
};

class Attention {
 public:
  Attention(const AttendCall& call, const Kernels& kernels, Team& team)
      : call_(call), kernels_(kernels), team_(team), group_(call.heads / call.kv_heads) {
    chunk_tokens_ = std::min(std::max<int64_t>(1, kChunkRows / group_), call.tokens);
    chunks_ = (call.tokens + chunk_tokens_ - 1) / chunk_tokens_;
    items_ = call.batch * call.kv_heads * chunks_;
    const int64_t tile = kMostAttendRows;
    chunk_rows_ = (chunk_tokens_ * group_ + tile - 1) / tile * tile;
    if (items_ < 4 * team.threads() && chunk_rows_ <= kMostSplitRows) {
      for (int64_t item = 0; item < items_; ++item) {
        segments_ = std::max(segments_, ChunkOf(item).segments());
      }
    }
  }

  size_t LayOut(ScratchLayout layout) {
    const int64_t threads = team_.threads();
    state_size_ = chunk_rows_ * (call_.width + kAttendRowExtra);
    queries_ = layout.Take<float>(threads * chunk_rows_ * call_.dim);
    keys_ = layout.Take<float>(threads * kAttendSegment * call_.dim);
    scores_ = layout.Take<float>(threads * chunk_rows_ * kAttendStep);
    shrinkage_ = layout.Take<float>(threads * chunk_rows_);
    parts_ = layout.Take<float>(threads * state_size_);
    states_ = layout.Take<float>((segments_ > 1 ? items_ * segments_ : threads) * state_size_);
    return layout.size();
  }

  void Run() {
    if (segments_ > 1) {
      team_.ForEach(items_ * segments_, [&](int64_t item, int worker) {
        RunSegment(ChunkOf(item / segments_), item % segments_, worker, StateOf(item));
      });
      team_.ForEach(items_, [&](int64_t item, int) {
        const Chunk chunk = ChunkOf(item);
        Finish(chunk, StateOf(item * segments_), chunk.segments());
      });
      return;
    }
    // The latest tokens see the most slots: they come first, so that the threads end together.
    team_.ForEach(items_, [&](int64_t item, int worker) {
      const Chunk chunk = ChunkOf(items_ - 1 - item);
      RunSlots(chunk, chunk.slot_begin, chunk.slot_end, worker, StateOf(worker));
      Finish(chunk, StateOf(worker), 1);
    });
  }

 private:
  Chunk ChunkOf(int64_t item) const {
    Chunk chunk;
    chunk.head = item % call_.kv_heads;
    chunk.row = item / call_.kv_heads % call_.batch;
    chunk.token_begin = item / call_.kv_heads / call_.batch * chunk_tokens_;
    chunk.tokens_end = std::min(chunk.token_begin + chunk_tokens_, call_.tokens);
    const int64_t length = call_.lengths[chunk.row], start = call_.starts[chunk.row];
    chunk.token_end = std::max(chunk.token_begin, std::min(chunk.tokens_end, length));
    chunk.slot_begin = chunk.slot_end = 0;
    if (chunk.token_end == chunk.token_begin) return chunk;
    const int64_t seen = start + chunk.token_end;
    chunk.slot_end = (seen + kAttendStep - 1) / kAttendStep * kAttendStep;
    if (call_.window > 0) {
      const int64_t first = std::max<int64_t>(start + chunk.token_begin - call_.window + 1, 0);
      chunk.slot_begin = first / kAttendSegment * kAttendSegment;
    }
    return chunk;
  }

  float* StateOf(int64_t index) const { return states_ + index * state_size_; }

  void RunSegment(const Chunk& chunk, int64_t segment, int worker, float* state) {
    const int64_t begin = chunk.slot_begin + segment * kAttendSegment;
    if (begin >= chunk.slot_end) return;
    RunSlots(chunk, begin, std::min(begin + kAttendSegment, chunk.slot_end), worker, state);
  }

  void RunSlots(const Chunk& chunk, int64_t begin, int64_t end, int worker, float* state) {
    if (chunk.token_begin == chunk.token_end) return;
    const int64_t kv = chunk.row * call_.kv_heads + chunk.head;
    AttendArgs args = {};
    args.query_stride = call_.heads * call_.dim;
    args.queries = call_.queries + chunk.row * call_.tokens * args.query_stride +
                   chunk.head * group_ * call_.dim;
    args.keys = call_.keys + kv * call_.dim * call_.slots;
    args.values = call_.values + kv * call_.slots * call_.width;
    args.slots = call_.slots;
    args.dim = call_.dim;
    args.width = call_.width;
    args.group = group_;
    args.token_begin = chunk.token_begin;
    args.token_end = chunk.token_end;
    args.start = call_.starts[chunk.row];
    args.window = call_.window;
    args.scale = call_.scale * kLog2E;
    args.slot_begin = begin;
    args.slot_end = end;
    args.state = state;
    args.packed_queries = queries_ + worker * chunk_rows_ * call_.dim;
    args.packed_keys = keys_ + worker * kAttendSegment * call_.dim;
    args.scores = scores_ + worker * chunk_rows_ * kAttendStep;
    args.shrinkage = shrinkage_ + worker * chunk_rows_;
    args.part = parts_ + worker * state_size_;
    kernels_.attend(args);
  }

  void Finish(const Chunk& chunk, float* states, int64_t count) {
    for (int64_t token = chunk.token_begin; token < chunk.tokens_end; ++token) {
      const int64_t row = chunk.row * call_.tokens + token, head = chunk.head * group_;
      float* out = call_.out + (row * call_.heads + head) * call_.width;
      if (token >= chunk.token_end) {
        memset(out, 0, static_cast<size_t>(group_ * call_.width) * sizeof(float));
        continue;
      }
      for (int64_t i = 0; i < group_; ++i) {
        const int64_t place = (token - chunk.token_begin) * group_ + i;
        kernels_.finish_attention(
            states + place * (call_.width + kAttendRowExtra), count, state_size_, call_.width,
            call_.sinks ? call_.sinks + head + i : nullptr, out + i * call_.width);
      }
    }
  }

  const AttendCall& call_;
  const Kernels& kernels_;
  Team& team_;
  const int64_t group_;
  int64_t chunk_tokens_;
  int64_t chunks_;
  int64_t items_;
  int64_t chunk_rows_;    // in whole tiles
  int64_t segments_ = 1;  // of the chunk that has most, where chunks are split
  int64_t state_size_ = 0;
  float* queries_ = nullptr;  // all of these by thread
  float* keys_ = nullptr;
  float* scores_ = nullptr;
  float* shrinkage_ = nullptr;
  float* parts_ = nullptr;
  float* states_ = nullptr;  // by thread, or by chunk and segment
};

}  // namespace

bool RunAttend(const AttendCall& call, const Kernels& kernels, Team& team) {
  if (call.batch == 0 || call.tokens == 0 || call.heads == 0 || call.width == 0) return true;
  Attention attention(call, kernels, team);
  const Scratch scratch([&](ScratchLayout layout) { return attention.LayOut(layout); });
  if (!scratch.data()) return false;
  attention.Run();
  return true;
}

}  // namespace jax_w4a8
