#include <catch2/catch.hpp>

#include "base/error.h"
#include "gpu/prefill_run.h"

using namespace oscar;
using namespace oscar_test;

namespace {

// On every path that the device has.
void run(const CacheShape& shape, const std::vector<int>& new_tokens, PrefillOptions options = {}) {
  const MixedCacheCase cache(shape);
  for (const PrefillPath path : prefill_paths()) {
    options.path = path;
    PrefillRun(cache, new_tokens, options).run_and_check();
  }
}

}  // namespace

TEST_CASE("prefill: all head dims, history, windows and new tokens", "[gpu][prefill]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.lengths = {{64, 200, 256, 17}, {64, 64, 256, 300}, {0, 0, 0, 0}};
    run(shape, {200, 33, 150});
  }
  const auto [worst, stored] = PrefillRun::worst_errors();
  WARN("worst relative error " << worst << ", against the stored INT2 values " << stored);
}

TEST_CASE("prefill: every group size up to 16", "[gpu][prefill]") {
  if (!has_gpu()) return;
  for (int group = 1; group <= 16; ++group) {
    CacheShape shape;
    shape.head_dim = group % 2 == 0 ? 128 : 64;
    shape.seed = static_cast<uint64_t>(group);
    shape.lengths = {{64, 100, 70, 5}};
    PrefillOptions options;
    options.group = group;
    run(shape, {71}, options);
  }
}

TEST_CASE("prefill: lengths around every record, page and tile boundary", "[gpu][prefill]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.num_kv_heads = 1;
  std::vector<int> new_tokens;
  const auto add = [&](SequenceLengths lengths, int tokens) {
    shape.lengths.push_back(lengths);
    new_tokens.push_back(tokens);
  };
  for (const int history : {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129})
    add({64, history, history % 40, history % 320}, 1 + history % 13);
  for (const int sink : {0, 1, 15, 16, 17, 63}) add({sink, 80, 3, 318}, 10);
  for (const int recent : {1, 2, 63, 64, 65, 255, 256, 257, 320}) add({64, 16, recent, 319}, 20);
  for (const int tokens : {1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129})
    add({0, 0, 0, 0}, tokens);
  for (const int head_dim : {64, 128, 256}) {
    shape.head_dim = head_dim;
    PrefillOptions options;
    options.max_rows = 40;
    run(shape, new_tokens, options);
    options.group = 1;
    run(shape, new_tokens, options);
  }
}

TEST_CASE("prefill: sliding window and softcap", "[gpu][prefill]") {
  if (!has_gpu()) return;
  for (const int window : {1, 7, 64, 100, 250, 1000}) {
    CacheShape shape;
    shape.lengths = {{64, 300, 256, 40}, {64, 30, 70, 0}};
    PrefillOptions options;
    options.sliding_window = window;
    run(shape, {150, 90}, options);
    options.softcap = 3.0F;
    run(shape, {150, 90}, options);
  }
  CacheShape shape;
  shape.lengths = {{64, 300, 256, 40}};
  PrefillOptions options;
  options.softcap = 20.0F;
  options.q_size = 8.0F;
  options.max_stored_error = 8 * options.max_stored_error;  // scores eight times larger
  run(shape, {100}, options);
}

TEST_CASE("prefill: output types, no log-sum-exp, sizes of values", "[gpu][prefill]") {
  if (!has_gpu()) return;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    CacheShape shape;
    shape.head_dim = 96;
    shape.lengths = {{64, 200, 100, 40}};
    PrefillOptions options;
    options.out_type = type;
    options.lse = type == ElementType::kBf16;
    run(shape, {100}, options);
  }
  for (const float size : {1e-3F, 1000.0F}) {
    CacheShape shape;
    shape.value_scale = size;
    shape.key_scale = 0.1F;
    shape.lengths = {{64, 200, 100, 40}};
    PrefillOptions options;
    options.q_size = 10.0F;
    run(shape, {100}, options);
  }
}

TEST_CASE("prefill: scores of hundreds keep the softmax finite", "[gpu][prefill]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.key_scale = 20.0F;
  shape.lengths = {{64, 200, 100, 40}};
  PrefillOptions options;
  options.q_size = 10.0F;
  // fp32 sums of scores of hundreds: 2^-24 of them, times a few. Keys rounded to bf16 are off by
  // 2^-9 of such scores, so that the weights of the stored values differ by a factor.
  options.max_lse_error = 1e-3;
  options.max_stored_error = 2.0;
  run(shape, {100}, options);
}

TEST_CASE("prefill: long history, many sequences, shared first page", "[gpu][prefill]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {{64, 5000, 256, 17}};
  PrefillOptions options;
  options.max_rows = 60;
  run(shape, {700}, options);
  shape.lengths.clear();
  shape.share_first_page = true;
  std::vector<int> new_tokens;
  for (int b = 0; b < 12; ++b) {
    shape.lengths.push_back({64, 64 + 37 * b, 20 + b, 7 * b});
    new_tokens.push_back(1 + 29 * b % 97);
  }
  run(shape, new_tokens, options);
}

TEST_CASE("prefill: a reduced set for the sanitizers", "[gpu][prefill][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 256}) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.num_kv_heads = 1;
    shape.lengths = {{64, 130, 70, 310}, {17, 3, 5, 3}};
    PrefillOptions options;
    options.sliding_window = 250;
    options.max_rows = 20;
    run(shape, {70, 9}, options);
  }
}

TEST_CASE("prefill: bad input is refused", "[gpu][prefill]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {{64, 100, 100, 17}};
  const MixedCacheCase cache(shape);
  const PrefillRun prefill(cache, {50}, {});
  const auto refused = [&](auto change) {
    AttendPrefillParams p = prefill.params();
    change(p);
    CHECK_THROWS_AS(attend_prefill(p, nullptr), Error);
  };
  refused([](AttendPrefillParams& p) { p.cache.head_dim = 80; });
  refused([](AttendPrefillParams& p) { p.q = nullptr; });
  refused([](AttendPrefillParams& p) { p.k += 4; });
  refused([](AttendPrefillParams& p) { p.out = static_cast<uint8_t*>(p.out) + 1; });
  refused([](AttendPrefillParams& p) { p.num_tokens = 0; });
  refused([](AttendPrefillParams& p) { p.num_tokens = 49; });
  refused([](AttendPrefillParams& p) { p.num_work = 0; });
  refused([](AttendPrefillParams& p) { p.num_q_heads = 9; });
  refused([](AttendPrefillParams& p) { p.num_q_heads = 34; });
  refused([](AttendPrefillParams& p) { p.q_token_stride = 100; });
  refused([](AttendPrefillParams& p) { p.softmax_scale = 0.0F; });
  refused([](AttendPrefillParams& p) { p.softcap = -1.0F; });
  refused([](AttendPrefillParams& p) { p.cache.int2_pages = nullptr; });
  refused([](AttendPrefillParams& p) { p.cache.num_int2_pages = 1; });
  refused([](AttendPrefillParams& p) { p.cache.num_bf16_pages = 1; });
  static std::vector<uint16_t> host(4096);
  refused([](AttendPrefillParams& p) { p.v = host.data(); });
  std::vector<PrefillWork> wrong = prefill.work;
  wrong[0].kv_head = 7;
  prefill.d_work->upload(wrong);
  refused([](AttendPrefillParams&) {});
  prefill.d_work->upload(prefill.work);
  prefill.run_and_check();
}

TEST_CASE("prefill: the check sees a wrong result", "[gpu][prefill]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {{64, 100, 100, 17}};
  const MixedCacheCase cache(shape);
  const PrefillRun prefill(cache, {50}, {});
  AttendPrefillParams p = prefill.params();
  p.softmax_scale *= 1.02F;
  attend_prefill(p, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(prefill.errors().first > prefill.options.max_error);
  // One key too many: the causal limit of a single row.
  std::vector<PrefillWork> work = prefill.work;
  for (PrefillWork& w : work) w.lengths.recent -= 1;
  prefill.d_work->upload(work);
  attend_prefill(prefill.params(), nullptr);
  cuda_ok(cudaDeviceSynchronize());
  CHECK(prefill.errors().first > prefill.options.max_error);
}
