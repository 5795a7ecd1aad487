#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "base/error.h"
#include "kernels/prefill_schedule.h"

using namespace oscar;

namespace {

PrefillProblem problem_of(std::vector<SequenceLengths> lengths, std::vector<int> new_tokens) {
  PrefillProblem p;
  p.lengths = std::move(lengths);
  p.new_tokens = std::move(new_tokens);
  p.num_kv_heads = 2;
  p.group = 3;
  p.rows_per_tile = 128;
  return p;
}

}  // namespace

TEST_CASE("prefill schedule: blocks cover every cached and new token once, in order") {
  for (const SequenceLengths& n :
       {SequenceLengths{64, 200, 100, 0}, SequenceLengths{0, 0, 0, 0}, SequenceLengths{70, 1, 0, 0},
        SequenceLengths{1, 64, 65, 5}, SequenceLengths{0, 129, 1, 3}}) {
    for (const int new_tokens : {1, 64, 65, 300}) {
      const int cached = n.sink + n.history + n.recent;
      int position = 0;
      for (int i = 0; i < prefill_num_blocks(n, new_tokens); ++i) {
        const PrefillBlock block = prefill_block(n, new_tokens, i);
        REQUIRE(block.position == position);
        REQUIRE(block.count >= 1);
        REQUIRE(block.count <= 64);
        REQUIRE(block.first % 64 == 0);
        const int begin = block.source == PrefillSource::kSink      ? 0
                          : block.source == PrefillSource::kHistory ? n.sink
                          : block.source == PrefillSource::kRecent  ? n.sink + n.history
                                                                    : cached;
        REQUIRE(begin + block.first == position);
        if (i + 1 < prefill_num_blocks(n, new_tokens)) {
          const PrefillBlock next = next_block(n, new_tokens, block);
          const PrefillBlock wanted = prefill_block(n, new_tokens, i + 1);
          CHECK(next.source == wanted.source);
          CHECK(next.first == wanted.first);
          CHECK(next.count == wanted.count);
          CHECK(next.position == wanted.position);
        }
        position += block.count;
      }
      CHECK(position == cached + new_tokens);
    }
  }
}

TEST_CASE("prefill schedule: every row once, with the blocks it sees and no more") {
  for (const int window : {0, 1, 64, 100, 1000}) {
    for (const int group : {1, 3, 4, 16}) {
      PrefillProblem p =
          problem_of({{64, 500, 256, 10}, {0, 0, 0, 0}, {64, 3, 0, 0}}, {300, 1, 77});
      p.group = group;
      p.sliding_window = window;
      std::map<std::pair<int, int>, std::set<int>> rows;  // by (sequence, KV head)
      size_t longest = 1000000;
      for (const PrefillWork& w : make_prefill_schedule(p)) {
        const auto seq = static_cast<size_t>(w.seq);
        const SequenceLengths& n = p.lengths[seq];
        CHECK(w.new_begin == (w.seq == 0 ? 0 : w.seq == 1 ? 300 : 301));
        for (int row = w.first_row; row < w.first_row + w.num_rows; ++row) {
          REQUIRE(row < p.new_tokens[seq] * group);
          REQUIRE(rows[{w.seq, w.kv_head}].insert(row).second);
        }
        const int cached = n.sink + n.history + n.recent;
        const int first = cached + w.first_row / group;
        const int last = cached + (w.first_row + w.num_rows - 1) / group;
        const PrefillBlock begin = prefill_block(n, w.new_tokens, w.block_begin);
        const PrefillBlock end = prefill_block(n, w.new_tokens, w.block_end - 1);
        CHECK(end.position + end.count == last + 1);
        const int seen = window == 0 ? 0 : std::max(0, first - window + 1);
        CHECK(begin.position <= seen);
        CHECK(begin.position + begin.count > seen);
        const auto blocks = static_cast<size_t>(w.block_end - w.block_begin);
        CHECK(blocks <= longest);
        longest = blocks;
      }
      CHECK(rows.size() == 6);
      for (const auto& [key, set] : rows)
        CHECK(static_cast<int>(set.size()) == p.new_tokens[static_cast<size_t>(key.first)] * group);
    }
  }
}

TEST_CASE("prefill schedule: impossible problems are refused") {
  const auto refused = [](auto change) {
    PrefillProblem p = problem_of({{64, 500, 256, 10}}, {300});
    change(p);
    CHECK_THROWS_AS(make_prefill_schedule(p), Error);
  };
  refused([](PrefillProblem& p) { p.lengths.clear(); });
  refused([](PrefillProblem& p) { p.new_tokens.push_back(1); });
  refused([](PrefillProblem& p) { p.new_tokens[0] = 0; });
  refused([](PrefillProblem& p) { p.lengths[0].history = -1; });
  refused([](PrefillProblem& p) { p.lengths[0].history = 1 << 30; });
  refused([](PrefillProblem& p) { p.group = 17; });
  refused([](PrefillProblem& p) { p.num_kv_heads = 0; });
  refused([](PrefillProblem& p) { p.rows_per_tile = 0; });
  refused([](PrefillProblem& p) { p.sliding_window = -1; });
}
