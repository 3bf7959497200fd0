// What the fast paths assume of the device's approximate instructions, checked on the device itself:
// fast_path.cuh's roots for every float in their range, its divisions for as many pairs as are asked for, and
// how far sqrt.approx is off. Beside the compiler's own correctly rounded operations. ./exact [pairs as a
// power of two]
#include <bit>
#include <cstdio>
#include <cstdlib>

#include "cuda/fast_path.cuh"

using namespace memkern;

constexpr int kBlocks = 1024, kThreads = 256;  // of a launch

// Each thread's count of wrong results, and the bits of one of its operands.
struct Found {
  unsigned long long wrong;
  unsigned a, b;
};

static __device__ unsigned hash(unsigned long long x) {
  x ^= x >> 31;
  x *= 0x7FB5D329728EA185ull;
  x ^= x >> 27;
  x *= 0x81DADEF4BC2DD44Dull;
  return static_cast<unsigned>(x >> 32);
}

// A float with 23 random bits of mantissa and an exponent from 2^least to 2^(most - 1).
static __device__ float between(unsigned random, unsigned exponent, int least, int most) {
  const unsigned power = 127 + least + exponent % static_cast<unsigned>(most - least);
  return __uint_as_float(power << 23 | random >> 9);
}

static __device__ void note(Found& found, float a, float b) {
  ++found.wrong;
  found.a = __float_as_uint(a);
  found.b = __float_as_uint(b);
}

__global__ void roots(unsigned first, unsigned count, Found* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Found found{};
  for (unsigned long long i = thread; i < count; i += threads) {
    const float x = __uint_as_float(first + static_cast<unsigned>(i)), root = __fsqrt_rn(x);
    if (static_cast<float>(sqrt(Fast(x))) != root || static_cast<float>(sqrt(FastOrZero(x))) != root)
      note(found, x, root);
  }
  if (thread == 0 && __float_as_uint(static_cast<float>(sqrt(FastOrZero(0.0f)))) != 0)
    note(found, 0.0f, 0.0f);
  out[thread] = found;
}

// sqrt.approx within 2^-23 of the root, relatively; nothing is asked of denormals, which it takes for 0.
__global__ void approximate_roots(unsigned first, unsigned count, Found* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Found found{};
  for (unsigned long long i = thread; i < count; i += threads) {
    const float x = __uint_as_float(first + static_cast<unsigned>(i));
    const double root = ::sqrt(static_cast<double>(x));
    if (!(fabs(static_cast<double>(approximate_sqrt(x)) - root) <= root * 0x1p-23)) note(found, x, 0.0f);
  }
  out[thread] = found;
}

// rcp.approx within 2^-23 of the reciprocal, where that is a normal number.
__global__ void approximate_reciprocals(unsigned first, unsigned count, Found* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Found found{};
  for (unsigned long long i = thread; i < count; i += threads) {
    const float x = __uint_as_float(first + static_cast<unsigned>(i));
    const double reciprocal = 1.0 / static_cast<double>(x);
    if (!(fabs(static_cast<double>(approximate_reciprocal(x)) - reciprocal) <= reciprocal * 0x1p-23))
      note(found, x, 0.0f);
  }
  out[thread] = found;
}

// Numerators of 2^-80 to 2^60, of both signs, and zeros; denominators of 2^-51 to 2^41.
__global__ void divisions(unsigned long long first, unsigned long long count, Found* out) {
  const unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, threads = gridDim.x * blockDim.x;
  Found found{};
  for (unsigned long long i = thread; i < count; i += threads) {
    const unsigned long long k = 4 * (first + i);
    const unsigned exponents = hash(k + 2);
    float a = between(hash(k), exponents & 0xFFFF, -80, 60);
    if ((exponents & 0xFFF) == 0) a = 0.0f;
    if (hash(k + 3) & 1) a = -a;
    const float b = between(hash(k + 1), exponents >> 16, -51, 41);
    if (__float_as_uint(static_cast<float>(Fast(a) / Fast(b))) != __float_as_uint(__fdiv_rn(a, b)))
      note(found, a, b);
  }
  out[thread] = found;
}

static bool report(const char* what, double cases, Found* device, Found* host) {
  const int threads = kBlocks * kThreads;
  const cudaError_t status = cudaMemcpy(host, device, threads * sizeof(Found), cudaMemcpyDeviceToHost);
  if (status != cudaSuccess) {
    std::printf("{\"check\": \"%s\", \"error\": \"%s\"}\n", what, cudaGetErrorString(status));
    return false;
  }
  unsigned long long wrong = 0;
  Found one{};
  for (int i = 0; i < threads; ++i) {
    wrong += host[i].wrong;
    if (host[i].wrong) one = host[i];
  }
  std::printf("{\"check\": \"%s\", \"cases\": %.0f, \"wrong\": %llu, \"of\": [\"%08x\", \"%08x\"]}\n", what,
              cases, wrong, one.a, one.b);
  std::fflush(stdout);
  return wrong == 0;
}

int main(int argc, char** argv) {
  const unsigned long long pairs = 1ull << (argc > 1 ? std::atoi(argv[1]) : 33);
  Found* device = nullptr;
  const size_t bytes = kBlocks * kThreads * sizeof(Found);
  if (cudaMalloc(&device, bytes) != cudaSuccess) {
    std::printf("no CUDA device: %s\n", cudaGetErrorString(cudaGetLastError()));
    return 2;
  }
  Found* host = static_cast<Found*>(std::malloc(bytes));
  const unsigned least = std::bit_cast<unsigned>(kMinRadicand), most = std::bit_cast<unsigned>(kMaxRadicand);
  roots<<<kBlocks, kThreads>>>(least, most - least + 1, device);
  bool right = report("root", most - least + 1.0, device, host);
  approximate_roots<<<kBlocks, kThreads>>>(0x00800000, 0x7F800000 - 0x00800000, device);
  right &= report("approximate root", 0x7F800000 - 0x00800000, device, host);
  const unsigned low = std::bit_cast<unsigned>(kMinDenominator),
                 high = std::bit_cast<unsigned>(kMaxDenominator);
  approximate_reciprocals<<<kBlocks, kThreads>>>(low, high - low, device);
  right &= report("approximate reciprocal", high - low, device, host);
  divisions<<<kBlocks, kThreads>>>(0, pairs, device);
  right &= report("division", static_cast<double>(pairs), device, host);
  return right ? 0 : 1;
}
