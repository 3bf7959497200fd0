// Runs every CPU kernel of some instruction sets on the same data and prints a hash of what each wrote: one
// line per kernel and instruction set. Without torch, so that it can be compiled for another processor and
// emulated. Compiled with -DISAS="RUN(generic) RUN(neon)".
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "core/power.h"
#include "core/weights.h"
#include "cpu/kernels/jobs.h"
#include "cpu/simd/half.h"

using namespace memkern;

namespace {

struct Random {  // splitmix64
  uint64_t state;
  uint64_t next() {
    uint64_t z = state += 0x9E3779B97F4A7C15ull;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ z >> 27) * 0x94D049BB133111EBull;
    return z ^ z >> 31;
  }
  // Of either sign and magnitudes from 2^-40 to 2^4.
  float value() {
    const uint64_t r = next();
    const float mantissa = static_cast<float>(static_cast<int32_t>(r)) * 0x1p-31f;
    return mantissa * std::ldexp(1.0f, 4 - static_cast<int>((r >> 32) % 44));
  }
};

struct Hash {  // FNV-1a
  uint64_t h = 14695981039346656037ull;
  void add(uint64_t word) {
    for (int i = 0; i < 8; ++i) h = (h ^ (word >> (8 * i) & 255)) * 1099511628211ull;
  }
};

constexpr int kGuard = 64;  // bytes behind each array, which nobody may write

// An array of one of the types that kernels take.
struct Array {
  std::vector<char> bytes;
  int size;
  bool is_float;
  Array(int64_t count, int size_, bool is_float_)
      : bytes(count * size_ + kGuard, 0), size(size_), is_float(is_float_) {
    std::memset(bytes.data() + count * size, 0x5A, kGuard);
  }
  void* data() { return bytes.data(); }
  // A NaN is any NaN: processors differ in its sign and payload.
  void add_to(Hash& hash, bool is_bf16) {
    for (size_t i = 0; i + size <= bytes.size(); i += size) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i, size);
      const uint64_t infinity = size == 8   ? 0x7FF0000000000000
                                : size == 4 ? 0x7F800000
                                : is_bf16   ? 0x7F80
                                            : 0x7C00;
      const uint64_t magnitude = word & ~(uint64_t{1} << (8 * size - 1));
      hash.add(is_float && magnitude > infinity ? infinity + 1 : word);
    }
  }
};

int size_of(FloatType type) { return type == FloatType::kFp32 ? 4 : 2; }

Array floats(FloatType type, const std::vector<float>& values) {
  Array array(values.size(), size_of(type), true);
  for (size_t i = 0; i < values.size(); ++i) {
    if (type == FloatType::kFp32) static_cast<float*>(array.data())[i] = values[i];
    if (type == FloatType::kBf16) static_cast<bf16*>(array.data())[i] = to_bf16(values[i]);
    if (type == FloatType::kFp16) static_cast<fp16*>(array.data())[i] = to_fp16(values[i]);
  }
  return array;
}

// Random values; special: with zeros, infinities, NaN, subnormal and the largest numbers among them.
std::vector<float> values(int64_t count, uint64_t seed, bool special) {
  Random random{seed};
  std::vector<float> found(count);
  const float rare[] = {0.0f,    -0.0f,   INFINITY, -INFINITY, NAN,  1e-42f,
                        -1e-42f, 3.4e38f, -3.4e38f, 65504.0f,  6e-8f};
  for (float& x : found) {
    x = random.value();
    if (special && random.next() % 37 == 0) x = rare[random.next() % 11];
  }
  return found;
}

BlockLayout layout_of(int64_t rows, int64_t columns, int64_t block_size) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  BlockLayout layout;
  if (columns == 0) {  // one dimension
    const int64_t one = 1;
    block_layout(&rows, &one, 1, block_size, &layout);
  } else {
    block_layout(sizes, strides, 2, block_size, &layout);
  }
  return layout;
}

struct Dithers {
  std::vector<float> u, one_minus_u;
  Dithers(int64_t block, uint32_t step) : u(block + 16, 0.0f), one_minus_u(block + 16, 0.0f) {
    for (int64_t j = 0; j < block; ++j) {
      u[j] = dither(static_cast<uint32_t>(j), step);
      one_minus_u[j] = one_minus_dither(u[j]);
    }
  }
};

const char* g_isa;

void report(const std::string& name, const Hash& hash) {
  std::printf("%s %s %016llx\n", g_isa, name.c_str(), static_cast<unsigned long long>(hash.h));
}

std::string label(const char* kernel, std::initializer_list<int64_t> numbers) {
  std::string text = kernel;
  for (int64_t n : numbers) text += "," + std::to_string(n);
  return text;
}

// Rows and columns; 0 columns: one dimension.
constexpr int64_t kShapes[][2] = {{7, 0}, {3, 130}, {5, 300}, {1000, 0}, {2, 4097}, {40, 24}};
constexpr FloatType kTypes[] = {FloatType::kFp32, FloatType::kBf16, FloatType::kFp16};

// ---- codes

void codes(const Kernels& kernels, const std::vector<float>& data, const char* name) {
  for (StateKind kind : {StateKind::kPower, StateKind::kDynamic})
    for (FloatType type : kTypes)
      for (bool is_signed : {true, false})
        for (bool dithered : {false, true})
          for (int64_t block : {8, 100, 128, 200}) {
            std::vector<float> given = data;
            if (!is_signed)
              for (float& x : given) x = std::fabs(x);
            Array x = floats(type, given), codes(given.size(), 1, false);
            CodecJob job{};
            job.layout = layout_of(given.size(), 0, block);
            Array scale(job.layout.blocks, 4, true), back(given.size(), size_of(type), true);
            const Dithers dithers(job.layout.block, 7);
            if (dithered) job.dither = {dithers.u.data(), dithers.one_minus_u.data()};
            job.values = x.data();
            job.codes = codes.data();
            job.scale = static_cast<float*>(scale.data());
            kernels.codec(kind, type, is_signed, true)(job, 0, job.layout.blocks);
            job.values = back.data();
            kernels.codec(kind, type, is_signed, false)(job, 0, job.layout.blocks);
            Hash hash;
            codes.add_to(hash, false);
            scale.add_to(hash, false);
            back.add_to(hash, type == FloatType::kBf16);
            report(label(name, {int(kind), int(type), is_signed, dithered, block}), hash);
          }
}

// ---- sums of squares, whose order is the instruction set's

void squares(const Kernels& kernels) {
  for (FloatType type : kTypes)
    for (int64_t count : {1, 8, 100, 5000}) {
      Array x = floats(type, values(count, 3, false));
      SquaresJob job{};
      job.layout = layout_of(count, 0, 1 << 11);
      Array partial(job.layout.blocks, 8, true);
      job.values = x.data();
      job.partial = static_cast<double*>(partial.data());
      kernels.squares(type)(job, 0, job.layout.blocks);
      Hash hash;
      partial.add_to(hash, false);
      report(label("sum:squares", {int(type), count}), hash);
    }
}

// ---- steps

template <class Scalars> struct StepCase {
  const char* name;
  PickKernel<Scalars> pick;
  bool has_v;
  PickNorms<Scalars> norms = nullptr;
};

// Three steps of a tensor of each shape: hashes of what they write and, of kernels with norms, of the norms.
// scalars_of(step): the scalars of a step.
template <class J, class Scalars, class ScalarsOf> void steps(const StepCase<Scalars>& c, StateKind kind,
                                                              FloatType p, FloatType g, WeightStorage storage,
                                                              bool special, ScalarsOf scalars_of) {
  for (const auto& shape : kShapes)
    for (int64_t block : {64, 256}) {
      const BlockLayout l = layout_of(shape[0], shape[1], block);
      const bool coded = kind != StateKind::kFp32;
      Array param = floats(p, values(l.numel, 1, false)), m(l.numel, coded ? 1 : 4, !coded);
      Array v(l.numel, coded ? 1 : 4, !coded);
      Array m_scale(l.blocks, 4, true), v_scale(l.blocks, 4, true),
          update = floats(FloatType::kBf16, values(l.numel, 9, false));
      const int state_bytes = weight_state_bytes(storage);
      Array weight(l.numel, state_bytes ? state_bytes : 1, false);
      Hash hash, sums;
      for (int step = 1; step <= 3; ++step) {
        Array grad = floats(g, values(l.numel, 10 + step, special && step == 2));
        const Scalars scalars = scalars_of(step);
        const Dithers dithers(l.block, step);
        const int dropped =
            storage == WeightStorage::kStochastic ? kWeightDroppedStochastic : kWeightDroppedError8;
        std::vector<uint32_t> random(l.block + 16, 0);
        for (int64_t j = 0; j < l.block; ++j)
          random[j] = weight_random(static_cast<uint32_t>(j), step, dropped);
        J job{};
        job.param = param.data();
        job.grad = grad.data();
        job.m = m.data();
        job.v = c.has_v ? v.data() : nullptr;
        if (coded) job.m_scale = static_cast<float*>(m_scale.data());
        if (coded && c.has_v) job.v_scale = static_cast<float*>(v_scale.data());
        job.layout = l;
        job.kind = kind;
        job.param_type = p;
        job.grad_type = g;
        job.weight_state = state_bytes ? weight.data() : nullptr;
        job.weight_storage = storage;
        job.scalars = &scalars;
        if (coded) job.dither = {dithers.u.data(), dithers.one_minus_u.data()};
        job.weight_random = random.data();
        if constexpr (std::is_same_v<J, MuonJob>) job.update = update.data();
        if (c.norms) {
          const Squares found = c.norms(job)(job, 0, l.blocks);
          Array both(2, 8, true);
          std::memcpy(both.data(), &found, sizeof found);
          both.add_to(sums, false);
        }
        c.pick(job)(job, 0, l.blocks);
        param.add_to(hash, p == FloatType::kBf16);
        for (Array* each : {&m, &v, &m_scale, &v_scale, &weight}) each->add_to(hash, false);
        update.add_to(hash, true);
      }
      const auto numbers = {int64_t(kind),    int64_t(p), int64_t(g), int64_t(storage),
                            int64_t(special), shape[0],   shape[1],   block};
      report(label(c.name, numbers), hash);
      if (c.norms) report(label((std::string("sum:") + c.name).c_str(), numbers), sums);
    }
}

template <class J, class Scalars, class ScalarsOf>
void all_steps(const StepCase<Scalars>& c, std::initializer_list<StateKind> kinds, ScalarsOf scalars_of) {
  for (StateKind kind : kinds)
    for (bool special : {false, true}) {
      for (FloatType p : kTypes)
        for (FloatType g : kTypes) steps<J>(c, kind, p, g, WeightStorage::kNearest, special, scalars_of);
      for (int storage = 1; storage <= 3; ++storage)
        steps<J>(c, kind, FloatType::kBf16, FloatType::kBf16, static_cast<WeightStorage>(storage), special,
                 scalars_of);
    }
}

void optimizers(const Kernels& k) {
  const auto moments = {StateKind::kFp32, StateKind::kPower, StateKind::kDynamic};
  for (double coupled : {0.0, 1.0}) {
    const AdamHyperparameters adam{0.9, 0.999, 1e-8, 0.01, coupled, coupled};
    all_steps<AdamJob>(StepCase<AdamScalars>{coupled ? "adamw" : "adam", k.adam, true}, moments,
                       [&](int step) { return adam_scalars(1e-2, adam, 0.5, step); });
    const SgdHyperparameters sgd{0.9, 0.1, 0.01, coupled, 0.0};
    all_steps<SgdJob>(StepCase<SgdScalars>{coupled ? "nesterov" : "sgd", k.sgd, false}, moments,
                      [&](int step) { return sgd_scalars(1e-2, sgd, 0.5, step); });
  }
  const LionHyperparameters lion{0.9, 0.99, 0.01, 0.0};
  all_steps<LionJob>(StepCase<LionScalars>{"lion", k.lion, false}, moments,
                     [&](int) { return lion_scalars(1e-3, lion, 1.0); });
  const LambHyperparameters lamb{0.9, 0.999, 1e-6, 0.01, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0};
  all_steps<LambJob>(StepCase<LambScalars>{"lamb", k.lamb, true, k.lamb_norms}, moments, [&](int step) {
    LambScalars s = lamb_scalars(1e-2, lamb, 1.0, step);
    set_trust_ratio(s, 1e-2, 0.7f);
    return s;
  });
  const LarsHyperparameters lars{0.9, 0.0, 0.01, 0.0, 1e-3, 1e-8, 0.0, 0.0, 1.0, 0.0};
  all_steps<LarsJob>(StepCase<LarsScalars>{"lars", k.lars, false, k.lars_norms}, moments, [&](int step) {
    LarsScalars s = lars_scalars(1e-2, lars, 1.0, step);
    set_trust_ratio(s, 1e-2, 0.7f);
    return s;
  });
  const MuonHyperparameters muon{0.95, 1.0, 0.1, 0.0};
  const auto scalars = [&](int) { return muon_scalars(2e-2, muon, 1.0, 0.2); };
  all_steps<MuonJob>(StepCase<MuonScalars>{"muon_momentum", k.muon_momentum, false}, moments, scalars);
  all_steps<MuonJob>(StepCase<MuonScalars>{"muon_apply", k.muon_apply, false}, {StateKind::kFp32}, scalars);
}

// ---- activations

void activations(const Kernels& kernels) {
  for (int64_t count : {1, 63, 64, 1000, 5000})
    for (FloatType type : kTypes) {
      Array x = floats(type, values(count, 5, true)), grad = floats(type, values(count, 6, true));
      for (int bits = 1; bits <= kMaxBits; ++bits)
        for (int symmetry = 0; symmetry < 3; ++symmetry) {
          ThresholdsOfPlanes thresholds{symmetry, bits, {}, {}};
          int found = 0;
          for (int p = 0; p < bits; ++p) {
            thresholds.first[p] = found;
            for (int i = 0; i <= 1 << p; ++i) thresholds.threshold[found++] = 0.03f * i - 0.02f * p;
          }
          thresholds.first[bits] = found;
          float levels[1 << kMaxBits];
          for (int i = 0; i < 1 << kMaxBits; ++i) levels[i] = 0.1f * i - 0.3f;
          TwoBranch two_branch{};
          two_branch.coefficients = 4;
          two_branch.minimum = -0.17f;
          for (int side = 0; side < 2; ++side) {
            two_branch.reach[side] = 1.5f + side;
            two_branch.scale[side] = 2.0f / two_branch.reach[side];
            for (int i = 0; i < 4; ++i) two_branch.polynomial[side][i] = 0.3f - 0.11f * i + 0.07f * side;
          }
          ActivationJob job{};
          job.layout = layout_of(count, 0, kGroup);
          job.plane = plane_bytes(count);
          Array codes(bits * job.plane, 1, false), result(count, size_of(type), true),
              other(count, size_of(type), true);
          job.input = x.data();
          job.codes = static_cast<uint8_t*>(codes.data());
          job.thresholds = &thresholds;
          job.levels = levels;
          job.two_branch = &two_branch;
          kernels.encode(type, bits)(job, 0, job.layout.blocks);
          job.input = grad.data();
          job.result = result.data();
          kernels.levels(type, bits)(job, 0, job.layout.blocks);
          Hash hash;
          codes.add_to(hash, false);
          result.add_to(hash, type == FloatType::kBf16);
          if (bits == 1) {
            job.output = x.data();
            job.result = other.data();
            kernels.two_branch(type, type)(job, 0, job.layout.blocks);
            other.add_to(hash, type == FloatType::kBf16);
          }
          report(label("activation", {count, int(type), bits, symmetry}), hash);
        }
    }
}

void run(const char* name, const Kernels& kernels) {
  g_isa = name;
  codes(kernels, values(3000, 2, false), "codes");
  codes(kernels, values(3000, 4, true), "special codes");
  std::vector<float> every_bf16(1 << 16), every_fp16(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) {
    every_bf16[i] = to_float(bf16{static_cast<uint16_t>(i)});
    every_fp16[i] = to_float(fp16{static_cast<uint16_t>(i)});
  }
  codes(kernels, every_bf16, "every bf16");
  codes(kernels, every_fp16, "every fp16");
  squares(kernels);
  activations(kernels);
  optimizers(kernels);
}

// Runs one kernel once, over whole blocks of 128, for counting its instructions
// (lab/studies/cpu_instructions.py).
void run_one(const Kernels& kernels, const std::string& what, int64_t count) {
  const FloatType type = what.find("bf16") != std::string::npos ? FloatType::kBf16 : FloatType::kFp32;
  const BlockLayout l = layout_of(count, 0, 128);
  Array x(count, size_of(type), true), grad(count, size_of(type), true), m(count, 1, false),
      v(count, 1, false);
  Array m_scale(l.blocks, 4, true), v_scale(l.blocks, 4, true);
  const Dithers dithers(l.block, 1);
  const AdamScalars adam = adam_scalars(1e-2, {0.9, 0.999, 1e-8, 0.01, 1.0, 0.0}, 1.0, 1);
  const LionScalars lion = lion_scalars(1e-3, {0.9, 0.99, 0.01, 0.0}, 1.0);
  for (int64_t i = 0; i < count; ++i) {  // 1.0, cheaply
    if (type == FloatType::kFp32) static_cast<float*>(grad.data())[i] = 1.0f;
    if (type == FloatType::kBf16) static_cast<bf16*>(grad.data())[i] = {0x3F80};
  }
  const auto step = [&](auto job, const auto& scalars, auto pick) {
    job.param = x.data();
    job.grad = grad.data();
    job.m = m.data();
    job.v = v.data();
    job.m_scale = static_cast<float*>(m_scale.data());
    job.v_scale = static_cast<float*>(v_scale.data());
    job.layout = l;
    job.kind = StateKind::kPower;
    job.param_type = job.grad_type = type;
    job.scalars = &scalars;
    job.dither = {dithers.u.data(), dithers.one_minus_u.data()};
    pick(job)(job, 0, l.blocks);
  };
  if (what.rfind("Adam", 0) == 0) return step(AdamJob{}, adam, kernels.adam);
  if (what.rfind("Lion", 0) == 0) return step(LionJob{}, lion, kernels.lion);
  const bool quantize = what.rfind("quantize", 0) == 0;
  CodecJob job{};
  job.layout = l;
  job.values = grad.data();
  job.codes = m.data();
  job.scale = static_cast<float*>(m_scale.data());
  kernels.codec(StateKind::kPower, type, true, quantize)(job, 0, l.blocks);
}

}  // namespace

// Without arguments every kernel; with an instruction set, a kernel and a number of elements that one.
int main(int argc, char** argv) {
#define RUN(isa)                           \
  if (argc == 1) run(#isa, isa::kKernels); \
  if (argc == 4 && !std::strcmp(argv[1], #isa)) run_one(isa::kKernels, argv[2], std::atoll(argv[3]));
  ISAS
}
