#include <catch2/catch.hpp>

#include "base/error.h"
#include "gpu/mixed_cache_case.h"
#include "kernels/dequantize_int2.h"
#include "support/compare.h"

using namespace oscar;
using namespace oscar_test;

namespace {

struct Range {
  int first_token, num_tokens;
};

size_t element_size(ElementType type) { return type == ElementType::kFp32 ? 4 : 2; }

// Bits of a value as the kernel should have rounded it.
uint32_t rounded_bits(float value, ElementType type) {
  if (type == ElementType::kBf16) return float_to_bf16(value);
  if (type == ElementType::kFp16) return float_to_fp16(value);
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  return bits;
}

// A cache of one sequence a job, and the output rows of each job with padding between heads and
// tokens.
struct DequantizeRun {
  MixedCacheCase cache;
  std::vector<Range> ranges;
  ElementType type;
  int64_t head_stride, token_stride;
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> k, v;
  std::unique_ptr<DeviceBuffer<DequantizeJob>> jobs;
  DequantizeParams params;

  static CacheShape shape_of(int head_dim, int heads, const std::vector<Range>& ranges) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.num_kv_heads = heads;
    for (const Range& range : ranges)
      shape.lengths.push_back({0, range.first_token + range.num_tokens, 0, 0});
    return shape;
  }
  DequantizeRun(int head_dim, int heads, std::vector<Range> r, ElementType output_type,
                bool values = true)
      : cache(shape_of(head_dim, heads, r)),
        ranges(std::move(r)),
        type(output_type),
        head_stride(head_dim + 8),
        token_stride(heads * head_stride + 16) {
    std::vector<DequantizeJob> list;
    int tiles = 0;
    for (size_t j = 0; j < ranges.size(); ++j) {
      DequantizeJob job{};
      const size_t bytes = at(ranges[j].num_tokens * token_stride) * element_size(type);
      k.push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes));
      v.push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes));
      job.pages = cache.d_int2->get();
      job.page_table = cache.d_int2_table->get() + static_cast<int64_t>(j) * cache.int2_stride;
      job.k = k[j]->get();
      job.v = values ? v[j]->get() : nullptr;
      job.first_token = ranges[j].first_token;
      job.num_tokens = ranges[j].num_tokens;
      job.first_tile = tiles;
      job.num_pages = cache.num_int2_pages;
      tiles += dequantize_tiles(job.first_token, job.num_tokens);
      list.push_back(job);
    }
    jobs = std::make_unique<DeviceBuffer<DequantizeJob>>(list);
    params.num_kv_heads = heads;
    params.head_dim = head_dim;
    params.output_type = type;
    params.token_stride = token_stride;
    params.head_stride = head_stride;
    params.jobs = jobs->get();
    params.num_jobs = static_cast<int>(list.size());
    params.num_tiles = tiles;
    params.check_tables = true;
  }
  // Elements that differ from the oracle in any bit, padding that lost its poison included.
  size_t differences(bool keys) const {
    size_t count = 0;
    for (size_t j = 0; j < ranges.size(); ++j) {
      const std::vector<uint8_t> bytes = (keys ? k : v)[j]->download();
      const auto& expected = (keys ? cache.k : cache.v)[j];
      for (int token = 0; token < ranges[j].num_tokens; ++token) {
        for (int64_t i = 0; i < token_stride; ++i) {
          uint32_t bits = 0;
          std::memcpy(&bits, &bytes[at(token * token_stride + i) * element_size(type)],
                      element_size(type));
          const int head = static_cast<int>(i / head_stride);
          const int dim = static_cast<int>(i % head_stride);
          uint32_t wanted = type == ElementType::kFp32 ? 0xFFFFFFFFU : 0xFFFFU;
          if (head < params.num_kv_heads && dim < params.head_dim) {
            const size_t row = cache.row(static_cast<int>(j), head, ranges[j].first_token + token);
            wanted = rounded_bits(expected[row + at(dim)], type);
          }
          count += bits != wanted;
        }
      }
    }
    return count;
  }
  void run_and_check() const {
    dequantize_int2(params, nullptr);
    cuda_ok(cudaDeviceSynchronize());
    INFO("D " << params.head_dim << ", heads " << params.num_kv_heads << ", type "
              << static_cast<int>(type));
    CHECK(differences(true) == 0);
    CHECK(differences(false) == 0);
  }
};

const std::vector<Range> kRanges = {{0, 200}, {0, 1},  {5, 1},   {15, 2},
                                    {16, 16}, {60, 9}, {63, 66}, {128, 64}};

}  // namespace

TEST_CASE("dequantize: bits of the CPU, all head dims, types and ranges", "[gpu][dequantize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const ElementType type : {ElementType::kBf16, ElementType::kFp16, ElementType::kFp32}) {
      DequantizeRun(head_dim, 3, kRanges, type).run_and_check();
    }
  }
}

TEST_CASE("dequantize: one head, many heads, keys alone", "[gpu][dequantize]") {
  if (!has_gpu()) return;
  DequantizeRun(128, 1, kRanges, ElementType::kBf16).run_and_check();
  DequantizeRun(64, 9, kRanges, ElementType::kBf16).run_and_check();
  const DequantizeRun keys(128, 2, kRanges, ElementType::kBf16, false);
  dequantize_int2(keys.params, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(keys.differences(true) == 0);
  for (const uint8_t byte : keys.v[0]->download()) REQUIRE(byte == 0xFF);
}

TEST_CASE("dequantize: reduced set for the sanitizers", "[gpu][dequantize][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 256}) {
    DequantizeRun(head_dim, 2, {{5, 30}, {63, 66}}, ElementType::kBf16).run_and_check();
    DequantizeRun(head_dim, 2, {{5, 30}, {63, 66}}, ElementType::kFp32).run_and_check();
  }
}

TEST_CASE("dequantize: bad input is refused, a wrong result is seen", "[gpu][dequantize]") {
  if (!has_gpu()) return;
  DequantizeRun run(128, 2, kRanges, ElementType::kBf16);
  const auto refused = [&](auto change) {
    DequantizeParams p = run.params;
    change(p);
    CHECK_THROWS_AS(dequantize_int2(p, nullptr), Error);
  };
  refused([](DequantizeParams& p) { p.head_dim = 80; });
  refused([](DequantizeParams& p) { p.num_kv_heads = 0; });
  refused([](DequantizeParams& p) { p.jobs = nullptr; });
  refused([](DequantizeParams& p) { p.num_jobs = 0; });
  refused([](DequantizeParams& p) { p.num_tiles = 0; });
  refused([](DequantizeParams& p) { p.num_tiles += 1; });
  refused([](DequantizeParams& p) { p.token_stride = 12; });
  refused([](DequantizeParams& p) { p.head_stride = 64; });
  std::vector<DequantizeJob> list = run.jobs->download();
  const auto refused_job = [&](auto change) {
    std::vector<DequantizeJob> changed = list;
    change(changed[1]);
    run.jobs->upload(changed);
    CHECK_THROWS_AS(dequantize_int2(run.params, nullptr), Error);
  };
  refused_job([](DequantizeJob& job) { job.num_pages = 1; });
  refused_job([](DequantizeJob& job) { job.num_tokens = 0; });
  refused_job([](DequantizeJob& job) { job.k = static_cast<uint8_t*>(job.k) + 2; });
  refused_job([](DequantizeJob& job) { job.first_tile += 1; });
  run.jobs->upload(list);
  run.run_and_check();
  std::vector<uint8_t> records = run.cache.d_int2->download();
  records[at(run.cache.int2_table[0]) * 2 * at(record_page_bytes(128))] ^= 1;
  run.cache.d_int2->upload(records);
  dequantize_int2(run.params, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(run.differences(true) == 1);
}
