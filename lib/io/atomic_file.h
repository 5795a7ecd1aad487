// Writing a whole file so that it appears complete under its final name or not at all.
#pragma once

#include <string>
#include <string_view>

namespace oscar {

// Writes to a temporary name in the same folder, flushes it to the disk and renames it. Throws
// Error naming the path and the reason (no such folder, full disk, ...); then neither a temporary
// file is left nor an existing file touched.
void write_file_atomically(const std::string& path, std::string_view content);

}  // namespace oscar
