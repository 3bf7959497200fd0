#include "plan.h"

#include <algorithm>
#include <list>

namespace memkern {
namespace {

// Bytes that travel as a kernel's argument; CUDA allows 32,764 in all.
template <int Bytes> struct Chunk {
  uint4 part[Bytes / sizeof(uint4)];
};
constexpr int kSmall = 3584, kLarge = 31744;

template <int Bytes> __global__ void __launch_bounds__(kThreads)
    write_table(uint4* to, int parts, const __grid_constant__ Chunk<Bytes> chunk) {
  for (int i = threadIdx.x; i < parts; i += kThreads) to[i] = chunk.part[i];
}

template <int Bytes> void write_chunk(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  Chunk<Bytes> chunk;
  memcpy(chunk.part, from, bytes);
  launch_checked("write_table", write_table<Bytes>, 1, stream, reinterpret_cast<uint4*>(to),
                 static_cast<int>(bytes / sizeof(uint4)), chunk);
}

void write(char* to, const char* from, size_t bytes, cudaStream_t stream) {
  for (size_t done = 0; done < bytes; done += kLarge) {
    const size_t n = std::min<size_t>(bytes - done, kLarge);
    if (n <= kSmall)
      write_chunk<kSmall>(to + done, from + done, n, stream);
    else
      write_chunk<kLarge>(to + done, from + done, n, stream);
  }
}

// What a device holds. The key need not be right, only likely: the whole image is compared.
struct Plan {
  std::string op;
  int device;
  cudaStream_t stream;
  const void* first;
  size_t count;
  std::vector<char> image;  // as it is on the device
  Tensor memory;
};

constexpr size_t kMostPlans = 64;

struct Plans {
  std::mutex mutex;
  std::list<Plan> all;  // the one used last is the first
};

Plans& plans() {
  static Plans* found = new Plans;  // never freed: at exit CUDA may be gone before its memory is
  return *found;
}

bool is_capturing(cudaStream_t stream) {
  // The default stream cannot be captured, and to ask about it is an error while another stream that waits
  // for it is.
  if (stream == nullptr) return false;
  cudaStreamCaptureStatus status;
  check_cuda(cudaStreamIsCapturing(stream, &status), "cudaStreamIsCapturing");
  return status != cudaStreamCaptureStatusNone;
}

Tensor allocate(const Tensor& like, size_t bytes) {
  return torch::stable::new_empty(like, {static_cast<int64_t>(bytes)}, ScalarType::Byte);
}

}  // namespace

Twin upload(const Image& image, size_t scratch, const char* op, const Tensor& first, size_t count,
            cudaStream_t stream) {
  const std::vector<char>& now = image.bytes();
  std::unique_lock lock(plans().mutex);
  if (is_capturing(stream)) {
    // Memory of the graph's own pool, written whole: a replay depends on nothing that other steps leave
    // behind.
    Tensor memory = allocate(first, now.size() + scratch);
    keep_for_replay(memory);
    write(static_cast<char*>(memory.data_ptr()), now.data(), now.size(), stream);
    return {memory, std::move(lock)};
  }
  auto& all = plans().all;
  auto plan = std::find_if(all.begin(), all.end(), [&](const Plan& p) {
    return p.first == first.data_ptr() && p.count == count && p.stream == stream &&
           p.device == first.get_device() && p.op == op;
  });
  if (plan == all.end()) {
    if (all.size() == kMostPlans) all.pop_back();
    all.push_front({op, first.get_device(), stream, first.data_ptr(), count, {}, allocate(first, 0)});
  } else {
    all.splice(all.begin(), all, plan);
  }
  plan = all.begin();
  const size_t bytes = now.size() + scratch;
  if (plan->image.size() != now.size() || static_cast<size_t>(plan->memory.numel()) < bytes) {
    plan->image.clear();  // should the allocation fail, nothing is taken for known
    plan->memory = allocate(first, bytes);
  }
  // Sections begin on 16 bytes, so the parts that differ are whole ones.
  size_t begin = 0, end = now.size();
  if (plan->image.size() == end) {
    const auto same = [&](size_t place) {
      return memcmp(now.data() + place, plan->image.data() + place, sizeof(uint4)) == 0;
    };
    while (begin < end && same(begin)) begin += sizeof(uint4);
    while (begin < end && same(end - sizeof(uint4))) end -= sizeof(uint4);
  }
  if (begin < end) {
    plan->image.clear();
    write(static_cast<char*>(plan->memory.data_ptr()) + begin, now.data() + begin, end - begin, stream);
  }
  plan->image = now;
  return {plan->memory, std::move(lock)};
}

}  // namespace memkern
