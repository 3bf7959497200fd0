// upload_table, and the cache of the tables that are on devices.
#include "tensor_table.h"

#include <algorithm>
#include <list>
#include <map>
#include <tuple>

namespace memkern {
namespace {

// Bytes that are sent as a kernel's argument; CUDA allows 32,764 bytes of arguments.
template <int Bytes> struct Chunk {
  uint4 words[Bytes / sizeof(uint4)];
};
constexpr int kSmallChunk = 3584, kLargeChunk = 31744;

template <int Bytes> __global__ void __launch_bounds__(kThreads)
    write_table(uint4* to, int words, const __grid_constant__ Chunk<Bytes> chunk) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < words) to[i] = chunk.words[i];
}

template <int Bytes> void write_chunk(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  Chunk<Bytes> chunk;
  memcpy(chunk.words, from, bytes);
  const int words = static_cast<int>(bytes / sizeof(uint4));
  launch_checked("write_table", write_table<Bytes>, ceil_div(words, kThreads), stream,
                 reinterpret_cast<uint4*>(to), words, chunk);
}

void write(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  for (size_t offset = 0; offset < bytes; offset += kLargeChunk) {
    const size_t n = std::min<size_t>(bytes - offset, kLargeChunk);
    if (n <= kSmallChunk)
      write_chunk<kSmallChunk>(to + offset, from + offset, n, stream);
    else
      write_chunk<kLargeChunk>(to + offset, from + offset, n, stream);
  }
}

// Device memory that stays from step to step, from cudaMalloc. While torch.compile warms up for a CUDA graph,
// torch's allocator would take this thread's memory from the graph's pool, in which nothing may be left
// afterwards but the graph's outputs. Only if cudaMalloc finds none, it is from torch's allocator, which may
// have free memory cached.
class TableMemory {
 public:
  TableMemory() = default;
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;
  ~TableMemory() { release(); }

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  void grow(const Tensor& like, size_t bytes) {
    release();
    const RelaxedCapture relaxed;
    void* data = nullptr;
    if (const cudaError_t status = cudaMalloc(&data, bytes); status == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      torch_memory_ = new_bytes(like, bytes);
      data = torch_memory_->data_ptr();
    } else {
      check_cuda(status, "cudaMalloc");
    }
    data_ = static_cast<char*>(data);
    bytes_ = bytes;
  }

 private:
  // cudaFree waits for the kernels that may still read the memory.
  void release() {
    if (data_ && !torch_memory_) {
      const RelaxedCapture relaxed;
      cudaFree(data_);
    }
    torch_memory_.reset();
    data_ = nullptr;
    bytes_ = 0;
  }

  char* data_ = nullptr;
  size_t bytes_ = 0;
  std::optional<Tensor> torch_memory_;
};

// The key of a cached table: op, device, stream, a tensor of the step, and the number of tensors. In most
// cases it finds the table of the last step; as it may find another one, the whole image is compared.
using TableKey = std::tuple<std::string, int, StreamId, const void*, size_t>;

// A table on a device.
struct CachedTable {
  TableKey key;
  std::vector<char> image;  // what is on the device; empty if that is not known
  TableMemory memory;
};

// While there are more than kCachedTables tables and all take more than kCachedBytes, the one that has not
// been used for the longest time is dropped. StepInBackward has a table for each parameter, of about 500
// bytes.
constexpr size_t kCachedTables = 64, kCachedBytes = 32 << 20;

struct TableCache {
  std::mutex mutex;
  std::list<CachedTable> tables;  // the most recently used is the first
  std::map<TableKey, std::list<CachedTable>::iterator> places;
  size_t bytes = 0;

  CachedTable& find(const TableKey& key);
  void make_room(size_t more);
};

TableCache& cache() {
  static TableCache* tables = new TableCache;  // never freed: at exit CUDA may be gone before its memory is
  return *tables;
}

CachedTable& TableCache::find(const TableKey& key) {
  const auto place = places.find(key);
  if (place == places.end()) {
    tables.emplace_front().key = key;
    places[key] = tables.begin();
  } else {
    tables.splice(tables.begin(), tables, place->second);
  }
  return tables.front();
}

void TableCache::make_room(size_t more) {
  while (tables.size() > kCachedTables && bytes + more > kCachedBytes) {
    bytes -= tables.back().memory.bytes();
    places.erase(tables.back().key);
    tables.pop_back();
  }
}

}  // namespace

DeviceTable upload_table(const TableImage& image, size_t scratch, const char* op, const Tensor& first,
                         size_t count, cudaStream_t stream) {
  const std::vector<char>& new_image = image.bytes();
  const size_t bytes = new_image.size() + scratch;
  std::unique_lock lock(cache().mutex);
  if (is_capturing(stream)) {
    // In memory of the graph's own pool, and all of it: a replay does not depend on what other steps leave
    // behind.
    Tensor memory = new_bytes(first, bytes);
    char* data = static_cast<char*>(memory.data_ptr());
    write(data, new_image.data(), new_image.size(), stream);
    return {data, memory, std::move(lock)};
  }
  CachedTable& table = cache().find({op, first.get_device(), id_of(stream), first.data_ptr(), count});
  if (table.memory.bytes() < bytes) {
    table.image.clear();  // before the allocation, which may throw
    cache().bytes -= table.memory.bytes();
    cache().make_room(bytes);
    table.memory.grow(first, bytes);
    cache().bytes += bytes;
  }
  // From the first to the last 16 bytes that differ.
  size_t begin = 0, end = new_image.size();
  if (table.image.size() == end) {
    const auto is_same = [&](size_t offset) {
      return memcmp(new_image.data() + offset, table.image.data() + offset, sizeof(uint4)) == 0;
    };
    while (begin < end && is_same(begin)) begin += sizeof(uint4);
    while (begin < end && is_same(end - sizeof(uint4))) end -= sizeof(uint4);
  }
  if (begin < end) {
    table.image.clear();
    write(table.memory.data() + begin, new_image.data() + begin, end - begin, stream);
  }
  table.image = new_image;
  return {table.memory.data(), std::nullopt, std::move(lock)};
}

}  // namespace memkern
