// The fast readers of packed rows give the bits of the codec.
#include <catch2/catch.hpp>

#include "model/cache_fixture.h"
#include "model/packed_rows.h"

using namespace oscar_test;

TEST_CASE("packed rows read as the codec decodes them", "[packed_rows]") {
  struct Shape {
    int head_dim, group;
    bool fast;
  };
  const size_t num_rows = 64;
  for (const Shape& shape : {Shape{64, 64, true}, Shape{128, 32, true}, Shape{80, 80, true},
                             Shape{96, 16, true}, Shape{64, 8, false}}) {
    for (const MetaFormat meta :
         {MetaFormat::kScaleMinFp16, MetaFormat::kScaleMinFp16First, MetaFormat::kScaleZeroFp32,
          MetaFormat::kScaleZeroBf16, MetaFormat::kScaleZeroFp16, MetaFormat::kLog8}) {
      CAPTURE(shape.head_dim, shape.group, static_cast<int>(meta));
      const auto width = static_cast<size_t>(shape.head_dim);
      CodecSpec spec;
      spec.head_dim = shape.head_dim;
      spec.group = shape.group;
      spec.meta = meta;
      if (meta == MetaFormat::kLog8) spec.log8_scale_max = 4.0F;
      const std::unique_ptr<Codec> codec = make_codec(spec);
      const std::vector<float> rows = random_values(num_rows * width, 3, 2.0F);
      std::vector<uint8_t> bytes(num_rows * codec->bytes_per_block());
      codec->encode(rows.data(), width, num_rows, bytes.data(), nullptr);
      std::vector<float> expected(num_rows * width);
      codec->decode(bytes.data(), num_rows, expected.data(), width);
      const PackedRowReader reader(*codec);
      CHECK(reader.has_panel() == (shape.fast && attention_kernels().dequantize_panel != nullptr));
      std::vector<float> actual(num_rows * (width + 3));
      reader.rows(bytes.data(), num_rows, actual.data(), width + 3);
      size_t wrong = 0;
      for (size_t i = 0; i < num_rows * width; ++i) {
        if (actual[i / width * (width + 3) + i % width] != expected[i]) ++wrong;
      }
      CHECK(wrong == 0);
      if (!reader.has_panel()) continue;
      for (const auto& [first, count, column] :
           {std::array<size_t, 3>{0, 64, 0}, {3, 21, 40}, {17, 1, 63}, {0, 59, 5}}) {
        std::vector<float> panel(width * kKeyBlock, -77.0F);
        reader.panel(bytes.data() + first * codec->bytes_per_block(), count, panel.data(), column);
        wrong = 0;
        for (size_t d = 0; d < width; ++d) {
          for (size_t j = 0; j < kKeyBlock; ++j) {
            const bool inside = j >= column && j < column + count;
            const float want = inside ? expected[(first + j - column) * width + d] : -77.0F;
            if (panel[d * kKeyBlock + j] != want) ++wrong;
          }
        }
        CHECK(wrong == 0);
      }
    }
  }
}

TEST_CASE("other layouts go through the codec", "[packed_rows]") {
  std::vector<CodecSpec> specs(5);
  for (CodecSpec& spec : specs) spec.head_dim = 64;
  specs[0].bits = 4;
  specs[1].bits = 8;
  specs[2].order = PackOrder::kQuartered;
  specs[3].levels = Levels::kLloydExact;
  specs[4].group = 32;
  specs[4].axis = GroupAxis::kTokens;
  for (const CodecSpec& spec : specs) {
    const std::unique_ptr<Codec> codec = make_codec(spec);
    const PackedRowReader reader(*codec);
    CHECK_FALSE(reader.has_panel());
    const auto block = static_cast<size_t>(codec->token_block());
    const std::vector<float> rows = random_values(2 * block * 64, 4);
    std::vector<uint8_t> bytes(2 * codec->bytes_per_block());
    codec->encode(rows.data(), 64, 2, bytes.data(), nullptr);
    std::vector<float> expected(rows.size()), actual(rows.size());
    codec->decode(bytes.data(), 2, expected.data(), 64);
    reader.rows(bytes.data(), 2, actual.data(), 64);
    CHECK(actual == expected);
  }
}
