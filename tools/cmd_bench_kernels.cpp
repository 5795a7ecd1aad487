// `oscar bench kernels`: the CUDA kernels against the memory's ceilings and, where PyTorch is,
// cuDNN.
#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>

#include "base/error.h"
#include "io/results.h"
#include "kernels/kernel_bench.h"
#include "kernels/prefill_bench.h"
#include "kernels/rows_bench.h"
#include "tools/cmd_bench.h"
#include "tools/commands.h"
#include "tools/version.h"

namespace oscar {
namespace {

struct KernelBenchCommand {
  std::string shape = "32x8x128";
  std::vector<std::string> contexts = {"4k", "32k", "128k"};
  std::vector<int> batches = {1, 8, 32};
  int sink = 64, recent = 256;
  std::string against;
  std::string python = "python3";
  std::string script;  // empty: cudnn_sdpa.py beside the program
  std::string out;
};

#if OSCAR_CUDA_BUILT

struct Shape {
  int num_q_heads, num_kv_heads, head_dim;
};

Shape parse_shape(const std::string& text) {
  Shape shape{};
  char extra = 0;
  OSCAR_CHECK(std::sscanf(text.c_str(), "%dx%dx%d%c", &shape.num_q_heads, &shape.num_kv_heads,
                          &shape.head_dim, &extra) == 3 &&
                  shape.num_q_heads > 0 && shape.num_kv_heads > 0 && shape.head_dim > 0 &&
                  shape.num_q_heads % shape.num_kv_heads == 0,
              "--shape: query heads x KV heads x head_dim expected, for example 32x8x128, got \"",
              text, "\"");
  return shape;
}

int parse_context(const std::string& text) {
  int value = 0;
  char unit = 0, extra = 0;
  const int fields = std::sscanf(text.c_str(), "%d%c%c", &value, &unit, &extra);
  OSCAR_CHECK((fields == 1 || (fields == 2 && (unit == 'k' || unit == 'K'))) && value > 0 &&
                  value < (1 << 20),
              "--context: a number of tokens, for example 4096 or 4k, expected, got \"", text,
              "\"");
  return fields == 2 ? value * 1024 : value;
}

std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char c : text) result += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return result + "'";
}

std::filesystem::path script_path(const KernelBenchCommand& options) {
  if (!options.script.empty()) return options.script;
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path();
  for (const char* relative : {"../share/oscar/cudnn_sdpa.py", "../../scripts/cudnn_sdpa.py"}) {
    if (std::filesystem::exists(program / relative)) return program / relative;
  }
  fail("--against cudnn: cudnn_sdpa.py not found beside ", program.string(),
       "; give it with --script");
}

// Times of cuDNN by (context, batch), measured by the Python script on the same machine.
std::map<std::pair<int64_t, int>, double> measure_cudnn(const KernelBenchCommand& options,
                                                        const std::vector<int>& contexts) {
  std::string command = options.python + " " + quoted(script_path(options).string()) + " " +
                        options.shape + " " + fmt::format("{}", fmt::join(contexts, ",")) + " " +
                        fmt::format("{}", fmt::join(options.batches, ","));
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  OSCAR_CHECK(pipe != nullptr, "--against cudnn: cannot start ", command);
  std::string text;
  std::array<char, 4096> buffer{};
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe.get()))
    text.append(buffer.data(), count);
  std::map<std::pair<int64_t, int>, double> times;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const auto row = nlohmann::json::parse(line, nullptr, false);
    if (row.is_discarded() || !row.contains("time_us")) continue;
    times[{row["context"].get<int64_t>(), row["batch"].get<int>()}] = row["time_us"].get<double>();
  }
  OSCAR_CHECK(!times.empty(), "--against cudnn: no measurement came back from ", command,
              " (PyTorch with CUDA is needed)");
  return times;
}

ResultRow row_of(const KernelTiming& timing, const std::string& device, double bf16_us) {
  ResultRow row;
  row.suite = "kernels";
  row.cell = fmt::format("{}-{}x{}", timing.shape, timing.context, timing.batch);
  row.metric = "time_us";
  row.arm = timing.op;
  row.n = timing.replays;
  row.value = timing.time_us;
  row.sum = timing.time_us * timing.replays;
  row.ci_lo = timing.time_us_min;
  row.ci_hi = timing.time_us_max;
  row.ci_method = "range";
  row.numbers = {{"time_us", timing.time_us},
                 {"context", static_cast<double>(timing.context)},
                 {"batch", timing.batch},
                 {"bytes", timing.bytes},
                 {"bandwidth_tb_per_s", timing.bandwidth_tb_per_s},
                 {"read_fraction", timing.read_fraction}};
  if (timing.tflop_per_s > 0) row.numbers["tflop_per_s"] = timing.tflop_per_s;
  if (bf16_us > 0) {
    row.numbers["bf16_time_us"] = bf16_us;
    row.numbers["ratio_to_bf16"] = bf16_us / timing.time_us;
  }
  row.labels = {{"op", timing.op},
                {"shape", timing.shape},
                {"device", device},
                {"tool", tool_version()},
                {"method", "graph replay, cold L2, median and range"}};
  return row;
}

void print_row(const ResultRow& row) {
  const auto optional = [&](const char* name) {
    const auto found = row.numbers.find(name);
    return found == row.numbers.end() ? std::string("-") : fmt::format("{:.2f}", found->second);
  };
  fmt::print("{:<28} {:<10} {:>7} {:>5} {:>9.1f} {:>8.1f} {:>8.1f} {:>6.2f} {:>6.1f} {:>8} {:>8}\n",
             row.arm, row.labels.at("shape"), row.numbers.at("context"), row.numbers.at("batch"),
             row.value, row.ci_lo, row.ci_hi, row.numbers.at("bandwidth_tb_per_s"),
             100.0 * row.numbers.at("read_fraction"), optional("tflop_per_s"),
             optional("ratio_to_bf16"));
  std::fflush(stdout);
}

// Dequantize, repack, page copies and rotation.
std::vector<KernelTiming> bench_rows(const Shape& shape, double read) {
  RowsBenchShape rows;
  rows.num_q_heads = shape.num_q_heads;
  rows.num_kv_heads = shape.num_kv_heads;
  rows.head_dim = shape.head_dim;
  std::vector<KernelTiming> timings = {bench_dequantize(rows, read), bench_copy_pages(rows, read)};
  for (const auto layout : {EngineRows::Layout::kSglang, EngineRows::Layout::kVllm}) {
    for (const auto direction : {RepackDirection::kToRows, RepackDirection::kToRecords})
      timings.push_back(bench_repack(rows, direction, layout, read));
  }
  rows.tokens = 4096;
  timings.push_back(bench_dequantize(rows, read));
  timings.push_back(bench_rotate(rows, read));
  return timings;
}

// 4096 new tokens, alone and after 28K cached ones, on both paths.
std::vector<KernelTiming> bench_prefills(const Shape& shape, double read) {
  std::vector<KernelTiming> timings;
  for (const int cached : {0, 28672}) {
    for (const PrefillPath path : {PrefillPath::kAuto, PrefillPath::kPortable}) {
      PrefillBenchShape prefill;
      prefill.num_q_heads = shape.num_q_heads;
      prefill.num_kv_heads = shape.num_kv_heads;
      prefill.head_dim = shape.head_dim;
      prefill.cached = cached;
      prefill.path = path;
      timings.push_back(bench_prefill(prefill, read));
    }
  }
  return timings;
}

void run_bench_kernels(const KernelBenchCommand& options) {
  const Shape shape = parse_shape(options.shape);
  std::vector<int> contexts;
  for (const std::string& text : options.contexts) contexts.push_back(parse_context(text));
  OSCAR_CHECK(options.against.empty() || options.against == "cudnn",
              "--against: cudnn expected, got \"", options.against, "\"");
  OSCAR_CHECK(bench_has_device(), "bench kernels: no CUDA device found on this machine");
  const std::string device = bench_device_name();
  const Ceilings ceilings = measure_ceilings();
  const double read = ceilings.read.bandwidth_tb_per_s;
  std::vector<ResultRow> rows;
  const auto add = [&](const KernelTiming& timing, double bf16_us) {
    rows.push_back(row_of(timing, device, bf16_us));
    print_row(rows.back());
  };
  fmt::print("{}\n{:<28} {:<10} {:>7} {:>5} {:>9} {:>8} {:>8} {:>6} {:>6} {:>8} {:>8}\n", device,
             "op", "shape", "context", "batch", "us", "min", "max", "TB/s", "% read", "TFLOP/s",
             "x BF16");
  for (KernelTiming timing : {ceilings.copy, ceilings.read}) {
    timing.read_fraction = timing.bandwidth_tb_per_s / read;
    add(timing, 0);
  }
  std::map<std::pair<int64_t, int>, double> cudnn;
  if (!options.against.empty()) cudnn = measure_cudnn(options, contexts);
  for (const int context : contexts) {
    for (const int batch : options.batches) {
      DecodeBenchShape decode;
      decode.num_q_heads = shape.num_q_heads;
      decode.num_kv_heads = shape.num_kv_heads;
      decode.head_dim = shape.head_dim;
      decode.context = context;
      decode.batch = batch;
      decode.sink = options.sink;
      decode.recent = options.recent;
      const auto found = cudnn.find({context, batch});
      const double bf16_us = found == cudnn.end() ? 0.0 : found->second;
      add(bench_decode(decode, read), bf16_us);
      if (context >= 32768) {  // what the windows and the random order of pages cost
        DecodeBenchShape plain = decode;
        plain.random_pages = false;
        add(bench_decode(plain, read), bf16_us);
        plain = decode;
        plain.sink = plain.recent = 0;
        add(bench_decode(plain, read), bf16_us);
      }
      if (batch > 1) continue;  // only short launches show what overlapping them brings
      decode.overlap_launch = false;
      add(bench_decode(decode, read), bf16_us);
    }
  }
  struct WriteLoad {
    int tokens, jobs, layers;
    bool feedback, rotate;
  };
  // A prefill chunk, a long one, flushes of 8 and 16 tokens of 32 sequences x 36 layers.
  for (const WriteLoad& load :
       {WriteLoad{4096, 1, 1, false, false}, WriteLoad{32768, 1, 1, false, false},
        WriteLoad{8, 1152, 36, false, false}, WriteLoad{16, 1152, 36, false, false},
        WriteLoad{4096, 1, 1, false, true}, WriteLoad{32768, 1, 1, false, true},
        WriteLoad{16, 1152, 36, false, true}, WriteLoad{4096, 1, 1, true, false},
        WriteLoad{4096, 1, 1, true, true}, WriteLoad{8, 1152, 36, true, false},
        WriteLoad{16, 1152, 36, true, false}}) {
    WriteBenchShape write;
    write.num_kv_heads = shape.num_kv_heads;
    write.head_dim = shape.head_dim;
    write.tokens = load.tokens;
    write.num_jobs = load.jobs;
    write.layers = load.layers;
    write.feedback = load.feedback;
    write.rotate = load.rotate;
    add(bench_write(write, read), 0);
  }
  for (const KernelTiming& timing : bench_rows(shape, read)) add(timing, 0);
  for (const KernelTiming& timing : bench_prefills(shape, read)) add(timing, 0);
  if (!options.out.empty()) write_rows(rows, options.out);
}

#else

void run_bench_kernels(const KernelBenchCommand&) {
  fail("bench kernels: this build has no CUDA kernels (configure with -DOSCAR_CUDA=ON)");
}

#endif

}  // namespace

void add_bench_kernels(CLI::App& app) {
  auto options = std::make_shared<KernelBenchCommand>();
  CLI::App* command = bench_command(app)->add_subcommand(
      "kernels", "time of the CUDA kernels, beside copy and read ceilings");
  command->add_option("--shape", options->shape, "query heads x KV heads x head_dim")
      ->capture_default_str();
  command->add_option("--context", options->contexts, "tokens, joined by commas (4k = 4096)")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--batch", options->batches, "sequences, joined by commas")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--sink", options->sink, "BF16 tokens at the start")->capture_default_str();
  command->add_option("--recent", options->recent, "BF16 tokens at the end")->capture_default_str();
  command->add_option("--against", options->against,
                      "cudnn: also time cuDNN's BF16 attention through PyTorch");
  command->add_option("--python", options->python, "interpreter that has PyTorch")
      ->capture_default_str();
  command->add_option("--script", options->script, "path of cudnn_sdpa.py");
  command->add_option("--out", options->out, "rows.jsonl to write");
  command->callback([options] { run_bench_kernels(*options); });
}

}  // namespace oscar
