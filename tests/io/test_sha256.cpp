#include <fstream>

#include "io/sha256.h"
#include "support/paths.h"

using namespace oscar;

TEST_CASE("SHA-256 of bytes and files agrees with the published vectors") {
  CHECK(sha256_hex("abc", 3) == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  CHECK(sha256_hex("", 0) == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  oscar_test::TemporaryFolder folder;
  const std::string path = folder / "million";
  std::ofstream(path) << std::string(1000000, 'a');
  CHECK(sha256_file(path) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  CHECK_THROWS_WITH(sha256_file(folder / "absent"), Catch::Contains("absent"));
}
