// Thin RAII layer over HDF5: typed datasets and attributes whose shape, type and size are checked
// before memory is allocated. The only place that knows the HDF5 library.
//
// Hostile files: links that are not hard links, external and virtual storage are refused; a dataset
// may not claim more bytes than the file can back. Every failure is an Error that names file and
// object; the library's own error printing is off. HDF5 is not thread-safe: use one thread at a
// time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/tensor.h"

namespace oscar {

enum class Hdf5Type { kUint16, kInt32, kInt64, kFloat32, kFloat64 };

const char* type_name(Hdf5Type type);

template <class T>
struct Hdf5TypeOf;
template <>
struct Hdf5TypeOf<uint16_t> {
  static constexpr Hdf5Type value = Hdf5Type::kUint16;
};
template <>
struct Hdf5TypeOf<int32_t> {
  static constexpr Hdf5Type value = Hdf5Type::kInt32;
};
template <>
struct Hdf5TypeOf<int64_t> {
  static constexpr Hdf5Type value = Hdf5Type::kInt64;
};
template <>
struct Hdf5TypeOf<float> {
  static constexpr Hdf5Type value = Hdf5Type::kFloat32;
};
template <>
struct Hdf5TypeOf<double> {
  static constexpr Hdf5Type value = Hdf5Type::kFloat64;
};

// An open file. Object names are absolute paths inside the file ("/layers/0/k").
class Hdf5File {
 public:
  struct State;  // defined in the private header of hdf5_file*.cpp
  static Hdf5File create(const std::string& path);      // truncates
  static Hdf5File open(const std::string& path);        // read only
  static Hdf5File open_write(const std::string& path);  // existing file, read and write
  ~Hdf5File();
  Hdf5File(Hdf5File&&) noexcept;
  Hdf5File& operator=(Hdf5File&&) noexcept;

  const std::string& path() const;
  void flush();
  // Flushes and closes; throws where the destructor would have to stay silent (a full disk).
  void close();

  bool exists(const std::string& object) const;
  // Names of the members of a group, as stored.
  std::vector<std::string> members(const std::string& group) const;
  void create_group(const std::string& group);

  bool has_attribute(const std::string& object, const std::string& name) const;
  std::string string_attribute(const std::string& object, const std::string& name) const;
  int64_t int_attribute(const std::string& object, const std::string& name) const;
  double double_attribute(const std::string& object, const std::string& name) const;
  void write_attribute(const std::string& object, const std::string& name,
                       const std::string& value);
  void write_attribute(const std::string& object, const std::string& name, int64_t value);
  void write_attribute(const std::string& object, const std::string& name, double value);

  Shape shape(const std::string& dataset) const;
  // Throws unless the dataset's stored type is exactly this one (either byte order).
  void require_type(const std::string& dataset, Hdf5Type type) const;

  template <class T>
  void write(const std::string& dataset, const Tensor<T>& tensor) {
    write_all(dataset, Hdf5TypeOf<T>::value, tensor.shape, tensor.data());
  }
  // The whole dataset; throws unless its rank and type are the given ones.
  template <class T>
  Tensor<T> read(const std::string& dataset, size_t rank) const {
    Tensor<T> tensor(checked_shape(dataset, Hdf5TypeOf<T>::value, rank));
    if (!tensor.empty())
      read_block(dataset, Hdf5TypeOf<T>::value, 0, tensor.shape[0], tensor.data());
    return tensor;
  }

  // A dataset [0, row_shape...] that grows along its first axis, stored in chunks of chunk_rows.
  void create_growing(const std::string& dataset, Hdf5Type type, const Shape& row_shape,
                      size_t chunk_rows);
  void set_rows(const std::string& dataset, size_t num_rows);
  template <class T>
  void write_rows(const std::string& dataset, size_t first_row, size_t num_rows, const T* values) {
    write_block(dataset, Hdf5TypeOf<T>::value, first_row, num_rows, values);
  }
  template <class T>
  void read_rows(const std::string& dataset, size_t first_row, size_t num_rows, T* values) const {
    read_block(dataset, Hdf5TypeOf<T>::value, first_row, num_rows, values);
  }

  // Shape of a dataset after all checks: type, rank, size against the bytes stored in the file.
  Shape checked_shape(const std::string& dataset, Hdf5Type type, size_t rank) const;

 private:
  explicit Hdf5File(std::unique_ptr<State> state);
  void write_all(const std::string& dataset, Hdf5Type type, const Shape& shape, const void* values);
  void write_block(const std::string& dataset, Hdf5Type type, size_t first_row, size_t num_rows,
                   const void* values);
  void read_block(const std::string& dataset, Hdf5Type type, size_t first_row, size_t num_rows,
                  void* values) const;
  std::unique_ptr<State> state_;
};

}  // namespace oscar
