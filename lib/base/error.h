// The one exception type of the project and the checks that throw it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace oscar {

// Thrown for every failure a user can cause or must see: bad files, bad options, failed system
// calls. The message is one line and names the file, tensor or option, what was expected and what
// was found.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Thrown when the user interrupted long work (Ctrl-C); outputs are left as they were, partial work
// that can be resumed is kept.
class Interrupted : public Error {
 public:
  Interrupted() : Error("interrupted") {}
};

// Concatenates its arguments with operator<<.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Error(cat(parts...));
}

}  // namespace oscar

// Throws oscar::Error with the concatenated message parts unless the condition holds.
#define OSCAR_CHECK(condition, ...)               \
  do {                                            \
    if (!(condition)) ::oscar::fail(__VA_ARGS__); \
  } while (false)
