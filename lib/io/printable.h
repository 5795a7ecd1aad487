// Texts of foreign files in one-line messages: control characters replaced, length bounded.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

inline bool has_control_characters(std::string_view text) {
  for (const char c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) return true;
  }
  return false;
}

// In double quotes.
inline std::string printable(std::string_view text, size_t max_bytes = 120) {
  std::string result = "\"";
  for (const char c : text.substr(0, max_bytes)) {
    result += has_control_characters({&c, 1}) ? '?' : c;
  }
  if (text.size() > max_bytes) result += "...";
  return result + "\"";
}

}  // namespace oscar
