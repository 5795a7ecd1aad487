// Private to hdf5_file*.cpp: identifier ownership and the open file behind Hdf5File.
#pragma once

#include <hdf5.h>

#include <map>
#include <string>
#include <utility>

#include "io/hdf5_file.h"

namespace oscar {

inline constexpr size_t kMaxHdf5Rank = 8;

// Owns one HDF5 identifier.
class Hdf5Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Hdf5Handle(hid_t id, Close close_call) : id_(id), close_(close_call) {}
  Hdf5Handle(Hdf5Handle&& other) noexcept
      : id_(std::exchange(other.id_, -1)), close_(other.close_) {}
  Hdf5Handle& operator=(Hdf5Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Hdf5Handle() { close(); }
  herr_t close() {
    const herr_t status = id_ >= 0 ? close_(id_) : 0;
    id_ = -1;
    return status;
  }
  hid_t get() const { return id_; }
  bool valid() const { return id_ >= 0; }

 private:
  hid_t id_;
  Close close_;
};

// " (HDF5: ...)" with the innermost message of the library, or nothing.
std::string hdf5_reason();

struct Hdf5File::State {
  std::string path;
  Hdf5Handle file{-1, H5Fclose};
  mutable std::map<std::string, Hdf5Handle> datasets;  // open handles by path

  template <class... Parts>
  void check(bool condition, const Parts&... parts) const {
    if (!condition) fail(path, ": ", parts..., hdf5_reason());
  }
  bool exists(const std::string& object) const;
  hid_t dataset(const std::string& name) const;
  Hdf5Handle open_object(const std::string& object) const;
  // An attribute that holds one value.
  Hdf5Handle scalar_attribute(const std::string& object, const std::string& name) const;
  // Before a variable-length string is read from a file opened read-only (hdf5_heap_check.h).
  void check_variable_string_bytes(const std::string& object, const std::string& name) const;
  void write_scalar(const std::string& object, const std::string& name, hid_t stored, hid_t memory,
                    const void* value);

  // Memory and file selections of rows [first, first + count).
  struct Rows {
    Hdf5Handle memory{-1, H5Sclose}, file{-1, H5Sclose};
  };
  Rows select_rows(const std::string& name, hid_t id, size_t first_row, size_t num_rows) const;
};

}  // namespace oscar
