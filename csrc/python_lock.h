// Python's lock without Python.h: nothing where this process has no Python.
#pragma once
#include <dlfcn.h>

namespace memkern {

// Held or not, whoever drops the last C++ reference to a tensor that Python has too needs it; torch takes it
// for each anew, unless it is held: 40 us for 1,000 tensors.
class PythonLock {
 public:
  PythonLock() : held_(python().is_initialized && python().is_initialized()) {
    if (held_) state_ = python().ensure();
  }
  ~PythonLock() {
    if (held_) python().release(state_);
  }
  PythonLock(const PythonLock&) = delete;

 private:
  struct Python {
    int (*is_initialized)();
    int (*ensure)();
    void (*release)(int);
  };
  static const Python& python() {
    static const Python found = [] {
      Python p;
      find(p.is_initialized, "Py_IsInitialized");
      find(p.ensure, "PyGILState_Ensure");
      find(p.release, "PyGILState_Release");
      return p;
    }();
    return found;
  }
  template <class F> static void find(F& function, const char* name) {
    function = reinterpret_cast<F>(dlsym(RTLD_DEFAULT, name));
  }
  bool held_;
  int state_ = 0;
};

}  // namespace memkern
