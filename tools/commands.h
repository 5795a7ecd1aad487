// The subcommands: add_x(app) registers one subcommand with its options and callback; main.cpp
// calls them in the order of the help text.
#pragma once

#include <CLI/CLI.hpp>

namespace oscar {

void add_capture(CLI::App& app);
void add_calibrate(CLI::App& app);
void add_simulate(CLI::App& app);
void add_eval(CLI::App& app);
void add_compare(CLI::App& app);
void add_report(CLI::App& app);
void add_inspect(CLI::App& app);
void add_generate(CLI::App& app);
void add_tokenize(CLI::App& app);
void add_bench_cpu(CLI::App& app);
void add_bench_kernels(CLI::App& app);

}  // namespace oscar
