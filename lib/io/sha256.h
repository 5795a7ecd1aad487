// SHA-256 of memory and files, as lower-case hexadecimal text (provenance attributes).
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace oscar {

std::string sha256_hex(const void* bytes, size_t size);
inline std::string sha256_hex(std::string_view text) {
  return sha256_hex(text.data(), text.size());
}

// Reads the whole file. Throws Error naming the path when it cannot be read; an empty file has a
// hash as well.
std::string sha256_file(const std::string& path);

}  // namespace oscar
