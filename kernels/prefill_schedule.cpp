#include "kernels/prefill_schedule.h"

#include <algorithm>

#include "base/error.h"

namespace oscar {
namespace {

void check_problem(const PrefillProblem& p) {
  OSCAR_CHECK(!p.lengths.empty() && p.lengths.size() == p.new_tokens.size(),
              "prefill schedule: lengths and new tokens of the same sequences expected, got ",
              p.lengths.size(), " and ", p.new_tokens.size());
  OSCAR_CHECK(p.num_kv_heads > 0 && p.group >= 1 && p.group <= 16,
              "prefill schedule: at least one KV head and a group of 1..16 expected, got ",
              p.num_kv_heads, " and ", p.group);
  OSCAR_CHECK(p.sliding_window >= 0, "prefill schedule: sliding_window >= 0 expected, got ",
              p.sliding_window);
  OSCAR_CHECK(p.rows_per_tile > 0, "prefill schedule: positive rows_per_tile expected, got ",
              p.rows_per_tile);
  int64_t total = 0;
  for (size_t seq = 0; seq < p.lengths.size(); ++seq) {
    const SequenceLengths& n = p.lengths[seq];
    OSCAR_CHECK(n.sink >= 0 && n.history >= 0 && n.recent >= 0 && p.new_tokens[seq] > 0,
                "prefill schedule: sequence ", seq, " has ", n.sink, " + ", n.history, " + ",
                n.recent, " cached and ", p.new_tokens[seq],
                " new tokens, at least one new token expected");
    total += int64_t{p.new_tokens[seq]} * p.group;
    const int64_t positions =
        int64_t{n.sink} + n.history + n.recent + int64_t{p.new_tokens[seq]} * p.group;
    OSCAR_CHECK(positions < (int64_t{1} << 30), "prefill schedule: sequence ", seq,
                " is longer than 2^30 rows and keys");
  }
  OSCAR_CHECK(total < (int64_t{1} << 31), "prefill schedule: fewer than 2^31 query rows expected");
}

}  // namespace

std::vector<PrefillWork> make_prefill_schedule(const PrefillProblem& p) {
  check_problem(p);
  std::vector<PrefillWork> work;
  int new_begin = 0;
  for (size_t seq = 0; seq < p.lengths.size(); ++seq) {
    const SequenceLengths& n = p.lengths[seq];
    const int rows = p.new_tokens[seq] * p.group;
    for (int row = 0; row < rows; row += p.rows_per_tile) {
      PrefillWork tile{};
      tile.lengths = n;
      tile.seq = static_cast<int32_t>(seq);
      tile.first_row = row;
      tile.num_rows = std::min(p.rows_per_tile, rows - row);
      tile.new_begin = new_begin;
      tile.new_tokens = (row + tile.num_rows - 1) / p.group + 1;
      tile.block_end = prefill_num_blocks(n, tile.new_tokens);
      if (p.sliding_window > 0) {
        // Keys before the window of the tile's first token are seen by none of its rows.
        const int first = n.sink + n.history + n.recent + row / p.group - p.sliding_window + 1;
        for (; tile.block_begin < tile.block_end; ++tile.block_begin) {
          const PrefillBlock block = prefill_block(n, tile.new_tokens, tile.block_begin);
          if (block.position + block.count > first) break;
        }
      }
      for (int head = 0; head < p.num_kv_heads; ++head) {
        tile.kv_head = head;
        work.push_back(tile);
      }
    }
    new_begin += p.new_tokens[seq];
  }
  // Longest first: the short tiles fill the gaps at the end.
  std::stable_sort(work.begin(), work.end(), [](const PrefillWork& a, const PrefillWork& b) {
    return a.block_end - a.block_begin > b.block_end - b.block_begin;
  });
  return work;
}

}  // namespace oscar
