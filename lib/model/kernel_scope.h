// Calls a kernel table's start and stop functions around a thread's use of it.
#pragma once

namespace oscar {

class KernelScope {
 public:
  // Either may be null.
  KernelScope(void (*start)(), void (*stop)()) : stop_(stop) {
    if (start != nullptr) start();
  }
  ~KernelScope() {
    if (stop_ != nullptr) stop_();
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

 private:
  void (*stop_)();
};

}  // namespace oscar
