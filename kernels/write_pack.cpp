// Matrices of the cache write as the tensor cores take them.
#include <cmath>
#include <cstring>

#include "base/error.h"
#include "base/float16.h"
#include "kernels/write_int2.h"

namespace oscar {
namespace {

size_t at(int i) { return static_cast<size_t>(i); }

// fp16 pieces of a value: high, and low = what is left of it.
struct Pieces {
  uint16_t high, low;
};
Pieces split(float value) {
  const uint16_t high = float_to_fp16(value);
  return {high, float_to_fp16(value - fp16_to_float(high))};
}

// Dim of element e (0, 1) of register i of lane t of a quad: rows read in 16-byte pieces, or in the
// order of the dims.
int dim_by_pieces(int i, int t, int e) { return 32 * (i / 4) + 8 * t + 2 * (i % 4) + e; }
int dim_in_order(int i, int t, int e) { return 8 * i + 2 * t + e; }

void put16(std::vector<uint8_t>& bytes, size_t offset, uint16_t value) {
  std::memcpy(bytes.data() + offset, &value, 2);
}
void put_float(std::vector<uint8_t>& bytes, size_t offset, float value) {
  std::memcpy(bytes.data() + offset, &value, 4);
}

}  // namespace

// [n-tile][k-block][lane]{b0, b1 of the high pieces, b0, b1 of the low pieces}; column g of the
// n-tile is element g % 2 of lane g / 2's output register.
std::vector<uint8_t> pack_write_rotation(const float* rotation, int head_dim,
                                         WriteEncoder encoder) {
  OSCAR_CHECK(record_supports(head_dim),
              "pack_write_rotation: head_dim 64, 96, 128, 192 or 256 expected, got ", head_dim);
  const int blocks = head_dim / 16;
  std::vector<uint8_t> bytes(static_cast<size_t>(write_rotation_bytes(head_dim)));
  for (int tile = 0; tile < head_dim / 8; ++tile)
    for (int block = 0; block < blocks; ++block)
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 4; ++i) {
          const int g = lane / 4, t = lane % 4, e = i % 2;
          const int row = dim_by_pieces(2 * block + i / 2, t, e);
          const int column = encoder == WriteEncoder::kRtn ? dim_by_pieces(tile, g / 2, g % 2)
                                                           : dim_in_order(tile, g / 2, g % 2);
          const float value = rotation[row * head_dim + column];
          OSCAR_CHECK(std::abs(value) <= 2.0F, "pack_write_rotation: entry [", row, ", ", column,
                      "] is ", value, ", at most 2 expected");
          const Pieces pieces = split(value);
          const size_t offset = at((tile * blocks + block) * 32 + lane) * 16 + at(2 * i);
          put16(bytes, offset, pieces.high);
          put16(bytes, offset + 8, pieces.low);
        }
  return bytes;
}

// Four parts:
//   tiles (block of rows >= block of columns), by column block b, then row block: fragments of
//     L[row block, b], [piece][lane][8]: b0, b1 of columns 0-7, b0, b1 of columns 8-15, where the
//     rows 2 t, 2 t + 1 (and + 8) carry the factor 2^(8 - 2 t) (codes come as c * 4^t * 2^-24);
//   -L below the diagonal of the diagonal blocks, [block][row][column], floats;
//   -sum of L over the rows of later blocks, a float a column;
//   pivots.
std::vector<uint8_t> pack_write_metric(const float* l, const float* pivot, int head_dim) {
  OSCAR_CHECK(record_supports(head_dim),
              "pack_write_metric: head_dim 64, 96, 128, 192 or 256 expected, got ", head_dim);
  const int blocks = head_dim / 16;
  std::vector<uint8_t> bytes(static_cast<size_t>(write_metric_bytes(head_dim)));
  const auto entry = [&](int row, int column) {
    const float value = l[row * head_dim + column];
    OSCAR_CHECK(std::abs(value) < 240.0F, "pack_write_metric: entry [", row, ", ", column,
                "] of L is ", value, ", less than 240 expected");
    return row < column ? 0.0F : value;
  };
  size_t offset = 0;
  for (int b = 0; b < blocks; ++b)
    for (int k = b; k < blocks; ++k)
      for (int lane = 0; lane < 32; ++lane)
        for (int i = 0; i < 8; ++i) {
          const int g = lane / 4, t = lane % 4;
          const int row = 16 * k + 2 * t + i % 2 + i / 2 % 2 * 8, column = 16 * b + g + i / 4 * 8;
          const Pieces pieces = split(std::ldexp(entry(row, column), 8 - 2 * t));
          const size_t tile = at(k - b) + at(b * blocks) - at(b * (b - 1) / 2);
          offset = tile * 1024 + at(lane) * 16 + at(2 * i);
          put16(bytes, offset, pieces.high);
          put16(bytes, offset + 512, pieces.low);
        }
  offset = at(blocks * (blocks + 1) / 2) * 1024;
  for (int b = 0; b < blocks; ++b)
    for (int row = 0; row < 16; ++row)
      for (int column = 0; column < 16; ++column, offset += 4)
        put_float(bytes, offset, column < row ? -entry(16 * b + row, 16 * b + column) : 0.0F);
  for (int column = 0; column < head_dim; ++column, offset += 4) {
    double sum = 0.0;
    for (int row = (column / 16 + 1) * 16; row < head_dim; ++row)
      sum += static_cast<double>(entry(row, column));
    put_float(bytes, offset, static_cast<float>(-sum));
  }
  for (int column = 0; column < head_dim; ++column, offset += 4) {
    OSCAR_CHECK(pivot[column] > 0.0F && std::isfinite(pivot[column]), "pack_write_metric: pivot ",
                column, " must be positive, got ", pivot[column]);
    put_float(bytes, offset, pivot[column]);
  }
  return bytes;
}

}  // namespace oscar
