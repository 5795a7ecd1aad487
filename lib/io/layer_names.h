// Names of per-layer groups in our HDF5 files, and the format check they share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "io/hdf5_file.h"

namespace oscar {

// "/layers/<id>"
std::string layer_group(int64_t id);
// Layer ids of the groups under /layers, ascending by number. Throws on a name that is not a plain
// decimal number.
std::vector<int64_t> layer_ids(const Hdf5File& file);
// Throws unless the attributes format and format_version of the file are these.
void require_format(const Hdf5File& file, const std::string& format, int64_t version);

}  // namespace oscar
