// INT2 pages to and from the row layouts of serving engines (SGLang, vLLM), and page copies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/mixed_cache.h"
#include "quant/int2_format.h"

namespace oscar {

// One layer's cache of an engine, addressed by token slots; one metadata pair a row. All device
// memory.
struct EngineRows {
  enum class Layout : uint8_t {
    kSglang,  // codes u8 [num_slots, num_kv_heads, D / 4], pairs [num_slots, num_kv_heads, 2]
    kVllm,    // u8 [num_slots, num_kv_heads, slot bytes]: K codes, K pair, V codes, V pair
              // (VllmSlotFormat); slot = block * block_size + offset in the block
  };
  Layout layout = Layout::kSglang;
  PackOrder order = PackOrder::kQuartered;       // kVllm as published: kConsecutive
  MetaFormat meta = MetaFormat::kScaleZeroFp32;  // kSglang: kScaleZeroFp32, kScaleZeroBf16 or
                                                 // kScaleZeroFp16; kVllm: kScaleMinFp16First
  int vllm_half_alignment = 1;                   // 1 (pull request 46774) or 16 (47055)
  int64_t num_slots = 0;
  // kSglang, 8-byte aligned.
  void* k_codes = nullptr;
  void* k_pairs = nullptr;
  void* v_codes = nullptr;
  void* v_pairs = nullptr;
  // kVllm, 4-byte aligned.
  void* slots = nullptr;
};

// Consecutive history tokens of one sequence. Device POD. Two jobs of a launch must not touch the
// same record (to records) or the same slot (to rows).
struct RepackJob {
  const int32_t* page_table;  // of the sequence: page of history tokens [64 j, 64 j + 64)
  const int64_t* slots;       // [num_tokens]: engine slot of each token
  int32_t first_token;        // index in the history of the job's first token
  int32_t num_tokens;
  int32_t first_tile;  // records touched by the jobs before this one
  int32_t reserved;
};
static_assert(sizeof(RepackJob) == 32);

enum class RepackDirection : uint8_t { kToRows, kToRecords };

struct RepackParams {
  RepackDirection direction = RepackDirection::kToRows;
  int num_kv_heads = 0, head_dim = 0;
  void* pages =
      nullptr;  // device, INT2 pool: [num_pages][num_kv_heads][4 records], 16-byte aligned
  int num_pages = 0;
  EngineRows rows;
  const RepackJob* jobs = nullptr;  // device, [num_jobs], ascending first_tile
  int num_jobs = 0;
  int num_tiles = 0;  // sum of repack_tiles() over the jobs
  // Device, added to, must not be null: rows (of one side) whose pair the destination's metadata
  // cannot hold. They are stored as zeros (scale 1).
  unsigned long long* refused_rows = nullptr;
  // Reads jobs, tables and slots back and checks them (slow, synchronises).
  bool check_tables = false;
};

// Records that tokens [first_token, first_token + num_tokens) touch.
constexpr int repack_tiles(int first_token, int num_tokens) {
  return (first_token + num_tokens + kRecordTokens - 1) / kRecordTokens -
         first_token / kRecordTokens;
}

// Codes are kept; the pair goes through minimum = -zero * scale and zero = -minimum / scale in
// fp32, rounded to the new type: the bits of the CPU's RecordRowConverter. To records, other tokens
// of a touched record keep their bits; to rows, padding bytes of vLLM slots keep theirs.
// stream: a cudaStream_t. Throws Error on an unsupported shape or layout, a null or misaligned
// pointer, no tokens, or (with check_tables) a page id or slot out of range.
void repack_int2(const RepackParams& params, void* stream);

// One page copied; device POD.
struct PageCopy {
  int32_t source, destination;
};

// Copies whole pages inside a pool or from one pool to another (copy-on-write of shared prefixes):
// INT2 pages or BF16 pages, page_bytes a multiple of 16. No destination may be another copy's
// source or destination.
struct CopyPagesParams {
  const void* source_pool = nullptr;  // device, [num_source_pages][page_bytes], 16-byte aligned
  int num_source_pages = 0;
  void* destination_pool = nullptr;
  int num_destination_pages = 0;
  int64_t page_bytes = 0;
  const PageCopy* copies = nullptr;  // device, [num_copies]
  int num_copies = 0;
  bool check_tables = false;  // reads the copies back and checks the ids (slow, synchronises)
};
void copy_pages(const CopyPagesParams& params, void* stream);

}  // namespace oscar
