#include <filesystem>
#include <fstream>

#include "base/error.h"
#include "base/random.h"
#include "io/hdf5_file.h"
#include "support/paths.h"

using namespace oscar;
using Catch::Contains;

namespace {

std::vector<char> file_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_bytes(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

std::string sample_file(const oscar_test::TemporaryFolder& folder) {
  const std::string path = folder / "sample.h5";
  Hdf5File file = Hdf5File::create(path);
  file.create_group("/layers");
  TensorF weights({2, 3});
  for (size_t i = 0; i < weights.size(); ++i) weights.values[i] = static_cast<float>(i) * 0.5F;
  file.write("/layers/weights", weights);
  file.write_attribute("/", "text", std::string("Grüße"));
  file.write_attribute("/", "long_text", std::string(200000, 'x'));
  file.write_attribute("/layers", "count", int64_t{42});
  file.write_attribute("/layers", "ratio", 0.25);
  file.write_attribute("/layers", "count", int64_t{43});
  file.create_growing("/rows", Hdf5Type::kUint16, {2, 2}, 16);
  file.set_rows("/rows", 100);
  std::vector<uint16_t> rows(400);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<uint16_t>(i);
  file.write_rows("/rows", 0, 100, rows.data());
  file.close();
  return path;
}

}  // namespace

TEST_CASE("HDF5 datasets and attributes come back as written") {
  oscar_test::TemporaryFolder folder;
  const Hdf5File file = Hdf5File::open(sample_file(folder));
  CHECK(file.string_attribute("/", "text") == "Grüße");
  CHECK(file.string_attribute("/", "long_text") == std::string(200000, 'x'));
  CHECK(file.int_attribute("/layers", "count") == 43);
  CHECK(file.double_attribute("/layers", "ratio") == 0.25);
  CHECK(file.read<float>("/layers/weights", 2).values ==
        std::vector<float>{0, 0.5F, 1, 1.5F, 2, 2.5F});
  std::vector<uint16_t> rows(12);
  file.read_rows("/rows", 61, 3, rows.data());
  for (size_t i = 0; i < rows.size(); ++i) CHECK(rows[i] == 61 * 4 + i);
  CHECK(file.members("/layers") == std::vector<std::string>{"weights"});
  CHECK(file.exists("/rows"));
  CHECK_FALSE(file.exists("/layers/absent"));
}

TEST_CASE("HDF5 errors name the file and the object") {
  oscar_test::TemporaryFolder folder;
  const std::string path = sample_file(folder);
  const Hdf5File file = Hdf5File::open(path);
  CHECK_THROWS_WITH(file.read<float>("/absent", 1), Contains("sample.h5") && Contains("/absent"));
  CHECK_THROWS_WITH(file.read<double>("/layers/weights", 2), Contains("float64"));
  CHECK_THROWS_WITH(file.read<float>("/layers/weights", 3),
                    Contains("rank 3") && Contains("[2, 3]"));
  CHECK_THROWS_WITH(file.int_attribute("/", "text"), Contains("text"));
  CHECK_THROWS_WITH(file.string_attribute("/", "absent"), Contains("absent"));
  CHECK_THROWS_WITH(file.members("/rows"), Contains("not a group"));
  std::vector<uint16_t> rows(8);
  CHECK_THROWS_WITH(file.read_rows("/rows", 99, 2, rows.data()), Contains("100 rows"));
  CHECK_THROWS_WITH(Hdf5File::open(folder / "none.h5"), Contains("no such file"));
  CHECK_THROWS_WITH(Hdf5File::create(folder / "none" / "x.h5"), Contains("cannot create"));
  write_bytes(folder / "text.h5", {'h', 'e', 'l', 'l', 'o'});
  CHECK_THROWS_WITH(Hdf5File::open(folder / "text.h5"), Contains("not an HDF5 file"));
}

TEST_CASE("a dataset that claims more than the file holds is refused before allocation") {
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "claims.h5";
  {
    Hdf5File file = Hdf5File::create(path);
    file.create_growing("/rows", Hdf5Type::kFloat64, {1024}, 64);
    file.set_rows("/rows", size_t{1} << 40);  // 8 PiB, nothing behind it
    file.close();
  }
  const Hdf5File file = Hdf5File::open(path);
  CHECK_THROWS_WITH(file.read<double>("/rows", 2), Contains("claims"));
}

TEST_CASE("truncated and damaged HDF5 files end in an Error or in values, never in a crash") {
  oscar_test::TemporaryFolder folder;
  const std::vector<char> good = file_bytes(sample_file(folder));
  const auto read_all = [&](const std::string& path) {
    try {
      const Hdf5File file = Hdf5File::open(path);
      file.members("/layers");
      file.read<float>("/layers/weights", 2);
      file.read<uint16_t>("/rows", 3);
      file.string_attribute("/", "text");
    } catch (const Error& error) {
      CHECK(std::string(error.what()).find("damaged.h5") != std::string::npos);
    }
  };
  const std::string path = folder / "damaged.h5";
  for (size_t length = 0; length < good.size(); length += 997) {
    write_bytes(path, {good.begin(), good.begin() + static_cast<std::ptrdiff_t>(length)});
    read_all(path);
  }
  Random random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<char> bytes = good;
    for (int change = 0; change < 4; ++change)
      bytes[random.below(4096)] = static_cast<char>(random.below(256));
    write_bytes(path, bytes);
    read_all(path);
  }
}
