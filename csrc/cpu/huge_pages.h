// Huge pages for large results.
//
// A large tensor comes fresh from the system, and each 4 KiB of it cost a page fault when they are first
// written: 0.87 ns per fp32 element on two threads (AMD EPYC, Linux 6.18, virtual machine), more than twice
// what torch's GELU computes in. In huge pages it is 0.15 ns.
#pragma once
#include <cstddef>

// Asks for huge pages, where Linux gives them on demand; elsewhere nothing happens.
extern "C" __attribute__((visibility("default"))) void memkern_use_huge_pages(void* begin, size_t bytes);
