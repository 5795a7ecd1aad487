#include <algorithm>

#include "io/hdf5_file_internal.h"
#include "io/hdf5_heap_check.h"

namespace oscar {
namespace {

constexpr size_t kMaxStringBytes = 64U << 20;

template <class T>
T number(const Hdf5File::State& state, const std::string& object, const std::string& name,
         H5T_class_t type_class, hid_t memory) {
  const Hdf5Handle attribute = state.scalar_attribute(object, name);
  const Hdf5Handle type(H5Aget_type(attribute.get()), H5Tclose);
  OSCAR_CHECK(type.valid() && H5Tget_class(type.get()) == type_class, state.path, ": attribute ",
              name, " of ", object, " is not ",
              type_class == H5T_INTEGER ? "an integer" : "a float");
  T value{};
  state.check(H5Aread(attribute.get(), memory, &value) >= 0, "cannot read attribute ", name, " of ",
              object);
  return value;
}

}  // namespace

Hdf5Handle Hdf5File::State::scalar_attribute(const std::string& object,
                                             const std::string& name) const {
  const Hdf5Handle owner = open_object(object);
  const htri_t found = H5Aexists(owner.get(), name.c_str());
  check(found >= 0, "cannot look up attribute ", name, " of ", object);
  OSCAR_CHECK(found > 0, path, ": attribute ", name, " of ", object, " is missing");
  Hdf5Handle attribute(H5Aopen(owner.get(), name.c_str(), H5P_DEFAULT), H5Aclose);
  check(attribute.valid(), "cannot open attribute ", name, " of ", object);
  const Hdf5Handle space(H5Aget_space(attribute.get()), H5Sclose);
  check(space.valid() && H5Sget_simple_extent_npoints(space.get()) == 1, "attribute ", name, " of ",
        object, " is not a single value");
  return attribute;
}
void Hdf5File::State::check_variable_string_bytes(const std::string& object,
                                                  const std::string& name) const {
  unsigned intent = H5F_ACC_RDWR;
  H5Fget_intent(file.get(), &intent);
  // The bytes of a file that is being written are not the last word.
  if (intent != H5F_ACC_RDONLY) return;
  const Hdf5Handle owner = open_object(object);
  H5O_info_t info;
  check(H5Oget_info(owner.get(), &info) >= 0, "cannot look up object ", object);
  check_variable_string(path, info.addr, object, name);
}

void Hdf5File::State::write_scalar(const std::string& object, const std::string& name, hid_t stored,
                                   hid_t memory, const void* value) {
  const Hdf5Handle owner = open_object(object);
  const Hdf5Handle space(H5Screate(H5S_SCALAR), H5Sclose);
  const bool present = H5Aexists(owner.get(), name.c_str()) > 0;
  const Hdf5Handle attribute(present ? H5Aopen(owner.get(), name.c_str(), H5P_DEFAULT)
                                     : H5Acreate2(owner.get(), name.c_str(), stored, space.get(),
                                                  H5P_DEFAULT, H5P_DEFAULT),
                             H5Aclose);
  check(attribute.valid() && H5Awrite(attribute.get(), memory, value) >= 0,
        "cannot write attribute ", name, " of ", object);
}

bool Hdf5File::has_attribute(const std::string& object, const std::string& name) const {
  const Hdf5Handle owner = state_->open_object(object);
  return H5Aexists(owner.get(), name.c_str()) > 0;
}

std::string Hdf5File::string_attribute(const std::string& object, const std::string& name) const {
  const Hdf5Handle attribute = state_->scalar_attribute(object, name);
  const Hdf5Handle type(H5Aget_type(attribute.get()), H5Tclose);
  OSCAR_CHECK(type.valid() && H5Tget_class(type.get()) == H5T_STRING, path(), ": attribute ", name,
              " of ", object, " is not a string");
  if (H5Tis_variable_str(type.get()) > 0) {
    state_->check_variable_string_bytes(object, name);
    const Hdf5Handle memory(H5Tcopy(type.get()), H5Tclose);
    char* text = nullptr;
    state_->check(H5Aread(attribute.get(), memory.get(), &text) >= 0, "cannot read attribute ",
                  name, " of ", object);
    std::string value = text == nullptr ? "" : text;
    H5free_memory(text);
    return value;
  }
  const size_t bytes = H5Tget_size(type.get());
  OSCAR_CHECK(bytes > 0 && bytes <= kMaxStringBytes, path(), ": attribute ", name, " of ", object,
              " has an impossible length of ", bytes);
  std::string value(bytes, '\0');
  state_->check(H5Aread(attribute.get(), type.get(), value.data()) >= 0, "cannot read attribute ",
                name, " of ", object);
  value.resize(std::min(bytes, value.find('\0')));
  return value;
}

int64_t Hdf5File::int_attribute(const std::string& object, const std::string& name) const {
  return number<int64_t>(*state_, object, name, H5T_INTEGER, H5T_NATIVE_INT64);
}

double Hdf5File::double_attribute(const std::string& object, const std::string& name) const {
  return number<double>(*state_, object, name, H5T_FLOAT, H5T_NATIVE_DOUBLE);
}

void Hdf5File::write_attribute(const std::string& object, const std::string& name,
                               const std::string& value) {
  // Variable-length UTF-8 is what h5py hands out as str.
  const Hdf5Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
  H5Tset_size(type.get(), H5T_VARIABLE);
  H5Tset_cset(type.get(), H5T_CSET_UTF8);
  const char* text = value.c_str();
  state_->write_scalar(object, name, type.get(), type.get(), &text);
}

void Hdf5File::write_attribute(const std::string& object, const std::string& name, int64_t value) {
  state_->write_scalar(object, name, H5T_STD_I64LE, H5T_NATIVE_INT64, &value);
}

void Hdf5File::write_attribute(const std::string& object, const std::string& name, double value) {
  state_->write_scalar(object, name, H5T_IEEE_F64LE, H5T_NATIVE_DOUBLE, &value);
}

}  // namespace oscar
