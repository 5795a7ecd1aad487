// Random access to activations that were seen once: a capture file, or a temporary file that keeps
// what streaming calibration must visit twice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/checksum.h"
#include "calib/statistics.h"
#include "io/capture_file.h"

namespace oscar {

class ActivationRows {
 public:
  virtual ~ActivationRows() = default;
  // Tokens [begin, end) of one tensor as float32 [end - begin, heads, D]. Not thread-safe.
  virtual void read(size_t layer, CaptureTensor tensor, size_t begin, size_t end,
                    float* destination) const = 0;
};

class CaptureRows : public ActivationRows {
 public:
  explicit CaptureRows(const CaptureReader& reader) : reader_(reader) {}
  void read(size_t layer, CaptureTensor tensor, size_t begin, size_t end,
            float* destination) const override;
  // Token 0 of this view is token `first_token` of the capture.
  void set_first_token(size_t first_token) { first_token_ = first_token; }

 private:
  const CaptureReader& reader_;
  size_t first_token_ = 0;
};

// A temporary file: unlinked at once and gone with the process, or with a name of its own, so that
// an interrupted run can go on with it. Holds about 2 x num_layers x num_kv_heads x D x (2 | 4)
// bytes a token (SmolLM2-135M: 23 KB in bf16), which the page cache keeps out of the process's
// memory. Keys and values of every token are kept, queries only from token `queries_from` on (the
// held-out part).
class SpillRows : public ActivationRows {
 public:
  // folder: where the file is created. bf16: store 16-bit rows (else float32).
  SpillRows(const std::string& folder, const HeadGeometry& geometry, size_t num_layers, bool bf16,
            size_t queries_from);
  // The named file `path`, owned by this object alone (io/exclusive_file.h) until it ends. What an
  // earlier run kept there stays until restart() or resume() is called, one of which must come
  // before append(). Throws Error naming the file when another process has it.
  static std::unique_ptr<SpillRows> named(const std::string& path, const HeadGeometry& geometry,
                                          size_t num_layers, bool bf16, size_t queries_from);
  ~SpillRows() override;
  SpillRows(const SpillRows&) = delete;
  SpillRows& operator=(const SpillRows&) = delete;

  // Sequences in order, each starting at token `first_token`, layers of one sequence in order.
  void append(const LayerActivations& activations, size_t first_token);
  void read(size_t layer, CaptureTensor tensor, size_t begin, size_t end,
            float* destination) const override;
  // The named file starts empty, and is removed with this object unless keep() is called.
  void restart();
  // The named file goes on after the sequences (offsets [n + 1]) that an earlier run kept; what
  // lies behind them is dropped. checksum: what keep() returned. Throws Error naming the file when
  // it is too short or has other bytes.
  void resume(const std::vector<size_t>& offsets, const std::string& checksum);
  // Writes everything to the disk and leaves the named file there when this object ends. Returns
  // the checksum of all rows.
  std::string keep();
  void discard() { kept_ = false; }  // takes keep() back

 private:
  SpillRows(const HeadGeometry& geometry, size_t num_layers, bool bf16, size_t queries_from);
  void extend(size_t layer, CaptureTensor tensor, size_t first_token, size_t num_tokens);
  Checksum checksum_of_file() const;
  // Where rows of consecutive tokens of one tensor lie.
  struct Extent {
    size_t first_token, num_tokens;
    int64_t file_offset;
  };
  const std::vector<Extent>& extents(size_t layer, CaptureTensor tensor) const;
  void write(size_t layer, CaptureTensor tensor, const float* rows, size_t first_token,
             size_t num_tokens);
  size_t row_elements(CaptureTensor tensor) const;

  HeadGeometry geometry_;
  bool bf16_;
  size_t queries_from_;
  std::string path_;  // empty = unlinked
  bool kept_ = false;
  int file_ = -1;
  int64_t file_bytes_ = 0;
  Checksum checksum_;                         // of the file's bytes
  std::vector<std::vector<Extent>> extents_;  // [layer * 3 + tensor]
  mutable std::vector<uint16_t> bf16_rows_;
};

}  // namespace oscar
