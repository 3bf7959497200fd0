#include "huge_pages.h"

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

void memkern_use_huge_pages(void* begin, size_t bytes) {
#ifdef MADV_HUGEPAGE
  const uintptr_t page = sysconf(_SC_PAGESIZE), from = reinterpret_cast<uintptr_t>(begin);
  const uintptr_t first = (from + page - 1) / page * page, last = (from + bytes) / page * page;
  // The advice may be refused: then pages are small.
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#endif
}
