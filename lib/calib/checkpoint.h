// The state of an unfinished streaming calibration, saved from time to time beside the output, so
// that a run that was killed continues with the same numbers.
#pragma once

#include <chrono>
#include <cstddef>
#include <string>

#include "calib/collector.h"
#include "io/moments_file.h"

namespace oscar {

class Checkpoint {
 public:
  // path empty: nothing is saved. seconds: between two savings, 0 = after every sequence.
  // collected: names of the sums that the run needs.
  Checkpoint(const std::string& path, double seconds, const std::string& collected);
  bool enabled() const { return !path_.empty(); }
  // Restores sums from the file of an earlier run, if there is one, and tells `needs` how many
  // sequences they hold and the checksum of their rows. Throws Error naming the file, what differs
  // and what to do when the file was made from something else or cannot be read.
  void resume(const MomentsInfo& info, Collector& collector, const ContestOptions& windows,
              VisitNeeds& needs);
  // Saves when it is time to (or at once): rows first, then the sums under their final name.
  void sequence_done(const MomentsInfo& info, const Collector& collector, size_t sequences_done,
                     ActivationSource& source);
  void save_now(const MomentsInfo& info, const Collector& collector, ActivationSource& source);
  void remove();

 private:
  std::string path_, collected_;
  double seconds_;
  std::chrono::steady_clock::time_point saved_;
  size_t done_ = 0, saved_done_ = 0;
};

}  // namespace oscar
