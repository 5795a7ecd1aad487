#include <catch2/catch.hpp>

#include "base/error.h"
#include "gpu/decode_run.h"

using namespace oscar;
using namespace oscar_test;

namespace {

SequenceLengths lengths_of(int sink, int history, int recent, int start = 0) {
  return {sink, history, recent, start};
}
void run(const CacheShape& shape, const DecodeOptions& options) {
  const MixedCacheCase cache(shape);
  DecodeRun(cache, options).run_and_check();
}

}  // namespace

TEST_CASE("decode: all head dims, history and windows", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.lengths = {lengths_of(64, 1000, 256, 17), lengths_of(64, 64, 256, 300)};
    run(shape, {});
  }
}

TEST_CASE("decode: every group size up to 16", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (int group = 1; group <= 16; ++group) {
    CacheShape shape;
    shape.head_dim = group % 2 == 0 ? 128 : 64;
    shape.seed = static_cast<uint64_t>(group);
    shape.lengths = {lengths_of(64, 333, 100, 5)};
    DecodeOptions options;
    options.group = group;
    run(shape, options);
  }
}

TEST_CASE("decode: every head dim with every number of columns a block", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const int group : {1, 3, 4, 5, 8, 9, 12, 16}) {
      CacheShape shape;
      shape.head_dim = head_dim;
      shape.seed = static_cast<uint64_t>(group);
      shape.lengths = {lengths_of(64, 1500, 256, 17), lengths_of(3, 65, 17, 317)};
      DecodeOptions options;
      options.group = group;
      run(shape, options);
    }
  }
}

TEST_CASE("decode: one segment over all thread blocks, up to 16 columns", "[gpu][decode]") {
  if (!has_gpu()) return;
  // 256 x 16: more output quads than threads; 64 x 1: more thread blocks than quads.
  for (const auto& [head_dim, group] : {std::pair{256, 16}, std::pair{192, 3}, std::pair{128, 4},
                                        std::pair{128, 8}, std::pair{96, 12}, std::pair{64, 1}}) {
    CacheShape shape;
    shape.num_kv_heads = 1;
    shape.head_dim = head_dim;
    shape.lengths = {lengths_of(64, 15000, 256, 40)};
    DecodeOptions options;
    options.group = group;
    const MixedCacheCase cache(shape);
    const DecodeRun decode(cache, options);
    REQUIRE(decode.schedule.work[0].num_parts > 60);
    decode.run_and_check();
  }
}

TEST_CASE("decode: launches in a row share a workspace and leave it zero", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {lengths_of(64, 5000, 256, 17), lengths_of(64, 800, 256, 17)};
  const MixedCacheCase first_cache(shape);
  shape.seed = 5;
  shape.lengths = {lengths_of(10, 9000, 100, 3), lengths_of(64, 0, 256, 17), lengths_of(0, 1, 0)};
  const MixedCacheCase second_cache(shape);
  DecodeOptions options;
  options.out_type = ElementType::kFp32;
  const DecodeRun first(first_cache, options), second(second_cache, options);
  REQUIRE(first.schedule.num_slots > 0);
  REQUIRE(second.schedule.num_slots > 0);
  for (const bool overlap : {true, false}) {
    for (const DecodeRun* decode : {&first, &second}) {
      decode->d_out->poison();
      decode->d_lse->poison();
    }
    cuda_ok(cudaDeviceSynchronize());
    for (int i = 0; i < 20; ++i) {  // nothing between the launches
      for (const DecodeRun* decode : {&first, &second}) {
        AttendDecodeParams p = decode->params();
        p.check_tables = false;
        p.overlap_launch = overlap;
        p.workspace = first.d_workspace->get();
        p.workspace_bytes = first.d_workspace->bytes();
        attend_decode_int2(p, nullptr);
      }
    }
    cuda_ok(cudaDeviceSynchronize());
    first.check();
    second.check();
    const std::vector<uint8_t> workspace = first.d_workspace->download();
    CHECK(std::count(workspace.begin(), workspace.end(), 0) ==
          static_cast<std::ptrdiff_t>(workspace.size()));
  }
}

TEST_CASE("decode: lengths around every record and page boundary", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.num_kv_heads = 1;
  for (const int history : {0, 1, 7, 8, 9, 15, 16, 17, 31, 33, 48, 63, 64, 65, 127, 128, 129, 511})
    shape.lengths.push_back(lengths_of(64, history, 1 + history % 40, history % 320));
  for (const int sink : {0, 1, 5, 15, 16, 17, 63}) shape.lengths.push_back(lengths_of(sink, 80, 3));
  for (const int recent : {1, 2, 15, 16, 17, 255, 256, 257, 320})
    shape.lengths.push_back(lengths_of(64, 16, recent, 319));
  shape.lengths.push_back(lengths_of(1, 0, 0));
  shape.lengths.push_back(lengths_of(0, 1, 0));
  shape.lengths.push_back(lengths_of(0, 0, 1));
  shape.lengths.push_back(lengths_of(0, 200, 0));
  for (const int head_dim : {64, 128, 256}) {
    shape.head_dim = head_dim;
    run(shape, {});
  }
}

TEST_CASE("decode: query tokens, causal among themselves", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const int tokens : {2, 3, 5, 8}) {
    for (const int group : {1, 3, 4, 7}) {
      CacheShape shape;
      shape.lengths = {lengths_of(64, 200, 40, 310), lengths_of(64, 0, tokens, 318)};
      DecodeOptions options;
      options.group = group;
      options.num_query_tokens = tokens;
      run(shape, options);
    }
  }
}

TEST_CASE("decode: sliding window and softcap", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const int window : {1, 7, 64, 100, 250, 300, 1000, 5000}) {
    CacheShape shape;
    shape.lengths = {lengths_of(64, 900, 256, 40), lengths_of(64, 30, 70, 0)};
    DecodeOptions options;
    options.sliding_window = window;
    options.num_query_tokens = window % 2 == 0 ? 2 : 1;
    run(shape, options);
    options.softcap = 3.0F;
    run(shape, options);
  }
  CacheShape shape;
  shape.lengths = {lengths_of(64, 900, 256, 40)};
  DecodeOptions options;
  options.softcap = 20.0F;
  options.q_size = 8.0F;
  run(shape, options);
}

TEST_CASE("decode: rotated query prologue", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const bool per_head : {false, true}) {
      CacheShape shape;
      shape.head_dim = head_dim;
      shape.lengths = {lengths_of(64, 300, 100, 40), lengths_of(64, 40, 256, 0)};
      DecodeOptions options;
      options.rotate = true;
      options.rotate_per_head = per_head;
      options.group = per_head ? 12 : 4;
      run(shape, options);
    }
  }
}

TEST_CASE("decode: extreme sizes of scores and values", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const float key : {0.01F, 20.0F}) {
    for (const float value : {1e-3F, 1.0F, 2000.0F}) {
      for (const float q : {1e-3F, 1.0F, 30.0F}) {
        CacheShape shape;
        shape.num_kv_heads = 1;
        shape.key_scale = key;
        shape.value_scale = value;
        shape.lengths = {lengths_of(64, 700, 100, 40)};
        DecodeOptions options;
        options.q_size = q;
        options.max_error = 2e-3;  // scores of thousands: the softmax amplifies fp32 rounding
        if (key * q < 100.0F) options.max_error = 1e-3;
        const MixedCacheCase cache(shape);
        const DecodeRun decode(cache, options);
        decode.run_and_check();
      }
    }
  }
}

TEST_CASE("decode: many sequences of different lengths, shared prefix page", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.num_kv_heads = 4;
  shape.share_first_page = true;
  for (int b = 0; b < 20; ++b)
    shape.lengths.push_back(lengths_of(64, 64 + 97 * b * (b % 3), 200 + b, 7 * b));
  run(shape, {});
}

TEST_CASE("decode: long history split over all thread blocks, output types", "[gpu][decode]") {
  if (!has_gpu()) return;
  for (const ElementType type : {ElementType::kBf16, ElementType::kFp16}) {
    CacheShape shape;
    shape.num_kv_heads = 1;
    shape.lengths = {lengths_of(64, 40000, 256, 17)};
    DecodeOptions options;
    options.out_type = type;
    options.q_type = type;
    // The output's own rounding on top.
    options.max_error =
        1e-3 + static_cast<double>(type == ElementType::kBf16 ? kBf16Epsilon : kFp16Epsilon);
    run(shape, options);
  }
}

TEST_CASE("decode: replayed from a CUDA graph, counters left clean", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {lengths_of(64, 5000, 256, 17), lengths_of(64, 800, 256, 17)};
  const MixedCacheCase cache(shape);
  const DecodeRun decode(cache, {});
  REQUIRE(decode.schedule.num_slots > 0);
  AttendDecodeParams params = decode.params();
  params.check_tables = false;
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  cuda_ok(cudaStreamCreate(&stream));
  cuda_ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  attend_decode_int2(params, stream);
  cuda_ok(cudaStreamEndCapture(stream, &graph));
  cuda_ok(cudaGraphInstantiate(&executable, graph, 0));
  for (int i = 0; i < 5; ++i) {
    decode.d_out->poison();
    decode.d_lse->poison();
    cuda_ok(cudaDeviceSynchronize());
    cuda_ok(cudaGraphLaunch(executable, stream));
    cuda_ok(cudaStreamSynchronize(stream));
    decode.check();
  }
  cudaGraphExecDestroy(executable);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

TEST_CASE("decode: a reduced set for the sanitizers", "[gpu][decode][sanitize]") {
  if (!has_gpu()) return;
  for (const int head_dim : {64, 128, 256}) {
    CacheShape shape;
    shape.head_dim = head_dim;
    shape.lengths = {lengths_of(64, 700, 40, 310), lengths_of(17, 3, 5, 3)};
    DecodeOptions options;
    run(shape, options);
    options.group = 8;
    run(shape, options);
    options.rotate = true;
    options.group = 12;
    options.num_query_tokens = 2;
    options.sliding_window = 500;
    run(shape, options);
  }
}

TEST_CASE("decode: bad input is refused", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {lengths_of(64, 100, 100, 17)};
  const MixedCacheCase cache(shape);
  const DecodeRun decode(cache, {});
  const auto refused = [&](auto change) {
    AttendDecodeParams p = decode.params();
    change(p);
    CHECK_THROWS_AS(attend_decode_int2(p, nullptr), Error);
  };
  refused([](AttendDecodeParams& p) { p.cache.head_dim = 80; });
  refused([](AttendDecodeParams& p) { p.q = nullptr; });
  refused([](AttendDecodeParams& p) { p.out = static_cast<uint8_t*>(p.out) + 1; });
  refused([](AttendDecodeParams& p) { p.batch = 0; });
  refused([](AttendDecodeParams& p) { p.num_q_heads = 9; });
  refused([](AttendDecodeParams& p) { p.num_query_tokens = 9; });
  refused([](AttendDecodeParams& p) { p.cache.int2_pages = nullptr; });
  refused([](AttendDecodeParams& p) {
    p.cache.int2_pages = static_cast<const uint8_t*>(p.cache.int2_pages) + 8;
  });
  refused([](AttendDecodeParams& p) { p.cache.num_int2_pages = 1; });
  refused([](AttendDecodeParams& p) { p.cache.num_bf16_pages = 1; });
  refused([](AttendDecodeParams& p) { p.workspace_bytes = 64; });
  refused([](AttendDecodeParams& p) { p.workspace = static_cast<uint8_t*>(p.workspace) + 4; });
  refused([](AttendDecodeParams& p) { p.columns_per_block = 16; });
  refused([](AttendDecodeParams& p) { p.num_slots = -1; });
  refused([](AttendDecodeParams& p) { p.num_ctas += 1; });
  refused([](AttendDecodeParams& p) { p.softmax_scale = 0.0F; });
  static std::vector<float> host(4096);
  refused([](AttendDecodeParams& p) { p.out = host.data(); });
  decode.run_and_check();
}

TEST_CASE("decode: the check sees a wrong result", "[gpu][decode]") {
  if (!has_gpu()) return;
  CacheShape shape;
  shape.lengths = {lengths_of(64, 100, 100, 17)};
  const MixedCacheCase cache(shape);
  const DecodeRun decode(cache, {});
  AttendDecodeParams p = decode.params();
  p.softmax_scale *= 1.02F;
  attend_decode_int2(p, nullptr);
  cuda_ok(cudaDeviceSynchronize());
  std::vector<double> expected;
  std::vector<double> query(decode.q.begin(), decode.q.begin() + 128);
  cache.attend(query, 0, 0, cache.tokens(0) - 1, 1.0 / std::sqrt(128.0), 0, 0, expected);
  const std::vector<float> out = decode.output();
  double error = 0, norm = 0;
  for (size_t d = 0; d < 128; ++d) {
    error += std::pow(static_cast<double>(out[d]) - expected[d], 2);
    norm += expected[d] * expected[d];
  }
  CHECK(std::sqrt(error / norm) > 1e-3);
}
