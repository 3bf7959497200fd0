// What an optimizer's step will read first, asked for before it begins. The records of its tensors and
// torch's handles to them lie all over the heap, and after a forward and a backward in no cache: a step of
// 148 tensors waits 0.3 ms for them, one after the other (Zen 5, in a process that has done other work).
// Where they lie is what the step before has noted, so all can be asked for at once.
#pragma once
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace memkern {

// For each thread by itself. Addresses are never read through, so it does no harm that one may be out of
// date.
class Recall {
 public:
  // Asks for what was noted after the last call with this key, and begins anew. A key is one optimizer's.
  static void begin(int64_t key) {
    thread_local std::unordered_map<int64_t, std::vector<Noted>> all;
    if (all.size() >= kKeys && !all.count(key)) all.clear();  // optimizers that are gone
    now = &all[key];
    for (const Noted& noted : *now) {
      __builtin_prefetch(noted.handle, 1);
      for (int i = 0; i < kRecord; i += 64) __builtin_prefetch(noted.record + i);
    }
    now->clear();
  }

  static void note(const void* handle, const void* record) {
    if (now && now->size() < kMost) now->push_back({handle, static_cast<const char*>(record)});
  }

 private:
  struct Noted {
    const void* handle;
    const char* record;
  };
  static constexpr int kRecord = 256;  // bytes of a tensor's record
  static constexpr size_t kKeys = 16, kMost = 1 << 14;
  inline static thread_local std::vector<Noted>* now = nullptr;
};

}  // namespace memkern
