// The published and derived sizes of the evaluation protocol's table.
#include "base/error.h"
#include "codec_helpers.h"
#include "quant/byte_accounting.h"

using oscar::CacheFormat;
using oscar::CodecSpec;
using oscar::MetaFormat;

namespace {

CacheFormat format_of(int head_dim, int group, int meta_bits, size_t sink, size_t recent) {
  CodecSpec spec;
  spec.head_dim = head_dim;
  spec.group = group;
  spec.meta = meta_bits == 32 ? MetaFormat::kScaleZeroFp32 : MetaFormat::kScaleMinFp16;
  return oscar::cache_format(spec, spec, sink, recent);
}

}  // namespace

TEST_CASE("bytes: table of bits per element", "[quant]") {
  struct Row {
    size_t sink, recent;
    int group;
    double at_32k[2], at_128k[2];  // 16-bit and 32-bit metadata
    double smaller[2];             // than 16 bits, at 128K
  };
  const Row rows[] = {{0, 0, 128, {2.25, 2.5}, {2.25, 2.5}, {7.11, 6.40}},
                      {64, 256, 128, {2.3843, 2.6318}, {2.2836, 2.5330}, {7.01, 6.32}},
                      {64, 256, 64, {2.6318, 3.1270}, {2.5330, 3.0317}, {6.32, 5.28}},
                      {64, 512, 128, {2.4917, 2.7373}, {2.3104, 2.5593}, {6.93, 6.25}},
                      {128, 2048, 128, {3.1631, 3.3965}, {2.4783, 2.7241}, {6.46, 5.87}}};
  for (const Row& row : rows)
    for (const int wide : {0, 1}) {
      INFO("windows " << row.sink << "/" << row.recent << " group " << row.group << " wide "
                      << wide);
      const CacheFormat format =
          format_of(128, row.group, wide == 1 ? 32 : 16, row.sink, row.recent);
      CHECK(oscar::nominal_bits_per_element(format, 32768) ==
            Approx(row.at_32k[wide]).margin(5e-5));
      CHECK(oscar::nominal_bits_per_element(format, 131072) ==
            Approx(row.at_128k[wide]).margin(5e-5));
      CHECK(16.0 / oscar::nominal_bits_per_element(format, 131072) ==
            Approx(row.smaller[wide]).margin(5e-3));
    }
}

TEST_CASE("bytes: single figures of the protocol", "[quant]") {
  const CacheFormat wide = format_of(128, 128, 32, 64, 256);
  CHECK(oscar::split_tokens(wide, 1000).quantized == 680);
  CHECK(oscar::nominal_bits_per_element(wide, 1000) == Approx(6.82));
  for (const size_t tokens : {size_t{1}, size_t{64}, size_t{65}, size_t{320}})
    CHECK(oscar::nominal_bits_per_element(wide, tokens) == 16.0);
  CHECK(oscar::nominal_bits_per_element(wide, 321) < 16.0);
  CHECK(oscar::nominal_bits_per_element(format_of(64, 64, 32, 64, 256), 8192) ==
        Approx(3.5078).margin(5e-5));
  CHECK(oscar::nominal_bits_per_element(format_of(64, 64, 16, 64, 256), 8192) ==
        Approx(3.0273).margin(5e-5));
  CHECK(oscar::slot_bits_per_element(72, 128, 128) == 2.25);
  CHECK(oscar::slot_bits_per_element(96, 128, 128) == 3.0);
  CHECK(oscar::slot_bits_per_element(2 * 48, 128, 128) == 3.0);   // ORT, fp32, group 64
  CHECK(oscar::slot_bits_per_element(2 * 40, 128, 128) == 2.5);   // ORT, fp16, group 64
  CHECK(oscar::slot_bits_per_element(2 * 48, 128, 128) == 3.0);   // ggml q2_0
  CHECK(oscar::slot_bits_per_element(2 * 36, 128, 128) == 2.25);  // ggml oscar2
  CHECK(oscar::slot_compression(72, 512, 64, 4) == Approx(5.15).margin(5e-3));
}

TEST_CASE("bytes: different widths and codecs of K and V", "[quant]") {
  CodecSpec k, v;
  k.head_dim = 192;
  k.group = 64;
  k.meta = MetaFormat::kScaleZeroFp32;
  v.head_dim = 128;
  v.bits = 4;
  const CacheFormat format = oscar::cache_format(k, v, 64, 256);
  // (192 * 2 + 3 groups * 64 bits + 128 * 4 + 32 bits) per token, 320 elements
  const double row_bits = 192 * 2 + 3 * 64 + 128 * 4 + 32;
  CHECK(oscar::nominal_bits_per_element(format, 1000) ==
        Approx((320 * 16 * 320 + 680 * row_bits) / (1000.0 * 320)));
  CHECK(oscar::bytes_per_token(2.5, format, 8, 32) == 2.5 * 320 * 8 * 32 / 8);
  CHECK(oscar::bytes_per_token(2.5, format, 8, 32, 4) == 2.5 * 320 * 2 * 32 / 8);
  CHECK(oscar::bytes_per_token(2.5, format, 4, 32, 8) == 2.5 * 320 * 1 * 32 / 8);  // replicated
  CHECK_THROWS_WITH(oscar::bytes_per_token(2.5, format, 6, 32, 4), Catch::Contains("6 KV heads"));
}

TEST_CASE("bytes: nominal equals the bytes the codecs write", "[quant]") {
  for (const int head_dim : {64, 128})
    for (const MetaFormat meta :
         {MetaFormat::kScaleZeroFp32, MetaFormat::kScaleMinFp16, MetaFormat::kLog8})
      for (const int group : {0, 32}) {
        CodecSpec spec;
        spec.head_dim = head_dim;
        spec.group = group;
        spec.meta = meta;
        spec.log8_scale_max = 1.0F;
        CHECK(oscar::nominal_bits(spec) * head_dim ==
              8.0 * static_cast<double>(oscar::make_codec(spec)->bytes_per_block()));
      }
}

TEST_CASE("bytes: occupied and reserved", "[quant]") {
  const CacheFormat format = format_of(128, 128, 16, 64, 256);
  // Serving after a prefill of 400: 64 sink, 256 recent, 80 quantized; 7 decode steps later the
  // recent window holds 263, after 8 it is 256 again and 88 are quantized.
  const double row = 2.25;
  CHECK(oscar::occupied_bits_per_element(format, 400, 256) == Approx((320 * 16 + 80 * row) / 400));
  CHECK(oscar::occupied_bits_per_element(format, 407, 263) == Approx((327 * 16 + 80 * row) / 407));
  CHECK(oscar::occupied_bits_per_element(format, 408, 256) == Approx((320 * 16 + 88 * row) / 408));
  // 81 rows take a page of 8 more: 88.
  CHECK(oscar::occupied_bits_per_element(format, 401, 256) == Approx((320 * 16 + 88 * row) / 401));
  CHECK_THROWS_WITH(oscar::occupied_bits_per_element(format, 408, 264), Catch::Contains("263"));
  CHECK_THROWS_WITH(oscar::occupied_bits_per_element(format, 100, 40), Catch::Contains("36"));
  CHECK_THROWS_AS(oscar::nominal_bits_per_element(format, 0), oscar::Error);
  // 1000 tokens: sink 64 and a ring of 263 in 16 bits, 936 rows in pages of 8.
  CHECK(oscar::reserved_bytes_per_head(format, 1000) == Approx((64 + 263) * 512.0 + 936 * 72.0));
  CHECK(oscar::reserved_bytes_per_head(format, 1001) == Approx((64 + 263) * 512.0 + 944 * 72.0));
  CHECK(oscar::rotation_bytes(128, 2, 1) == 4 * (2 * 128 * 128 + 128));
}
