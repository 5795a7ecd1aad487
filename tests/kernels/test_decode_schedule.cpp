#include <catch2/catch.hpp>
#include <map>
#include <vector>

#include "base/error.h"
#include "base/random.h"
#include "kernels/decode_schedule.h"

using namespace oscar;

namespace {

size_t at(int64_t i) { return static_cast<size_t>(i); }

DecodeProblem problem_of(std::vector<SequenceLengths> lengths) {
  DecodeProblem problem;
  problem.lengths = std::move(lengths);
  problem.num_kv_heads = 8;
  problem.group = 4;
  problem.head_dim = 128;
  problem.num_ctas = 132;
  return problem;
}

// Every chunk and page of every segment exactly once, in order, parts numbered, slots disjoint.
void check_complete(const DecodeProblem& problem, const DecodeSchedule& schedule) {
  REQUIRE(schedule.work.size() >= at(problem.num_ctas));
  std::map<int, std::map<int, DecodeWork>> segments;
  size_t seen = 0;
  for (int cta = 0; cta < problem.num_ctas; ++cta) {
    for (int run = cta; run >= 0; run = schedule.work[at(run)].next) {
      const DecodeWork& work = schedule.work[at(run)];
      REQUIRE(++seen <= schedule.work.size());
      if (work.num_columns == 0) {
        CHECK(work.next == -1);
        continue;
      }
      CHECK(segments[work.segment].emplace(work.part, work).second);
    }
  }
  CHECK(seen == schedule.work.size());
  CHECK(segments.size() == at(schedule.num_segments));
  const int columns = problem.group * problem.num_query_tokens;
  const int blocks = (columns + schedule.columns_per_block - 1) / schedule.columns_per_block;
  CHECK(segments.size() == problem.lengths.size() * at(problem.num_kv_heads * blocks));
  std::map<int, int> slots;
  for (const auto& [segment, parts] : segments) {
    int chunk = -1, page = -1, index = 0;
    for (const auto& [part, work] : parts) {
      CHECK(part == index++);
      CHECK(work.num_parts == static_cast<int>(parts.size()));
      const SequenceLengths& lengths = problem.lengths[at(work.seq)];
      CHECK(work.lengths.history == lengths.history);
      if (chunk >= 0) {
        CHECK(work.chunk_begin == chunk);
        CHECK(work.page_begin == page);
      } else if (problem.sliding_window == 0) {
        CHECK(work.chunk_begin == 0);
        CHECK(work.page_begin == 0);
      }
      chunk = work.chunk_end;
      page = work.page_end;
      if (work.num_parts > 1) {
        CHECK(++slots[work.first_slot + part] == 1);
        CHECK(work.first_slot + part < schedule.num_slots);
      } else {
        CHECK(work.first_slot == -1);
      }
    }
    const SequenceLengths& lengths = problem.lengths[at(parts.begin()->second.seq)];
    CHECK(page == (lengths.history + 63) / 64);
    CHECK(chunk ==
          (lengths.sink + 7) / 8 +
              (lengths.recent > 0 ? (lengths.recent_start % 8 + lengths.recent + 7) / 8 : 0));
  }
  CHECK(schedule.num_slots <= 2 * problem.num_ctas);
}

}  // namespace

TEST_CASE("decode schedule: random batches are covered once and evenly") {
  Random random(3);
  for (int round = 0; round < 60; ++round) {
    std::vector<SequenceLengths> lengths;
    const auto batch = 1 + random.below(40);
    for (uint64_t b = 0; b < batch; ++b) {
      lengths.push_back({static_cast<int32_t>(random.below(65)),
                         static_cast<int32_t>(random.below(round % 3 == 0 ? 200 : 20000)),
                         static_cast<int32_t>(1 + random.below(256)),
                         static_cast<int32_t>(random.below(320))});
    }
    DecodeProblem problem = problem_of(lengths);
    problem.group = 1 + static_cast<int>(random.below(16));
    problem.num_kv_heads = 1 + static_cast<int>(random.below(8));
    const int head_dims[] = {64, 96, 128, 192, 256};
    problem.head_dim = head_dims[random.below(5)];
    const DecodeSchedule schedule = make_decode_schedule(problem);
    check_complete(problem, schedule);
    // The fullest block exceeds the mean by less than one run's fixed cost and a little.
    CHECK(schedule.cost_max <= schedule.cost_mean + 64.0);
  }
}

TEST_CASE("decode schedule: one long sequence uses every thread block") {
  const DecodeProblem problem = problem_of({{64, 131072, 256, 0}});
  const DecodeSchedule schedule = make_decode_schedule(problem);
  check_complete(problem, schedule);
  // 16 blocks a KV head, 4 of 132 have nothing to do: no block works on two heads.
  int idle = 0;
  for (int cta = 0; cta < problem.num_ctas; ++cta) {
    idle += schedule.work[at(cta)].num_columns == 0;
    CHECK(schedule.work[at(cta)].next == -1);
  }
  CHECK(idle <= 4);
  CHECK(schedule.cost_max <= 1.05 * 132.0 / 128.0 * schedule.cost_mean);
}

TEST_CASE("decode schedule: blocks share segments when that divides the work better") {
  // One head a block would leave 32 blocks idle.
  DecodeProblem problem = problem_of({{64, 131072, 256, 0}});
  problem.num_kv_heads = 100;
  const DecodeSchedule schedule = make_decode_schedule(problem);
  check_complete(problem, schedule);
  int chained = 0;
  for (int cta = 0; cta < problem.num_ctas; ++cta) chained += schedule.work[at(cta)].next >= 0;
  CHECK(chained > 0);
  CHECK(schedule.cost_max <= 1.05 * schedule.cost_mean);
}

TEST_CASE("decode schedule: the reader of a segment is its highest block") {
  for (const int history : {300, 5000, 100000}) {
    const DecodeProblem problem = problem_of({{64, history, 256, 0}, {64, 3 * history, 100, 9}});
    const DecodeSchedule schedule = make_decode_schedule(problem);
    std::map<int, std::map<int, int>> block_of;  // segment, part
    for (int cta = 0; cta < problem.num_ctas; ++cta) {
      for (int run = cta; run >= 0; run = schedule.work[at(run)].next) {
        const DecodeWork& work = schedule.work[at(run)];
        if (work.num_columns == 0) continue;
        block_of[work.segment][work.part] = cta;
        // Only a block's first run may be a later part: the kernel joins the parts of that run
        // alone.
        if (work.part > 0) CHECK(run == cta);
      }
    }
    for (const auto& [segment, parts] : block_of) {
      int previous = -1;
      for (const auto& [part, cta] : parts) {
        CHECK(cta > previous);
        previous = cta;
      }
    }
  }
}

TEST_CASE("decode schedule: a long sequence among short ones leaves no tail") {
  std::vector<SequenceLengths> lengths(31, SequenceLengths{64, 512, 256, 0});
  lengths.push_back({64, 131072, 256, 0});
  const DecodeProblem problem = problem_of(lengths);
  const DecodeSchedule schedule = make_decode_schedule(problem);
  check_complete(problem, schedule);
  CHECK(schedule.cost_max <= 1.15 * schedule.cost_mean);
}

TEST_CASE("decode schedule: a sliding window leaves old pages out") {
  DecodeProblem problem = problem_of({{64, 10000, 256, 7}});
  problem.sliding_window = 1024;
  const DecodeSchedule schedule = make_decode_schedule(problem);
  check_complete(problem, schedule);
  for (const DecodeWork& work : schedule.work) {
    if (work.num_columns == 0) continue;
    CHECK(work.chunk_begin >= 8);  // no sink
    // The query at 10319 sees keys from 9296 on: history token 9232, page 144.
    CHECK(work.page_begin >= 144);
  }
}

TEST_CASE("decode schedule: impossible problems are refused") {
  CHECK_THROWS_AS(make_decode_schedule(problem_of({})), Error);
  CHECK_THROWS_AS(make_decode_schedule(problem_of({{0, 0, 0, 0}})), Error);
  CHECK_THROWS_AS(make_decode_schedule(problem_of({{64, -1, 10, 0}})), Error);
  const auto refused = [](auto change) {
    DecodeProblem problem = problem_of({{64, 100, 10, 0}});
    change(problem);
    CHECK_THROWS_AS(make_decode_schedule(problem), Error);
  };
  refused([](DecodeProblem& p) { p.head_dim = 80; });
  refused([](DecodeProblem& p) { p.group = 17; });
  refused([](DecodeProblem& p) { p.group = 0; });
  refused([](DecodeProblem& p) { p.num_query_tokens = 9; });
  refused([](DecodeProblem& p) { p.num_ctas = 0; });
  refused([](DecodeProblem& p) { p.num_kv_heads = 0; });
  refused([](DecodeProblem& p) { p.sliding_window = -1; });
}
