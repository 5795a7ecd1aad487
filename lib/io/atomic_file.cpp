#include "io/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "io/output_path.h"

namespace oscar {

void write_file_atomically(const std::string& path, std::string_view content) {
  OutputPath output(path);
  const int file =
      ::open(output.temporary().c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  OSCAR_CHECK(file >= 0, path, ": cannot write: ", std::strerror(errno));
  int error = 0;
  while (!content.empty() && error == 0) {
    const ssize_t written = ::write(file, content.data(), content.size());
    if (written >= 0) {
      content.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  // A disk that fills up may say so only here.
  if (error == 0 && ::fsync(file) != 0) error = errno;
  if (::close(file) != 0 && error == 0) error = errno;
  OSCAR_CHECK(error == 0, path, ": cannot write: ", std::strerror(error));
  output.commit();
}

}  // namespace oscar
