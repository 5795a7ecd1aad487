#include "tools/console.h"

#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <memory>

namespace oscar {
namespace {

std::atomic<bool> g_interrupted{false};
int g_exit_code = kExitOk;

extern "C" void on_signal(int number) {
  if (g_interrupted.exchange(true)) {
    // The second signal ends the process at once.
    std::signal(number, SIG_DFL);
    std::raise(number);
  }
}

class Line {
 public:
  void show(const ProgressUpdate& update) {
    const auto now = std::chrono::steady_clock::now();
    if (update.stage != stage_) {
      finish();
      stage_ = update.stage;
      start_ = now;
      first_ = update.done;
    }
    const bool last = update.total != 0 && update.done >= update.total;
    if (!last && now - shown_ < std::chrono::milliseconds(200)) return;
    shown_ = now;
    const double elapsed_s = std::chrono::duration<double>(now - start_).count();
    const double done = static_cast<double>(update.done - first_);
    const double rate = elapsed_s > 0 ? done / elapsed_s : 0.0;
    std::string text = fmt::format("{}: {}", update.stage, update.done);
    if (update.total != 0) text += fmt::format("/{}", update.total);
    text += fmt::format(" {}", update.unit);
    if (rate > 0) text += fmt::format(", {:.3g}/s", rate);
    if (rate > 0 && update.total > update.done) {
      text +=
          fmt::format(", {:.0f} s left", static_cast<double>(update.total - update.done) / rate);
    }
    fmt::print(stderr, "\r{}\x1b[K", text);
    std::fflush(stderr);
    open_ = true;
    if (last) finish();
  }
  void finish() {
    if (open_) fmt::print(stderr, "\n");
    open_ = false;
    stage_.clear();
  }
  ~Line() { finish(); }

 private:
  std::string stage_;
  std::chrono::steady_clock::time_point start_, shown_;
  size_t first_ = 0;
  bool open_ = false;
};

}  // namespace

Progress console_progress(bool quiet) {
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  Progress progress;
  progress.interrupted = &g_interrupted;
  if (!quiet && isatty(STDERR_FILENO) != 0) {
    progress.report = [line = std::make_shared<Line>()](const ProgressUpdate& u) { line->show(u); };
  }
  return progress;
}

void show_warnings(const std::vector<std::string>& warnings, bool quiet) {
  if (quiet) return;
  for (const std::string& warning : warnings) fmt::print(stderr, "warning: {}\n", warning);
}

void set_exit_code(int code) { g_exit_code = code; }
int exit_code() { return g_exit_code; }

CLI::Range count_range() { return CLI::Range(0, 1 << 30); }

void add_threads_option(CLI::App& app, int& threads) {
  app.add_option("--threads", threads, "CPU threads (0 = all usable)")->check(CLI::Range(0, 1024));
}

}  // namespace oscar
