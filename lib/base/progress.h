// How long-running library code reports progress and notices an interruption, without printing or
// knowing about signals.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <string>

#include "base/error.h"

namespace oscar {

struct ProgressUpdate {
  std::string stage;  // what is being done, for example "capture"
  size_t done = 0;    // units finished
  size_t total = 0;   // units in all, 0 = unknown
  std::string unit;   // "tokens", "windows", ...
};

// Passed by reference into long work; a default-constructed one is silent and cannot be
// interrupted.
struct Progress {
  std::function<void(const ProgressUpdate&)> report;  // may be empty
  const std::atomic<bool>* interrupted =
      nullptr;  // may be null; set by the signal handler of the tool

  // Reports, then throws Interrupted when the user asked to stop.
  void step(const ProgressUpdate& update) const {
    if (report) report(update);
    check();
  }
  void check() const {
    if (interrupted != nullptr && interrupted->load(std::memory_order_relaxed)) throw Interrupted();
  }
};

}  // namespace oscar
