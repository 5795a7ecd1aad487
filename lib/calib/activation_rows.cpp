#include "calib/activation_rows.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/float16.h"
#include "base/parallel.h"
#include "io/exclusive_file.h"

namespace oscar {
namespace {

constexpr size_t kConvertGrain = 1U << 16;  // elements converted by one work item
constexpr size_t kTensors = 3;              // q, k, v
constexpr const char* kDeleteBoth =
    "; delete it and the .part file beside it to start the calibration anew";

void write_all(int file, const void* bytes, size_t count, int64_t offset) {
  const auto* cursor = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t written = pwrite(file, cursor, count, offset);
    OSCAR_CHECK(written > 0, "temporary file of the calibration: cannot write: ",
                written == 0 ? "no progress" : std::strerror(errno));
    cursor += written;
    offset += written;
    count -= static_cast<size_t>(written);
  }
}

void read_all(int file, void* bytes, size_t count, int64_t offset) {
  auto* cursor = static_cast<char*>(bytes);
  while (count > 0) {
    const ssize_t got = pread(file, cursor, count, offset);
    OSCAR_CHECK(got > 0, "temporary file of the calibration: cannot read: ",
                got == 0 ? "unexpected end" : std::strerror(errno));
    cursor += got;
    offset += got;
    count -= static_cast<size_t>(got);
  }
}

}  // namespace

void CaptureRows::read(size_t layer, CaptureTensor tensor, size_t begin, size_t end,
                       float* destination) const {
  reader_.read_into(static_cast<int64_t>(layer), tensor, static_cast<int64_t>(first_token_ + begin),
                    static_cast<int64_t>(first_token_ + end), destination);
}

SpillRows::SpillRows(const HeadGeometry& geometry, size_t num_layers, bool bf16,
                     size_t queries_from)
    : geometry_(geometry),
      bf16_(bf16),
      queries_from_(queries_from),
      extents_(num_layers * kTensors) {}

SpillRows::SpillRows(const std::string& folder, const HeadGeometry& geometry, size_t num_layers,
                     bool bf16, size_t queries_from)
    : SpillRows(geometry, num_layers, bf16, queries_from) {
  std::string name = (folder.empty() ? std::string(".") : folder) + "/oscar-calibrate-XXXXXX";
  file_ = mkstemp(name.data());
  OSCAR_CHECK(file_ >= 0, folder, ": cannot create a temporary file: ", std::strerror(errno));
  unlink(name.c_str());
}

std::unique_ptr<SpillRows> SpillRows::named(const std::string& path, const HeadGeometry& geometry,
                                            size_t num_layers, bool bf16, size_t queries_from) {
  std::unique_ptr<SpillRows> rows(new SpillRows(geometry, num_layers, bf16, queries_from));
  rows->file_ = open_exclusively(path);
  rows->path_ = path;
  rows->kept_ = lseek(rows->file_, 0, SEEK_END) > 0;
  return rows;
}

SpillRows::~SpillRows() {
  if (!path_.empty() && !kept_) unlink(path_.c_str());  // before the lock goes
  if (file_ >= 0) close(file_);
}

void SpillRows::restart() {
  OSCAR_CHECK(ftruncate(file_, 0) == 0, path_, ": cannot truncate: ", std::strerror(errno));
  kept_ = false;
}

// Repeats the bookkeeping of append() for the sequences that are in the file.
void SpillRows::resume(const std::vector<size_t>& offsets, const std::string& checksum) {
  for (size_t s = 0; s + 1 < offsets.size(); ++s)
    for (size_t layer = 0; layer < extents_.size() / kTensors; ++layer)
      for (const CaptureTensor tensor : {CaptureTensor::kK, CaptureTensor::kV, CaptureTensor::kQ})
        if (tensor != CaptureTensor::kQ || offsets[s + 1] > queries_from_)
          extend(layer, tensor, offsets[s], offsets[s + 1] - offsets[s]);
  const off_t bytes = lseek(file_, 0, SEEK_END);
  OSCAR_CHECK(bytes >= file_bytes_, path_, ": the kept rows end at byte ", bytes,
              ", expected at least ", file_bytes_, kDeleteBoth);
  checksum_ = checksum_of_file();
  OSCAR_CHECK(checksum_.hex() == checksum, path_, ": the kept rows are damaged: checksum ",
              checksum_.hex(), " of ", file_bytes_, " bytes, expected ", checksum, kDeleteBoth);
  OSCAR_CHECK(ftruncate(file_, file_bytes_) == 0, path_,
              ": cannot truncate: ", std::strerror(errno));
}

// Of the file_bytes_ bytes, in pieces as they were written.
Checksum SpillRows::checksum_of_file() const {
  constexpr size_t kPieceBytes = 1U << 20;
  const auto item_bytes = static_cast<int64_t>(bf16_ ? sizeof(uint16_t) : sizeof(float));
  std::vector<std::pair<int64_t, int64_t>> pieces;  // offset, bytes
  for (size_t i = 0; i < extents_.size(); ++i)
    for (const Extent& extent : extents_[i]) {
      const size_t row = row_elements(static_cast<CaptureTensor>(i % kTensors));
      pieces.emplace_back(extent.file_offset,
                          static_cast<int64_t>(extent.num_tokens * row) * item_bytes);
    }
  std::sort(pieces.begin(), pieces.end());
  Checksum checksum;
  std::vector<char> buffer(kPieceBytes);
  for (const auto& [offset, bytes] : pieces)
    for (int64_t done = 0; done < bytes;) {
      const size_t count =
          static_cast<size_t>(std::min(bytes - done, static_cast<int64_t>(kPieceBytes)));
      read_all(file_, buffer.data(), count, offset + done);
      checksum.add(buffer.data(), count);
      done += static_cast<int64_t>(count);
    }
  return checksum;
}

std::string SpillRows::keep() {
  OSCAR_CHECK(!path_.empty(), "rows without a name cannot be kept");
  OSCAR_CHECK(fdatasync(file_) == 0, path_, ": cannot write to the disk: ", std::strerror(errno));
  kept_ = true;
  return checksum_.hex();
}

// Notes rows at the end of the file.
void SpillRows::extend(size_t layer, CaptureTensor tensor, size_t first_token, size_t num_tokens) {
  extents_[layer * kTensors + static_cast<size_t>(tensor)].push_back(
      {first_token, num_tokens, file_bytes_});
  file_bytes_ += static_cast<int64_t>(num_tokens * row_elements(tensor) *
                                      (bf16_ ? sizeof(uint16_t) : sizeof(float)));
}

size_t SpillRows::row_elements(CaptureTensor tensor) const {
  return (tensor == CaptureTensor::kQ ? geometry_.num_heads : geometry_.num_kv_heads) *
         geometry_.head_dim;
}

const std::vector<SpillRows::Extent>& SpillRows::extents(size_t layer, CaptureTensor tensor) const {
  OSCAR_CHECK(tensor != CaptureTensor::kO && layer < extents_.size() / kTensors,
              "temporary file of the calibration holds q, k and v of ", extents_.size() / kTensors,
              " layers; asked for ", tensor_name(tensor), " of layer ", layer);
  return extents_[layer * kTensors + static_cast<size_t>(tensor)];
}

void SpillRows::write(size_t layer, CaptureTensor tensor, const float* rows, size_t first_token,
                      size_t num_tokens) {
  const size_t count = num_tokens * row_elements(tensor);
  size_t bytes = count * sizeof(float);
  if (bf16_) {
    bytes = count * sizeof(uint16_t);
    bf16_rows_.resize(std::max(bf16_rows_.size(), count));
    parallel_for_ranges(count, kConvertGrain, [&](size_t begin, size_t end) {
      float_to_bf16(rows + begin, end - begin, bf16_rows_.data() + begin);
    });
    write_all(file_, bf16_rows_.data(), bytes, file_bytes_);
    checksum_.add(bf16_rows_.data(), bytes);
  } else {
    write_all(file_, rows, bytes, file_bytes_);
    checksum_.add(rows, bytes);
  }
  extend(layer, tensor, first_token, num_tokens);
}

void SpillRows::append(const LayerActivations& activations, size_t first_token) {
  const size_t layer = activations.layer, count = activations.num_tokens;
  extents(layer, CaptureTensor::kK);  // checks the layer
  write(layer, CaptureTensor::kK, activations.k, first_token, count);
  write(layer, CaptureTensor::kV, activations.v, first_token, count);
  if (first_token + count > queries_from_)
    write(layer, CaptureTensor::kQ, activations.q, first_token, count);
}

void SpillRows::read(size_t layer, CaptureTensor tensor, size_t begin, size_t end,
                     float* destination) const {
  const size_t row = row_elements(tensor);
  const size_t item_bytes = bf16_ ? sizeof(uint16_t) : sizeof(float);
  const std::vector<Extent>& kept = extents(layer, tensor);
  size_t covered = 0;
  for (const Extent& extent : kept) {
    const size_t from = std::max(begin, extent.first_token);
    const size_t to = std::min(end, extent.first_token + extent.num_tokens);
    if (from < to) covered += to - from;
  }
  OSCAR_CHECK(covered == end - begin, "temporary file of the calibration: tokens [", begin, ", ",
              end, ") of ", tensor_name(tensor), " were not kept");
  for (const Extent& extent : kept) {
    const size_t from = std::max(begin, extent.first_token);
    const size_t to = std::min(end, extent.first_token + extent.num_tokens);
    if (from >= to) continue;
    const size_t count = (to - from) * row;
    const int64_t offset =
        extent.file_offset + static_cast<int64_t>((from - extent.first_token) * row * item_bytes);
    float* target = destination + (from - begin) * row;
    if (bf16_) {
      bf16_rows_.resize(std::max(bf16_rows_.size(), count));
      read_all(file_, bf16_rows_.data(), count * item_bytes, offset);
      parallel_for_ranges(count, kConvertGrain, [&](size_t a, size_t b) {
        bf16_to_float(bf16_rows_.data() + a, b - a, target + a);
      });
    } else {
      read_all(file_, target, count * item_bytes, offset);
    }
  }
}

}  // namespace oscar
