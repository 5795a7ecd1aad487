// The executable `oscar`: a table of subcommands, version, and the one place where exceptions
// become messages and exit codes.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <exception>

#include "base/cpu.h"
#include "base/error.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/version.h"

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes is an error of the write that meets it
  CLI::App app{"oscar: 2-bit KV caches, calibrated and measured", "oscar"};
  app.set_version_flag("--version", [] { return oscar::version_text(); });
  app.require_subcommand(1);
  // Table of subcommands, in the order of the help text.
  oscar::add_capture(app);
  oscar::add_calibrate(app);
  oscar::add_simulate(app);
  oscar::add_eval(app);
  oscar::add_compare(app);
  oscar::add_report(app);
  oscar::add_inspect(app);
  oscar::add_generate(app);
  oscar::add_tokenize(app);
  oscar::add_bench_cpu(app);
  oscar::add_bench_kernels(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::RequiredError& error) {
    if (argc > 1 && app.get_subcommands().empty()) {
      fmt::print(stderr, "oscar: unknown subcommand '{}'; see oscar --help\n", argv[1]);
      return oscar::kExitFailed;
    }
    return app.exit(error) == 0 ? oscar::kExitOk : oscar::kExitFailed;
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? oscar::kExitOk : oscar::kExitFailed;
  } catch (const oscar::Interrupted&) {
    fmt::print(stderr, "oscar: interrupted\n");
    return oscar::kExitFailed;
  } catch (const std::exception& error) {
    fmt::print(stderr, "oscar: {}\n", error.what());
    return oscar::kExitFailed;
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    fmt::print(stderr, "oscar: standard output could not be written\n");
    return oscar::kExitFailed;
  }
  return oscar::exit_code();
}
