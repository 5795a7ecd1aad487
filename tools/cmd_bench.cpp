#include "tools/cmd_bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "base/parallel.h"
#include "base/random.h"
#include "io/bundle_file.h"
#include "io/sha256.h"
#include "model/generate.h"
#include "model/weights.h"
#include "tools/cmd_generate.h"
#include "tools/commands.h"
#include "tools/console.h"
#include "tools/version.h"

namespace oscar {
namespace {

struct CpuBenchCommand {
  std::string model, arm = "bf16", bundle, compute = "fp32";
  std::vector<size_t> prefill{512, 2048}, decode{512, 4096};
  size_t decode_steps = 64, repeats = 3;
  int threads = 0;
  bool json = false, quiet = false, gemm = false, cpu_time = false;
};

// Seconds by the wall clock, or of processor time of all threads (comparable on a busy machine when
// one thread runs).
double elapsed_s(bool cpu_time, const std::function<void()>& work) {
  if (cpu_time) {
    const std::clock_t start = std::clock();
    work();
    return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
  }
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : 0.5 * (values[middle - 1] + values[middle]);
}

struct Measurement {
  std::string job;  // prefill, decode, gemm
  size_t context;   // tokens before (decode) or in (prefill) the measured work
  double rate;      // tokens/s or GFLOP/s, median of the repeats
  double best, worst;
};

// Multiplications and additions of the layers' matrices for one token.
double gflop_per_token(const ModelWeights& weights) {
  double elements = 0.0;
  for (const LayerWeights& w : weights.layers)
    for (const WeightMatrix* m : {&w.q, &w.k, &w.v, &w.o, &w.gate, &w.up, &w.down})
      elements += static_cast<double>(m->rows) * static_cast<double>(m->columns);
  return 2e-9 * elements;
}

Measurement summarize(std::string job, size_t context, double work,
                      const std::vector<double>& seconds) {
  const auto [shortest, longest] = std::minmax_element(seconds.begin(), seconds.end());
  return {std::move(job), context, work / median(seconds), work / *shortest, work / *longest};
}

std::vector<int32_t> random_tokens(size_t count, size_t vocab) {
  Random random(count);
  std::vector<int32_t> tokens(count);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random.below(vocab));
  return tokens;
}

class Bench {
 public:
  explicit Bench(const CpuBenchCommand& options)
      : options_(options),
        progress_(console_progress(options.quiet || options.json)),
        weights_(std::make_shared<const ModelWeights>(load_weights(options.model))),
        model_(weights_, parse_compute(options.compute)) {
    show_warnings(weights_->config.warnings, options.quiet);
    ArmOptions arm_options;
    std::optional<Bundle> bundle;
    if (!options.bundle.empty()) {
      bundle = read_bundle(options.bundle);
      arm_options.bundle_path = options.bundle;
    }
    arm_ = std::make_shared<const KvArm>(
        make_arm(options.arm, weights_->config, arm_options, bundle ? &*bundle : nullptr));
  }

  // Logits of the last token included, as a request needs them.
  Measurement prefill_rate(size_t length) {
    const std::vector<int32_t> tokens = random_tokens(length, weights_->config.vocab_size);
    std::vector<float> logits(weights_->config.vocab_size);
    std::vector<double> seconds;
    for (size_t repeat = 0; repeat <= options_.repeats; ++repeat) {
      KvCache cache(weights_->config, arm_);
      const double elapsed = elapsed_s(options_.cpu_time, [&] {
        const std::vector<float> state = prefill(model_, cache, tokens, {});
        model_.logits(state.data(), 1, logits.data());
      });
      progress_.step({"prefill", repeat + 1, options_.repeats + 1, "runs"});
      if (repeat > 0) seconds.push_back(elapsed);  // the first run warms up
    }
    return summarize("prefill", length, static_cast<double>(length), seconds);
  }

  // Steps at a nearly constant context: the cache is filled to `context` first.
  Measurement decode_rate(size_t context) {
    const size_t steps = options_.decode_steps;
    const size_t vocab = weights_->config.vocab_size;
    KvCache cache(weights_->config, arm_);
    prefill(model_, cache, random_tokens(context, vocab), {});
    std::vector<float> logits(vocab);
    int32_t token = 1;
    const auto step = [&] {
      const SequenceChunk chunk{{&token, 1}, &cache};
      const std::vector<float> state = model_.forward({&chunk, 1});
      model_.logits(state.data(), 1, logits.data());
      token = argmax_token(logits.data(), vocab);
    };
    for (size_t i = 0; i < 4; ++i) step();
    std::vector<double> seconds;
    for (size_t repeat = 0; repeat < options_.repeats; ++repeat) {
      seconds.push_back(elapsed_s(options_.cpu_time, [&] {
        for (size_t i = 0; i < steps; ++i) step();
      }));
      progress_.step({"decode", repeat + 1, options_.repeats, "runs"});
    }
    return summarize("decode", context, static_cast<double>(steps), seconds);
  }

  double gflop_per_token() const { return oscar::gflop_per_token(*weights_); }

  // Rate of the matrix products alone, on the gate weights and 2048 tokens: what a prefill could
  // reach without attention, norms and the rest.
  Measurement gemm_rate() {
    const WeightMatrix& weight = weights_->layers[0].gate;
    const size_t tokens = 2048;
    const std::vector<float> x(tokens * weight.columns, 0.5F);
    std::vector<float> out(tokens * weight.rows);
    const MatmulJob job{&weight, nullptr, out.data()};
    std::vector<double> seconds;
    for (size_t repeat = 0; repeat <= options_.repeats + 2; ++repeat) {
      const double elapsed = elapsed_s(options_.cpu_time, [&] {
        weight_matmul({&job, 1}, x.data(), tokens, parse_compute(options_.compute));
      });
      if (repeat > 0) seconds.push_back(elapsed);
    }
    const double flops = 2.0 * static_cast<double>(tokens) * static_cast<double>(weight.rows) *
                         static_cast<double>(weight.columns);
    return summarize("gemm", tokens, flops * 1e-9, seconds);
  }

 private:
  const CpuBenchCommand& options_;
  Progress progress_;
  std::shared_ptr<const ModelWeights> weights_;
  std::shared_ptr<const KvArm> arm_;
  Transformer model_;
};

void run_bench_cpu(const CpuBenchCommand& options) {
  OSCAR_CHECK(options.repeats > 0 && options.decode_steps > 0,
              "bench cpu: --repeats and --decode-steps must be at least 1");
  set_num_threads(options.threads);
  Bench bench(options);
  std::vector<Measurement> measured;
  if (options.gemm) measured.push_back(bench.gemm_rate());
  for (const size_t length : options.prefill)
    if (length > 0) measured.push_back(bench.prefill_rate(length));
  for (const size_t context : options.decode)
    if (context > 0) measured.push_back(bench.decode_rate(context));
  const char* backend = matmul_backend_name(parse_compute(options.compute));
  for (const Measurement& m : measured) {
    const char* unit = m.job == "gemm" ? "gflop_per_s" : "tokens_per_s";
    if (options.json) {
      const nlohmann::ordered_json row = {{"job", m.job},
                                          {"context", m.context},
                                          {unit, m.rate},
                                          {"best", m.best},
                                          {"worst", m.worst},
                                          {"compute", options.compute},
                                          {"backend", backend},
                                          {"simd", simd_name()},
                                          {"arm", options.arm},
                                          {"threads", num_threads()},
                                          {"clock", options.cpu_time ? "cpu" : "wall"},
                                          {"gflop_per_token", bench.gflop_per_token()},
                                          {"model", options.model},
                                          {"tool", tool_version()}};
      fmt::print("{}\n", row.dump());
    } else {
      fmt::print("{:8} {:6}  {:9.1f} {} (median of {}, {:.1f} .. {:.1f})\n", m.job, m.context,
                 m.rate, m.job == "gemm" ? "GFLOP/s" : "tokens/s", options.repeats, m.worst,
                 m.best);
    }
  }
}

}  // namespace

CLI::App* bench_command(CLI::App& app) {
  const auto found =
      app.get_subcommands([](const CLI::App* command) { return command->get_name() == "bench"; });
  if (!found.empty()) return found.front();
  CLI::App* bench = app.add_subcommand("bench", "speed of this machine on the tool's own work");
  bench->require_subcommand(1);
  bench->footer("Example:\n  oscar bench cpu --model model.gguf --prefill 512,2048 --decode 512");
  return bench;
}

void add_bench_cpu(CLI::App& app) {
  auto options = std::make_shared<CpuBenchCommand>();
  CLI::App* command =
      bench_command(app)->add_subcommand("cpu", "prefill and decode rates of a model on the CPU");
  command->add_option("--model", options->model, "GGUF file or Hugging Face folder")->required();
  command->add_option("--prefill", options->prefill, "prompt lengths, joined by commas, 0 = none")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--decode", options->decode, "contexts of decoding, joined by commas, 0 = none")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--decode-steps", options->decode_steps, "tokens decoded in one run")
      ->capture_default_str();
  command->add_option("--repeats", options->repeats, "runs, the median is printed")
      ->capture_default_str();
  command->add_flag("--gemm", options->gemm, "also the rate of the matrix products alone");
  command->add_option("--arm", options->arm, "how the cache is stored")->capture_default_str();
  command->add_option("--bundle", options->bundle, "calibration bundle for the oscar arms");
  command->add_option("--compute", options->compute, "matrix products: fp32 or bf16")
      ->capture_default_str();
  add_threads_option(*command, options->threads);
  command->add_flag("--cpu-time", options->cpu_time,
                    "count processor time instead of wall time (busy machine, --threads 1)");
  command->add_flag("--json", options->json, "one JSON object a line");
  command->add_flag("--quiet", options->quiet, "no progress on stderr");
  command->callback([options] { run_bench_cpu(*options); });
}

}  // namespace oscar
