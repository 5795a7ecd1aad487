// Looks at the bytes behind a variable-length string attribute before libhdf5 follows them:
// version 1.10 trusts the sizes and numbers of a global heap and crashes on damaged ones.
#pragma once

#include <cstdint>
#include <string>

namespace oscar {

// path: a file that nobody is writing; header_address: where the object's header stands
// (H5O_info_t::addr). Throws Error naming file, object and attribute when the header is not of the
// kind that HDF5 writes by default (version 1), the attribute is not found in it as a single
// variable-length string, or the string is not wholly inside its heap.
void check_variable_string(const std::string& path, uint64_t header_address,
                           const std::string& object, const std::string& attribute);

}  // namespace oscar
