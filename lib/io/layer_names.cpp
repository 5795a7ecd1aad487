#include "io/layer_names.h"

#include <algorithm>
#include <charconv>

namespace oscar {

std::string layer_group(int64_t id) { return "/layers/" + std::to_string(id); }

std::vector<int64_t> layer_ids(const Hdf5File& file) {
  std::vector<int64_t> ids;
  for (const std::string& name : file.members("/layers")) {
    int64_t id = -1;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
    OSCAR_CHECK(error == std::errc() && id >= 0 && std::to_string(id) == name, file.path(),
                ": /layers/", name, ": expected a decimal layer number");
    (void)end;
    ids.push_back(id);
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

void require_format(const Hdf5File& file, const std::string& format, int64_t version) {
  OSCAR_CHECK(file.has_attribute("/", "format"), file.path(), ": not a file of format ", format,
              " (attribute format is missing)");
  const std::string found = file.string_attribute("/", "format");
  OSCAR_CHECK(found == format, file.path(), ": expected format ", format, ", got ", found);
  const int64_t found_version = file.int_attribute("/", "format_version");
  OSCAR_CHECK(found_version == version, file.path(), ": expected ", format, " version ", version,
              ", got ", found_version);
}

}  // namespace oscar
