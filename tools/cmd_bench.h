// The parent of the `oscar bench ...` subcommands.
#pragma once

#include <CLI/CLI.hpp>

namespace oscar {

// The subcommand `bench` of app, created on first use: every add_bench_x(app) hangs its own
// subcommand under it.
CLI::App* bench_command(CLI::App& app);

}  // namespace oscar
