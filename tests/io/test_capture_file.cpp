#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>

#include "base/error.h"
#include "base/float16.h"
#include "base/random.h"
#include "io/capture_file.h"
#include "io/exclusive_file.h"
#include "io/hdf5_file.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Contains;

namespace {

constexpr size_t kHeads = 4, kKvHeads = 2, kDim = 8;

CaptureInfo sample_info(bool bf16, bool outputs) {
  CaptureInfo info;
  info.model_architecture = "llama";
  info.model_sha256 = std::string(64, 'a');
  info.text_sha256 = std::string(64, 'b');
  info.head_dim = kDim;
  info.num_layers = 3;
  info.num_heads = kHeads;
  info.num_kv_heads = kKvHeads;
  info.rope_theta = 1e4;
  info.bf16 = bf16;
  info.has_outputs = outputs;
  return info;
}

std::vector<float> rows_of(uint64_t seed, size_t count) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.normal());
  return values;
}

size_t length_of(size_t sequence) { return 5 + 307 * sequence; }

uint64_t seed_of(size_t sequence, int64_t layer, int tensor) {
  return sequence * 1000 + static_cast<uint64_t>(layer) * 10 + static_cast<uint64_t>(tensor);
}

void append_sequence(CaptureWriter& writer, size_t sequence, bool outputs) {
  const size_t length = length_of(sequence);
  writer.begin_sequence(std::vector<int32_t>(length, static_cast<int32_t>(sequence)));
  for (const int64_t layer : {0, 2}) {
    const auto q = rows_of(seed_of(sequence, layer, 0), length * kHeads * kDim);
    const auto k = rows_of(seed_of(sequence, layer, 1), length * kKvHeads * kDim);
    const auto v = rows_of(seed_of(sequence, layer, 2), length * kKvHeads * kDim);
    const auto o = rows_of(seed_of(sequence, layer, 3), length * kHeads * kDim);
    writer.append(layer, q.data(), k.data(), v.data(), outputs ? o.data() : nullptr);
  }
  writer.end_sequence();
}

void check_contents(const std::string& path, size_t num_sequences, bool bf16, bool outputs) {
  const CaptureReader reader(path);
  REQUIRE(reader.sequence_offsets().size() == num_sequences + 1);
  CHECK(reader.layers() == std::vector<int64_t>{0, 2});
  for (size_t sequence = 0; sequence < num_sequences; ++sequence) {
    const int64_t begin = reader.sequence_offsets()[sequence];
    const int64_t end = reader.sequence_offsets()[sequence + 1];
    CHECK(static_cast<size_t>(end - begin) == length_of(sequence));
    CHECK(reader.token_ids()[static_cast<size_t>(begin)] == static_cast<int32_t>(sequence));
    for (const int64_t layer : {0, 2}) {
      int index = 0;
      for (const char* tensor : {"q", "k", "v", "o"}) {
        const bool query_side = *tensor == 'q' || *tensor == 'o';
        auto expected = rows_of(seed_of(sequence, layer, index++),
                                length_of(sequence) * (query_side ? kHeads : kKvHeads) * kDim);
        if (*tensor == 'o' && !outputs) continue;
        if (bf16)
          for (float& value : expected) value = round_to_bf16(value);
        CHECK(reader.read(layer, tensor, begin, end) == expected);
      }
    }
  }
}

}  // namespace

TEST_CASE("a capture comes back as written, bf16 and f32, with and without outputs") {
  for (const bool bf16 : {true, false})
    for (const bool outputs : {true, false}) {
      oscar_test::TemporaryFolder folder;
      const std::string path = folder / "c.h5";
      CaptureWriter writer(path, sample_info(bf16, outputs));
      for (size_t s = 0; s < 3; ++s) append_sequence(writer, s, outputs);
      CHECK_FALSE(std::filesystem::exists(path));
      check_contents(path + ".part", 3, bf16, outputs);  // readable while it grows
      writer.finish();
      CHECK_FALSE(std::filesystem::exists(path + ".part"));
      check_contents(path, 3, bf16, outputs);
    }
}

TEST_CASE("a capture resumes after its last whole sequence, also when killed at any moment") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  constexpr size_t kSequences = 12;
  Random random(3);
  size_t rounds = 0;
  // Killed after a random time, more slowly each time, until one round finishes.
  for (bool finished = false; !finished; ++rounds) {
    REQUIRE(rounds < 1000);
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      CaptureWriter writer(path, sample_info(true, true));
      if (writer.sequences_done() < kSequences)
        append_sequence(writer, writer.sequences_done(), true);
      for (size_t s = writer.sequences_done(); s < kSequences; ++s)
        append_sequence(writer, s, true);
      _exit(0);
    }
    usleep(static_cast<useconds_t>(500 + random.below(5000 * (rounds + 1))));
    kill(child, SIGKILL);
    int status = 0;
    waitpid(child, &status, 0);
    finished = WIFEXITED(status) != 0;
  }
  INFO("killed " << rounds - 1 << " times");
  CaptureWriter writer(path, sample_info(true, true));
  CHECK(writer.sequences_done() == kSequences);
  CHECK(writer.token_ids_done().size() == kSequences * 5 + 307 * kSequences * (kSequences - 1) / 2);
  append_sequence(writer, kSequences, true);
  writer.finish();
  check_contents(path, kSequences + 1, true, true);
}

TEST_CASE("an unfinished sequence is dropped on resume") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  {
    CaptureWriter writer(path, sample_info(true, false));
    append_sequence(writer, 0, false);
    writer.begin_sequence({1, 2, 3});
    const auto rows = rows_of(1, 3 * kHeads * kDim);
    writer.append(0, rows.data(), rows.data(), rows.data(), nullptr);
  }
  CaptureWriter writer(path, sample_info(true, false));
  CHECK(writer.sequences_done() == 1);
  append_sequence(writer, 1, false);
  writer.finish();
  check_contents(path, 2, true, false);
}

TEST_CASE("a capture refuses what does not belong to it") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  {
    CaptureWriter writer(path, sample_info(true, false));
    append_sequence(writer, 0, false);
  }
  CaptureInfo other = sample_info(true, false);
  other.text_sha256 = "another";
  CHECK_THROWS_WITH(CaptureWriter(path, other), Contains("text_sha256"));
  CaptureWriter writer(path, sample_info(true, false));
  const auto rows = rows_of(1, 3 * kHeads * kDim);
  CHECK_THROWS_WITH(writer.append(0, rows.data(), rows.data(), rows.data(), nullptr),
                    Contains("outside a sequence"));
  writer.begin_sequence({1, 2, 3});
  writer.append(0, rows.data(), rows.data(), rows.data(), nullptr);
  CHECK_THROWS_WITH(writer.append(0, rows.data(), rows.data(), rows.data(), nullptr),
                    Contains("twice"));
  CHECK_THROWS_WITH(writer.append(1, rows.data(), rows.data(), rows.data(), nullptr),
                    Contains("layer 1"));
  CHECK_THROWS_WITH(writer.end_sequence(), Contains("expected 2"));
  auto broken = rows;
  broken[2 * kKvHeads * kDim + kDim] = NAN;
  CHECK_THROWS_WITH(writer.append(2, rows.data(), broken.data(), rows.data(), nullptr),
                    Contains("layer 2, tensor k") && Contains("token 2") && Contains("head 1"));
}

TEST_CASE("a capture whose tensors contradict its attributes is refused") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  {
    CaptureWriter writer(path, sample_info(true, false));
    append_sequence(writer, 0, false);
    writer.finish();
  }
  {
    Hdf5File file = Hdf5File::open_write(path);
    file.write_attribute("/", "num_kv_heads", int64_t{4});
    file.close();
  }
  CHECK_THROWS_WITH(CaptureReader(path), Contains("/layers/0/k") && Contains("[5, 4, 8]"));
  {
    Hdf5File file = Hdf5File::open_write(path);
    file.write_attribute("/", "num_kv_heads", int64_t{2});
    file.write_attribute("/", "sequences_complete", int64_t{7});
    file.close();
  }
  CHECK_THROWS_WITH(CaptureReader(path), Contains("sequences_complete is 7"));
  {
    Hdf5File file = Hdf5File::open_write(path);
    file.write_attribute("/", "sequences_complete", int64_t{1});
    file.close();
  }
  const CaptureReader reader(path);
  CHECK_THROWS_WITH(reader.read(0, "q", 0, 6), Contains("the capture has 5"));
  CHECK_THROWS_WITH(reader.read(1, "q", 0, 5), Contains("layer 1"));
  CHECK_THROWS_WITH(reader.read(0, "o", 0, 5), Contains("--outputs"));
  CHECK_THROWS_WITH(reader.read(0, "x", 0, 5), Contains("unknown tensor"));
}

TEST_CASE("one capture at a time writes to a name, from its first moment") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "c.h5";
  {
    const LockFile starting(path + ".part.lock");  // a writer that has no .part yet
    CHECK_THROWS_WITH(CaptureWriter(path, sample_info(true, true)),
                      Catch::Contains("c.h5.part.lock") && Catch::Contains("another process"));
    CHECK_FALSE(std::filesystem::exists(path + ".part.new"));
  }
  {
    CaptureWriter writer(path, sample_info(true, true));
    append_sequence(writer, 0, true);
    CHECK_THROWS_WITH(CaptureWriter(path, sample_info(true, true)),
                      Catch::Contains("another process"));
    writer.finish();
  }
  check_contents(path, 1, true, true);
  CHECK_FALSE(std::filesystem::exists(path + ".part.lock"));
}
