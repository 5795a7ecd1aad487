// Speed of encoders and decoders on one thread; hidden: run with test_quant "[.bench]". Prints, and
// asserts only that the work was done.
#include <algorithm>
#include <cstdio>
#include <ctime>
#include <vector>

#include "codec_helpers.h"

using oscar::CodecSpec;

namespace {

struct Arm {
  const char* name;
  CodecSpec spec;
};

std::vector<Arm> arms(int head_dim) {
  CodecSpec rtn;
  rtn.head_dim = head_dim;
  CodecSpec clipped = rtn;
  clipped.clip_ratio = 0.92;
  CodecSpec light_v = clipped;
  light_v.gain = oscar::GainRule::kPlain;
  CodecSpec grid = light_v;
  grid.clip_ratio = 0.0;
  grid.clip_rule = oscar::ClipRule::kRangeGrid;
  CodecSpec quartered = clipped;
  quartered.order = oscar::PackOrder::kQuartered;
  CodecSpec int4 = rtn;
  int4.bits = 4;
  CodecSpec int8 = rtn;
  int8.bits = 8;
  CodecSpec lean = rtn;
  lean.encoder = oscar::Encoder::kFeedback;
  lean.gain = oscar::GainRule::kMetric;
  CodecSpec lean_grid = lean;
  lean_grid.feedback.start = oscar::StartRange::kGrid;
  lean_grid.feedback.multipliers = {0.92, 1.03, 1.15};
  CodecSpec best = lean;
  best.feedback = oscar::best_feedback();
  best.meta = oscar::MetaFormat::kLog8;
  best.log8_scale_max = 4.0F;
  CodecSpec from_clip = best;
  from_clip.feedback.start = oscar::StartRange::kClip;
  CodecSpec kivi = rtn;
  kivi.axis = oscar::GroupAxis::kTokens;
  kivi.group = 32;
  return {{"rtn", rtn},
          {"rtn clip .92", clipped},
          {"light V (plain gain)", light_v},
          {"rtn grid, plain gain", grid},
          {"rtn quartered", quartered},
          {"int4", int4},
          {"int8", int8},
          {"kivi tokens", kivi},
          {"lean", lean},
          {"lean, grid start", lean_grid},
          {"best", best},
          {"best, clip start", from_clip}};
}

double thread_seconds() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

// CPU seconds of one call, least of several repetitions (other programs may share the core).
template <class Work>
double seconds(const Work& work) {
  double least = 1e30;
  double total = 0.0;
  for (int repeat = 0; repeat < 200 && (total < 0.2 || repeat < 3); ++repeat) {
    const double start = thread_seconds();
    work();
    const double elapsed = thread_seconds() - start;
    least = std::min(least, elapsed);
    total += elapsed;
  }
  return least;
}

}  // namespace

TEST_CASE("bench: encode and decode, one thread", "[.bench]") {
  for (const int head_dim : {64, 128}) {
    const auto width = static_cast<size_t>(head_dim);
    const auto metric = oscar_test::random_metric(2, head_dim);
    for (const oscar::LaneKernels* kernels : oscar_test::all_kernels())
      for (const Arm& arm : arms(head_dim)) {
        const bool slow = kernels->lanes == 1;
        const size_t rows = slow ? 64 : 256;
        const std::vector<float> values = oscar_test::normal_rows(1, rows, width);
        const auto codec = oscar::make_codec_with(arm.spec, metric, *kernels);
        const size_t blocks = rows / static_cast<size_t>(codec->token_block());
        std::vector<uint8_t> bytes(blocks * codec->bytes_per_block());
        std::vector<float> decoded(values.size());
        const double encode_s =
            seconds([&] { codec->encode(values.data(), width, blocks, bytes.data(), nullptr); });
        const double decode_s =
            seconds([&] { codec->decode(bytes.data(), blocks, decoded.data(), width); });
        const double one_s = seconds([&] {
          if (codec->token_block() == 1)
            codec->encode(values.data(), width, 1, bytes.data(), nullptr);
        });
        std::printf(
            "%-8s D %3d %-22s encode %8.1f ns/row (%6.2f M rows/s), one row alone %8.1f ns; "
            "decode %7.1f ns/row (%6.2f GB/s of floats)\n",
            kernels->name, head_dim, arm.name, encode_s * 1e9 / static_cast<double>(rows),
            static_cast<double>(rows) * 1e-6 / encode_s, one_s * 1e9,
            decode_s * 1e9 / static_cast<double>(rows),
            static_cast<double>(rows * width * 4) * 1e-9 / decode_s);
        CHECK(decoded[0] != 0.0F);
      }
  }
}
