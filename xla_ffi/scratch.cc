#include "scratch.h"

#include <stdlib.h>

#include <algorithm>
#include <mutex>
#include <vector>

#ifdef __linux__
#include <sys/mman.h>
#endif

namespace jax_w4a8 {
namespace {

struct Block {
  char* data;
  size_t size;
};

constexpr size_t kHugePage = size_t{1} << 21;

Block Allocate(size_t bytes) {
  const size_t alignment = bytes >= kHugePage ? kHugePage : 4096;
  const size_t size = (bytes + alignment - 1) / alignment * alignment;
#ifdef _WIN32
  char* data = static_cast<char*>(_aligned_malloc(size, alignment));
#else
  char* data = static_cast<char*>(aligned_alloc(alignment, size));
#endif
#ifdef __linux__
  // Large working memory is touched all over at every call; 4 KiB pages would fault thousands of
  // times.
  if (data && size >= kHugePage) madvise(data, size, MADV_HUGEPAGE);
#endif
  return {data, data ? size : 0};
}

void Free(const Block& block) {
#ifdef _WIN32
  _aligned_free(block.data);
#else
  free(block.data);
#endif
}

class Pool {
 public:
  // The smallest kept block that is large enough. If all are too small one of them is freed, so
  // that blocks outgrown by later calls don't pile up.
  Block Acquire(size_t bytes) {
    Block outgrown = {nullptr, 0};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto fit = std::find_if(kept_.begin(), kept_.end(),
                                    [bytes](const Block& block) { return block.size >= bytes; });
      const bool found = fit != kept_.end();
      if (!kept_.empty()) {
        const auto taken = found ? fit : kept_.end() - 1;
        outgrown = *taken;
        total_ -= taken->size;
        kept_.erase(taken);
      }
      if (found) return outgrown;
    }
    if (outgrown.data) Free(outgrown);
    return Allocate(bytes);
  }

  void Return(Block block) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (total_ + block.size <= Scratch::kMostKept && kept_.size() < kept_.capacity()) {
        const auto place = std::find_if(kept_.begin(), kept_.end(), [&](const Block& other) {
          return other.size >= block.size;
        });
        kept_.insert(place, block);
        total_ += block.size;
        return;
      }
    }
    Free(block);
  }

  size_t Release() {
    std::vector<Block> blocks;
    blocks.reserve(kMostBlocks);
    size_t freed = 0;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      blocks.swap(kept_);
      freed = total_;
      total_ = 0;
    }
    for (const Block& block : blocks) Free(block);
    return freed;
  }

 private:
  static constexpr size_t kMostBlocks = 256;

  static std::vector<Block> Reserved() {
    std::vector<Block> blocks;
    blocks.reserve(kMostBlocks);  // so that Return never allocates
    return blocks;
  }

  std::mutex mutex_;
  std::vector<Block> kept_ = Reserved();  // ascending by size
  size_t total_ = 0;
};

// Never destroyed: a call may still run on a pool thread while the process exits.
Pool& GetPool() {
  static Pool* pool = new Pool;
  return *pool;
}

}  // namespace

Scratch::Scratch(size_t bytes) {
  const Block block = GetPool().Acquire(bytes ? bytes : 1);
  data_ = block.data;
  size_ = block.size;
}

Scratch::~Scratch() {
  if (!data_) return;
  AllowAccess(data_, size_);
  GetPool().Return({data_, size_});
}

size_t ReleaseScratch() { return GetPool().Release(); }

}  // namespace jax_w4a8
