// What every subcommand shares: exit codes, Ctrl-C, progress on stderr, common option names.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "base/progress.h"

namespace oscar {

inline constexpr int kExitOk = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUnderThreshold = 2;  // measured, but under the demanded threshold

// Progress that prints one rewritten line on stderr (rate, ETA) when it is a terminal, nothing
// otherwise, and stops long work on Ctrl-C (SIGINT, SIGTERM).
Progress console_progress(bool quiet = false);

// One "warning:" line each on stderr. Every command that opens a model shows
// ModelConfig::warnings, unless it is quiet.
void show_warnings(const std::vector<std::string>& warnings, bool quiet);

// Exit code of a finished subcommand, set by its callback and returned by main().
void set_exit_code(int code);
int exit_code();

// Numbers of tokens, windows or sequences: 0 .. 2^30 (a negative number is an error, not a huge
// one).
CLI::Range count_range();

// --threads N (0 = all usable CPUs), applied when the subcommand runs.
void add_threads_option(CLI::App& app, int& threads);

}  // namespace oscar
