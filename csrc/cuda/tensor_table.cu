// upload_table, and the cache of the tables that are on devices.
#include "tensor_table.h"

#include <algorithm>
#include <list>

namespace memkern {
namespace {

// Bytes that are sent as a kernel's argument; CUDA allows 32,764 bytes of arguments.
template <int Bytes> struct Chunk {
  uint4 words[Bytes / sizeof(uint4)];
};
constexpr int kSmallChunk = 3584, kLargeChunk = 31744;

template <int Bytes> __global__ void __launch_bounds__(kThreads)
    write_table(uint4* to, int words, const __grid_constant__ Chunk<Bytes> chunk) {
  for (int i = threadIdx.x; i < words; i += kThreads) to[i] = chunk.words[i];
}

template <int Bytes> void write_chunk(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  Chunk<Bytes> chunk;
  memcpy(chunk.words, from, bytes);
  launch_checked("write_table", write_table<Bytes>, 1, stream, reinterpret_cast<uint4*>(to),
                 static_cast<int>(bytes / sizeof(uint4)), chunk);
}

void write(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  for (size_t done = 0; done < bytes; done += kLargeChunk) {
    const size_t n = std::min<size_t>(bytes - done, kLargeChunk);
    if (n <= kSmallChunk)
      write_chunk<kSmallChunk>(to + done, from + done, n, stream);
    else
      write_chunk<kLargeChunk>(to + done, from + done, n, stream);
  }
}

// A table on a device. The key (op to count) may find the wrong one: the whole image is compared.
struct CachedTable {
  std::string op;
  int device;
  cudaStream_t stream;
  const void* first;
  size_t count;
  std::vector<char> image;  // what is on the device; empty if that is not known
  Tensor memory;
};

constexpr size_t kMaxCachedTables = 64;

struct TableCache {
  std::mutex mutex;
  std::list<CachedTable> tables;  // the most recently used is the first

  CachedTable& find(const char* op, const Tensor& first, size_t count, cudaStream_t stream);
};

TableCache& cache() {
  static TableCache* found = new TableCache;  // never freed: at exit CUDA may be gone before its memory is
  return *found;
}

Tensor allocate(const Tensor& like, size_t bytes) {
  return torch::stable::new_empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

CachedTable& TableCache::find(const char* op, const Tensor& first, size_t count, cudaStream_t stream) {
  const auto found = std::find_if(tables.begin(), tables.end(), [&](const CachedTable& t) {
    return t.first == first.data_ptr() && t.count == count && t.stream == stream &&
           t.device == first.get_device() && t.op == op;
  });
  if (found == tables.end()) {
    if (tables.size() == kMaxCachedTables) tables.pop_back();
    tables.push_front({op, first.get_device(), stream, first.data_ptr(), count, {}, allocate(first, 0)});
  } else {
    tables.splice(tables.begin(), tables, found);
  }
  return tables.front();
}

}  // namespace

DeviceTable upload_table(const TableImage& image, size_t scratch, const char* op, const Tensor& first,
                         size_t count, cudaStream_t stream) {
  const std::vector<char>& now = image.bytes();
  const size_t bytes = now.size() + scratch;
  std::unique_lock lock(cache().mutex);
  if (is_capturing(stream)) {
    // In memory of the graph's own pool, and all of it: a replay does not depend on what other steps leave
    // behind.
    Tensor memory = allocate(first, bytes);
    keep_for_replay(memory);
    write(static_cast<char*>(memory.data_ptr()), now.data(), now.size(), stream);
    return {memory, std::move(lock)};
  }
  CachedTable& table = cache().find(op, first, count, stream);
  if (table.image.size() != now.size() || static_cast<size_t>(table.memory.numel()) < bytes) {
    table.image.clear();  // before the allocation, which may throw
    table.memory = allocate(first, bytes);
  }
  // From the first to the last 16 bytes that differ.
  size_t begin = 0, end = now.size();
  if (table.image.size() == end) {
    const auto same = [&](size_t offset) {
      return memcmp(now.data() + offset, table.image.data() + offset, sizeof(uint4)) == 0;
    };
    while (begin < end && same(begin)) begin += sizeof(uint4);
    while (begin < end && same(end - sizeof(uint4))) end -= sizeof(uint4);
  }
  if (begin < end) {
    table.image.clear();
    write(static_cast<char*>(table.memory.data_ptr()) + begin, now.data() + begin, end - begin, stream);
  }
  table.image = now;
  return {table.memory, std::move(lock)};
}

}  // namespace memkern
