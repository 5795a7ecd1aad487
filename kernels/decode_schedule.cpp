#include "kernels/decode_schedule.h"

#include <algorithm>
#include <cmath>

#include "base/error.h"

namespace oscar {
namespace {

// Fixed cost of a run (query, merge over the warps) in INT2 pages: about 1.5 us on an H200, of
// which the copies that go on meanwhile hide a part.
constexpr double kRunCost = 10.0;
// A segment is not cut when less than this would be left on one side: the merge costs more.
constexpr double kMinRun = 4.0;
// Thread blocks with one run each are taken although others would be this much fuller: nothing is
// hidden at the end of a short launch.
constexpr double kSingleRunBonus = 1.04;

struct Segment {
  DecodeWork whole;  // chunk and page ranges of the segment
  double cost = 0;
};

void check(const DecodeProblem& problem) {
  OSCAR_CHECK(!problem.lengths.empty(), "decode schedule: empty batch");
  OSCAR_CHECK(record_supports(problem.head_dim),
              "decode schedule: head_dim 64, 96, 128, 192 or 256 expected, got ", problem.head_dim);
  OSCAR_CHECK(problem.num_kv_heads > 0, "decode schedule: at least one KV head expected, got ",
              problem.num_kv_heads);
  OSCAR_CHECK(problem.group >= 1 && problem.group <= 16,
              "decode schedule: 1..16 query heads per KV head expected, got ", problem.group);
  OSCAR_CHECK(problem.num_query_tokens >= 1 && problem.num_query_tokens <= 8,
              "decode schedule: 1..8 query tokens expected, got ", problem.num_query_tokens);
  OSCAR_CHECK(problem.sliding_window >= 0, "decode schedule: sliding window >= 0 expected, got ",
              problem.sliding_window);
  OSCAR_CHECK(problem.num_ctas > 0, "decode schedule: at least one thread block expected, got ",
              problem.num_ctas);
  for (size_t b = 0; b < problem.lengths.size(); ++b) {
    const SequenceLengths& n = problem.lengths[b];
    OSCAR_CHECK(n.sink >= 0 && n.history >= 0 && n.recent >= 0 && n.recent_start >= 0,
                "decode schedule: sequence ", b, " has a negative length");
    const int64_t total = int64_t{n.sink} + n.history + n.recent;
    OSCAR_CHECK(total >= problem.num_query_tokens && total < (int64_t{1} << 30),
                "decode schedule: sequence ", b, " has ", total, " tokens, expected at least the ",
                problem.num_query_tokens, " query tokens and fewer than 2^30");
  }
}

// Chunks and pages that any query token of the sequence can see.
DecodeWork visible_range(const DecodeProblem& problem, const SequenceLengths& n) {
  DecodeWork work{};
  constexpr int kTokens = kDecodeChunkTokens;
  const int sink_chunks = (n.sink + kTokens - 1) / kTokens;
  work.chunk_begin = 0;
  // Ring chunks are aligned in the ring.
  const int skipped = n.recent_start % kTokens;
  work.chunk_end = sink_chunks + (n.recent > 0 ? (skipped + n.recent + kTokens - 1) / kTokens : 0);
  work.page_begin = 0;
  work.page_end = (n.history + kInt2PageTokens - 1) / kInt2PageTokens;
  work.lengths = n;
  work.next = -1;
  if (problem.sliding_window == 0) return work;
  // The first query token sees furthest back.
  const int first_query = n.sink + n.history + n.recent - problem.num_query_tokens;
  const int first_key = std::max(0, first_query - problem.sliding_window + 1);
  if (first_key < n.sink) {
    work.chunk_begin = first_key / kTokens;
  } else if (first_key < n.sink + n.history) {
    work.chunk_begin = sink_chunks;
    work.page_begin = (first_key - n.sink) / kInt2PageTokens;
  } else {
    work.chunk_begin = sink_chunks + (skipped + first_key - n.sink - n.history) / kTokens;
    work.page_begin = work.page_end;
  }
  return work;
}

struct Division {
  double budget = 0;        // largest load of a thread block
  bool single_run = false;  // no thread block works on two segments
};

// Cuts the segments over blocks; returns false when more than num_ctas would be needed. `schedule`
// may be null (trial).
bool distribute(const std::vector<Segment>& segments, Division division, double chunk_cost,
                int num_ctas, DecodeSchedule* schedule) {
  if (schedule != nullptr) {
    DecodeWork idle{};
    idle.next = idle.first_slot = -1;
    schedule->work.assign(static_cast<size_t>(num_ctas), idle);
  }
  std::vector<size_t> placed;  // entries of the segment at hand
  int cta = 0;
  double load = 0;
  size_t last_of_cta = 0;
  const auto next_cta = [&] {
    ++cta;
    load = 0;
  };
  for (size_t s = 0; s < segments.size(); ++s) {
    const Segment& segment = segments[s];
    placed.clear();
    if (division.single_run && load > 0) next_cta();
    int chunk = segment.whole.chunk_begin, page = segment.whole.page_begin, parts = 0;
    double left = segment.cost;
    while (parts == 0 || left > 0) {
      if (cta >= num_ctas) return false;
      double room = division.budget - load - kRunCost;
      if (room < std::min(left, kMinRun) && load > 0) {
        next_cta();
        continue;
      }
      if (left - room < kMinRun && left <= room + 1e-9) room = left;
      DecodeWork run = segment.whole;
      run.chunk_begin = chunk;
      run.page_begin = page;
      const int chunks = std::min(segment.whole.chunk_end - chunk,
                                  std::max(0, static_cast<int>(room / chunk_cost + 1e-9)));
      chunk += chunks;
      double used = chunks * chunk_cost;
      if (chunk == segment.whole.chunk_end) {
        const int pages = std::min(segment.whole.page_end - page,
                                   std::max(0, static_cast<int>(room - used + 1e-9)));
        page += pages;
        used += pages;
      }
      if (used == 0 && left > 0) {  // not even one item fits
        if (load == 0) return false;
        next_cta();
        continue;
      }
      run.chunk_end = chunk;
      run.page_end = page;
      left = (segment.whole.chunk_end - chunk) * chunk_cost + (segment.whole.page_end - page);
      load += used + kRunCost;
      ++parts;
      if (schedule != nullptr) {
        run.segment = static_cast<int32_t>(s);
        run.part = parts - 1;
        size_t index = static_cast<size_t>(cta);
        if (load > used + kRunCost) {  // not the block's first run: chain it to the last
          index = schedule->work.size();
          schedule->work[last_of_cta].next = static_cast<int32_t>(index);
          schedule->work.push_back(run);
        } else {
          schedule->work[index] = run;
        }
        last_of_cta = index;
        placed.push_back(index);
        schedule->cost_max = std::max(schedule->cost_max, load);
        schedule->cost_mean += (used + kRunCost) / num_ctas;
      }
    }
    if (schedule == nullptr) continue;
    for (const size_t w : placed) {
      schedule->work[w].num_parts = parts;
      schedule->work[w].first_slot = parts > 1 ? schedule->num_slots : -1;
    }
    if (parts > 1) schedule->num_slots += parts;
  }
  return true;
}

}  // namespace

int decode_columns_per_block(int group, int num_query_tokens) {
  const int columns = group * num_query_tokens;
  return columns <= 4 ? 4 : (columns <= 8 ? 8 : 16);
}

double bf16_chunk_cost(int head_dim) {
  return kDecodeChunkTokens * head_dim * 4.0 / record_page_bytes(head_dim);
}

DecodeSchedule make_decode_schedule(const DecodeProblem& problem) {
  check(problem);
  DecodeSchedule schedule;
  schedule.columns_per_block = decode_columns_per_block(problem.group, problem.num_query_tokens);
  const int columns = problem.group * problem.num_query_tokens;
  const double chunk_cost = bf16_chunk_cost(problem.head_dim);
  std::vector<Segment> segments;
  double total = 0;
  for (size_t b = 0; b < problem.lengths.size(); ++b) {
    const DecodeWork range = visible_range(problem, problem.lengths[b]);
    for (int head = 0; head < problem.num_kv_heads; ++head) {
      for (int column = 0; column < columns; column += schedule.columns_per_block) {
        Segment segment{range, (range.chunk_end - range.chunk_begin) * chunk_cost +
                                   (range.page_end - range.page_begin)};
        segment.whole.seq = static_cast<int32_t>(b);
        segment.whole.kv_head = head;
        segment.whole.column_begin = column;
        segment.whole.num_columns = std::min(schedule.columns_per_block, columns - column);
        total += segment.cost + kRunCost;
        segments.push_back(segment);
      }
    }
  }
  schedule.num_segments = static_cast<int>(segments.size());
  const auto smallest_budget = [&](bool single_run) {
    // Between perfect balance and one block doing everything.
    double low = total / problem.num_ctas, high = total + kRunCost + chunk_cost;
    for (int step = 0; step < 40 && high - low > 0.25; ++step) {
      const double middle = 0.5 * (low + high);
      const bool fits =
          distribute(segments, {middle, single_run}, chunk_cost, problem.num_ctas, nullptr);
      (fits ? high : low) = middle;
    }
    return Division{high, single_run};
  };
  Division division = smallest_budget(false);
  if (schedule.num_segments <= problem.num_ctas) {
    const Division single = smallest_budget(true);
    if (single.budget <= kSingleRunBonus * division.budget) division = single;
  }
  OSCAR_CHECK(distribute(segments, division, chunk_cost, problem.num_ctas, &schedule),
              "decode schedule: internal error, no distribution found");
  return schedule;
}

}  // namespace oscar
