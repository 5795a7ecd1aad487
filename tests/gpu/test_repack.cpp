#include <catch2/catch.hpp>
#include <numeric>

#include "base/error.h"
#include "gpu/mixed_cache_case.h"
#include "kernels/repack_int2.h"
#include "quant/record_rows.h"

using namespace oscar;
using namespace oscar_test;

namespace {

struct Range {
  int first_token, num_tokens;
};

struct LayoutCase {
  EngineRows::Layout layout;
  MetaFormat meta;
  PackOrder order;
  int half_alignment = 1;
};
const std::vector<LayoutCase> kLayouts = {
    {EngineRows::Layout::kSglang, MetaFormat::kScaleZeroFp32, PackOrder::kQuartered},
    {EngineRows::Layout::kSglang, MetaFormat::kScaleZeroBf16, PackOrder::kQuartered},
    {EngineRows::Layout::kSglang, MetaFormat::kScaleZeroFp16, PackOrder::kConsecutive},
    {EngineRows::Layout::kVllm, MetaFormat::kScaleMinFp16First, PackOrder::kConsecutive, 1},
    {EngineRows::Layout::kVllm, MetaFormat::kScaleMinFp16First, PackOrder::kConsecutive, 16},
    {EngineRows::Layout::kVllm, MetaFormat::kScaleMinFp16First, PackOrder::kQuartered, 1},
};
const std::vector<Range> kRanges = {{0, 200}, {5, 1}, {15, 2}, {16, 16}, {60, 9}, {63, 66}};

// Pages of one sequence a job, an engine cache with random slots, and the oracle of both
// directions.
struct RepackRun {
  int head_dim, heads;
  LayoutCase layout;
  std::vector<Range> ranges;
  RecordRowConverter converter;
  MixedCacheCase cache;
  int64_t num_slots = 0;
  std::vector<std::vector<int64_t>> slots;  // of each job
  std::vector<std::unique_ptr<DeviceBuffer<int64_t>>> d_slots;
  // Engine memory: SGLang k codes, k pairs, v codes, v pairs; vLLM slots first.
  std::vector<std::vector<uint8_t>> engine;
  std::vector<std::unique_ptr<DeviceBuffer<uint8_t>>> d_engine;
  std::unique_ptr<DeviceBuffer<unsigned long long>> refused;
  std::unique_ptr<DeviceBuffer<RepackJob>> jobs;
  RepackParams params;

  static CacheShape shape_of(int head_dim, int heads, const std::vector<Range>& ranges) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.num_kv_heads = heads;
    for (const Range& range : ranges)
      shape.lengths.push_back({0, range.first_token + range.num_tokens, 0, 0});
    return shape;
  }
  bool vllm() const { return layout.layout == EngineRows::Layout::kVllm; }
  VllmSlotFormat slot_format() const { return {head_dim, head_dim, layout.half_alignment}; }
  size_t pair_bytes() const { return converter.row_bytes() - converter.code_bytes(); }

  RepackRun(int dim, int num_heads, const LayoutCase& l, std::vector<Range> r = kRanges)
      : head_dim(dim),
        heads(num_heads),
        layout(l),
        ranges(std::move(r)),
        converter(dim, l.meta, l.order),
        cache(shape_of(dim, num_heads, ranges)) {
    for (const Range& range : ranges) num_slots += range.num_tokens;
    std::vector<int64_t> ids(at(num_slots + 7));
    num_slots += 7;  // slots of nobody
    std::iota(ids.begin(), ids.end(), 0);
    Random random(3);
    random.shuffle(ids);
    const size_t rows = at(num_slots) * at(heads);
    if (vllm()) {
      engine.emplace_back(rows * slot_format().slot_bytes());
    } else {
      for (int side = 0; side < 2; ++side) {
        engine.emplace_back(rows * converter.code_bytes());
        engine.emplace_back(rows * pair_bytes());
      }
    }
    for (std::vector<uint8_t>& bytes : engine) {
      std::fill(bytes.begin(), bytes.end(), uint8_t{0xFF});
      d_engine.push_back(std::make_unique<DeviceBuffer<uint8_t>>(bytes.size()));
    }
    std::vector<RepackJob> list;
    int tiles = 0;
    size_t next = 0;
    for (size_t j = 0; j < ranges.size(); ++j) {
      slots.emplace_back(ids.begin() + static_cast<std::ptrdiff_t>(next),
                         ids.begin() + static_cast<std::ptrdiff_t>(next) + ranges[j].num_tokens);
      next += at(ranges[j].num_tokens);
      d_slots.push_back(std::make_unique<DeviceBuffer<int64_t>>(slots[j]));
      RepackJob job{};
      job.page_table = cache.d_int2_table->get() + static_cast<int64_t>(j) * cache.int2_stride;
      job.slots = d_slots[j]->get();
      job.first_token = ranges[j].first_token;
      job.num_tokens = ranges[j].num_tokens;
      job.first_tile = tiles;
      tiles += repack_tiles(job.first_token, job.num_tokens);
      list.push_back(job);
    }
    jobs = std::make_unique<DeviceBuffer<RepackJob>>(list);
    refused = std::make_unique<DeviceBuffer<unsigned long long>>(1, 0);
    params.num_kv_heads = heads;
    params.head_dim = head_dim;
    params.pages = cache.d_int2->get();
    params.num_pages = cache.num_int2_pages;
    params.rows.layout = layout.layout;
    params.rows.order = layout.order;
    params.rows.meta = layout.meta;
    params.rows.vllm_half_alignment = layout.half_alignment;
    params.rows.num_slots = num_slots;
    if (vllm()) {
      params.rows.slots = d_engine[0]->get();
    } else {
      params.rows.k_codes = d_engine[0]->get();
      params.rows.k_pairs = d_engine[1]->get();
      params.rows.v_codes = d_engine[2]->get();
      params.rows.v_pairs = d_engine[3]->get();
    }
    params.jobs = jobs->get();
    params.num_jobs = static_cast<int>(list.size());
    params.num_tiles = tiles;
    params.refused_rows = refused->get();
    params.check_tables = true;
  }
  // Code and pair bytes of a row in the host copy of the engine's memory.
  std::pair<uint8_t*, uint8_t*> row_at(int side, int64_t slot, int head) {
    const size_t index = at(slot) * at(heads) + at(head);
    if (vllm()) {
      uint8_t* half = engine[0].data() + index * slot_format().slot_bytes() +
                      (side == 0 ? slot_format().k_offset() : slot_format().v_offset());
      return {half, half + converter.code_bytes()};
    }
    return {engine[at(2 * side)].data() + index * converter.code_bytes(),
            engine[at(2 * side + 1)].data() + index * pair_bytes()};
  }
  size_t record_offset(size_t job, int head, int token) const {
    const int page = cache.int2_table[job * at(cache.int2_stride) + at(token / 64)];
    return (at(page) * at(heads) + at(head)) * at(record_page_bytes(head_dim)) +
           at(token % 64 / 16) * at(record_bytes(head_dim));
  }
  template <class Body>
  void for_each_row(const Body& body) {
    for (size_t j = 0; j < ranges.size(); ++j) {
      for (int i = 0; i < ranges[j].num_tokens; ++i) {
        const int token = ranges[j].first_token + i;
        for (int head = 0; head < heads; ++head) {
          for (int side = 0; side < 2; ++side)
            body(record_offset(j, head, token), static_cast<KvSide>(side), token % 16,
                 row_at(side, slots[j][at(i)], head));
        }
      }
    }
  }
  void launch(RepackDirection direction) {
    params.direction = direction;
    repack_int2(params, nullptr);
    cuda_ok(cudaDeviceSynchronize());
  }
  // Fills the host copy of the engine's memory as the kernel should.
  void expect_rows() {
    std::vector<uint8_t> row(converter.row_bytes());
    for_each_row([&](size_t record, KvSide side, int token, auto target) {
      converter.to_row(cache.int2.data() + record, side, token, row.data());
      std::memcpy(target.first, row.data(), converter.code_bytes());
      std::memcpy(target.second, row.data() + converter.code_bytes(), pair_bytes());
    });
  }
  void run_and_check() {
    INFO("D " << head_dim << ", layout " << static_cast<int>(layout.layout) << ", metadata "
              << static_cast<int>(layout.meta) << ", order " << static_cast<int>(layout.order)
              << ", alignment " << layout.half_alignment);
    launch(RepackDirection::kToRows);
    expect_rows();
    for (size_t i = 0; i < engine.size(); ++i) CHECK((d_engine[i]->download() == engine[i]));
    // Back into pages that hold something else: other tokens keep it.
    std::vector<uint8_t> expected(cache.int2.size(), 0xA5);
    cache.d_int2->upload(expected);
    launch(RepackDirection::kToRecords);
    std::vector<uint8_t> row(converter.row_bytes());
    for_each_row([&](size_t record, KvSide side, int token, auto source) {
      std::memcpy(row.data(), source.first, converter.code_bytes());
      std::memcpy(row.data() + converter.code_bytes(), source.second, pair_bytes());
      converter.from_row(row.data(), expected.data() + record, side, token);
    });
    CHECK((cache.d_int2->download() == expected));
    CHECK(refused->download()[0] == 0);
  }
};

}  // namespace

TEST_CASE("repack: every layout and head dim, both directions, as the CPU", "[gpu][repack]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const LayoutCase& layout : kLayouts) RepackRun(head_dim, 3, layout).run_and_check();
  }
  RepackRun(128, 1, kLayouts[0]).run_and_check();
  RepackRun(128, 8, kLayouts[3]).run_and_check();
}

TEST_CASE("repack: reduced set for the sanitizers", "[gpu][repack][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128}) {
    RepackRun(head_dim, 2, kLayouts[0], {{5, 30}, {63, 66}}).run_and_check();
    RepackRun(head_dim, 2, kLayouts[4], {{5, 30}, {63, 66}}).run_and_check();
  }
}

TEST_CASE("repack: pairs that the other metadata cannot hold are counted", "[gpu][repack]") {
  if (!has_gpu()) return;
  RepackRun run(64, 1, kLayouts[0], {{0, 16}});
  run.launch(RepackDirection::kToRows);
  std::vector<uint8_t> pairs = run.d_engine[1]->download();
  const float wrong[2] = {1e9F, 1.0F};  // beyond fp16
  std::memcpy(pairs.data() + run.slots[0][3] * 8, wrong, 8);
  run.d_engine[1]->upload(pairs);
  run.launch(RepackDirection::kToRecords);
  CHECK(run.refused->download()[0] == 1);
  const std::vector<uint8_t> bytes = run.cache.d_int2->download();
  std::vector<float> values(64);
  record_decode_row(bytes.data() + run.record_offset(0, 0, 3), 64, KvSide::kKey, 3, values.data());
  for (const float x : values) CHECK(x == 0.0F);
  record_decode_row(bytes.data() + run.record_offset(0, 0, 4), 64, KvSide::kKey, 4, values.data());
  std::vector<float> kept(run.cache.k[0].begin() + 4 * 64, run.cache.k[0].begin() + 5 * 64);
  CHECK((values == kept));
}

TEST_CASE("repack: bad input is refused", "[gpu][repack]") {
  if (!has_gpu()) return;
  RepackRun run(128, 2, kLayouts[0]);
  const auto refused = [&](auto change) {
    RepackParams p = run.params;
    change(p);
    CHECK_THROWS_AS(repack_int2(p, nullptr), Error);
  };
  refused([](RepackParams& p) { p.head_dim = 80; });
  refused([](RepackParams& p) { p.pages = nullptr; });
  refused([](RepackParams& p) { p.pages = static_cast<uint8_t*>(p.pages) + 8; });
  refused([](RepackParams& p) { p.rows.k_codes = nullptr; });
  refused([](RepackParams& p) { p.rows.v_pairs = static_cast<uint8_t*>(p.rows.v_pairs) + 4; });
  refused([](RepackParams& p) { p.rows.meta = MetaFormat::kLog8; });
  refused([](RepackParams& p) { p.rows.layout = EngineRows::Layout::kVllm; });
  refused([](RepackParams& p) { p.rows.num_slots = 10; });
  refused([](RepackParams& p) { p.num_pages = 1; });
  refused([](RepackParams& p) { p.num_jobs = 0; });
  refused([](RepackParams& p) { p.num_tiles += 1; });
  refused([](RepackParams& p) { p.refused_rows = nullptr; });
  RepackRun vllm(128, 2, kLayouts[3]);
  vllm.params.rows.vllm_half_alignment = 4;
  CHECK_THROWS_AS(repack_int2(vllm.params, nullptr), Error);
  run.run_and_check();
}

TEST_CASE("copy pages: inside a pool and between pools", "[gpu][repack][sanitize]") {
  if (!has_gpu()) return;
  for (const int64_t page_bytes : {16, 4608, 36864, 131072 + 48}) {
    Random random(7);
    std::vector<uint8_t> pool(at(9 * page_bytes)), other(at(4 * page_bytes), 0xEE);
    for (uint8_t& byte : pool) byte = static_cast<uint8_t>(random.below(256));
    DeviceBuffer<uint8_t> d_pool(pool);
    const DeviceBuffer<uint8_t> d_other(other);
    const std::vector<PageCopy> copies = {{1, 8}, {1, 0}, {5, 2}};
    const DeviceBuffer<PageCopy> d_copies(copies);
    CopyPagesParams p;
    p.source_pool = p.destination_pool = d_pool.get();
    p.num_source_pages = p.num_destination_pages = 9;
    p.page_bytes = page_bytes;
    p.copies = d_copies.get();
    p.num_copies = 3;
    p.check_tables = true;
    copy_pages(p, nullptr);
    cuda_ok(cudaDeviceSynchronize());
    std::vector<uint8_t> expected = pool;
    const auto copy = [&](int64_t source, std::vector<uint8_t>& target, int64_t destination) {
      std::copy_n(pool.begin() + source * page_bytes, page_bytes,
                  target.begin() + destination * page_bytes);
    };
    for (const PageCopy& c : copies) copy(c.source, expected, c.destination);
    CHECK((d_pool.download() == expected));

    d_pool.upload(pool);
    const DeviceBuffer<PageCopy> one(std::vector<PageCopy>{{7, 3}});
    p.destination_pool = d_other.get();
    p.num_destination_pages = 4;
    p.copies = one.get();
    p.num_copies = 1;
    copy_pages(p, nullptr);
    cuda_ok(cudaDeviceSynchronize());
    expected = other;
    copy(7, expected, 3);
    CHECK((d_other.download() == expected));
    CHECK((d_pool.download() == pool));

    const auto refused = [&](auto change) {
      CopyPagesParams q = p;
      change(q);
      CHECK_THROWS_AS(copy_pages(q, nullptr), Error);
    };
    refused([](CopyPagesParams& q) { q.page_bytes = 8; });
    refused([](CopyPagesParams& q) { q.num_copies = 0; });
    refused([](CopyPagesParams& q) { q.num_source_pages = 7; });
    refused([](CopyPagesParams& q) { q.num_destination_pages = 3; });
    refused([](CopyPagesParams& q) { q.source_pool = nullptr; });
    const DeviceBuffer<PageCopy> chained(std::vector<PageCopy>{{1, 2}, {2, 3}});
    refused([&](CopyPagesParams& q) {
      q.destination_pool = d_pool.get();
      q.num_destination_pages = 9;
      q.copies = chained.get();
      q.num_copies = 2;
    });
  }
}
