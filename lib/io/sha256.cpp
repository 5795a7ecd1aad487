#include "io/sha256.h"

#include <openssl/evp.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <vector>

#include "base/error.h"

namespace oscar {
namespace {

class Digest {
 public:
  Digest() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    OSCAR_CHECK(
        context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1,
        "SHA-256 is not available in this build of OpenSSL");
  }
  void add(const void* bytes, size_t size) {
    OSCAR_CHECK(EVP_DigestUpdate(context_.get(), bytes, size) == 1, "SHA-256 failed");
  }
  std::string hex() {
    unsigned char digest[EVP_MAX_MD_SIZE];
    unsigned int length = 0;
    OSCAR_CHECK(EVP_DigestFinal_ex(context_.get(), digest, &length) == 1, "SHA-256 failed");
    constexpr char kDigits[] = "0123456789abcdef";
    std::string text;
    for (unsigned int i = 0; i < length; ++i) {
      text += kDigits[digest[i] >> 4];
      text += kDigits[digest[i] & 15];
    }
    return text;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

}  // namespace

std::string sha256_hex(const void* bytes, size_t size) {
  Digest digest;
  digest.add(bytes, size);
  return digest.hex();
}

std::string sha256_file(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"),
                                                             std::fclose);
  OSCAR_CHECK(file != nullptr, path, ": cannot open: ", std::strerror(errno));
  Digest digest;
  std::vector<unsigned char> buffer(size_t{1} << 20);
  size_t count = 0;
  while ((count = std::fread(buffer.data(), 1, buffer.size(), file.get())) > 0) {
    digest.add(buffer.data(), count);
  }
  OSCAR_CHECK(std::ferror(file.get()) == 0, path, ": cannot read: ", std::strerror(errno));
  return digest.hex();
}

}  // namespace oscar
