// What an op raises for bad input.
#pragma once
#include <sstream>
#include <stdexcept>
#include <string>

namespace memkern {

template <class... Args> std::string message_of(const Args&... args) {
  std::ostringstream text;
  ((text << args), ...);
  return text.str();
}

}  // namespace memkern

// Throws std::runtime_error, a RuntimeError in Python, unless the condition holds. As STD_TORCH_CHECK, but
// for the C++ file and line, which say nothing to users.
#define MEMKERN_CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(::memkern::message_of(__VA_ARGS__))
