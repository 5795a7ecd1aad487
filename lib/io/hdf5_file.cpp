#include <algorithm>
#include <cstring>
#include <filesystem>

#include "io/hdf5_file_internal.h"

namespace oscar {
namespace {

constexpr size_t kMaxMembers = 1U << 20;
constexpr uint64_t kMaxCompression = 1100;  // deflate cannot shrink by more than about 1032
// Entries of a chunk-index node are 2 x this: the index of a dataset of up to 1024 chunks is one
// node that only grows in place, so an interrupted flush cannot tear a split in two.
constexpr unsigned kChunkIndexHalfNode = 512;

// The library's own cleanup at exit crashes on a file that could not be closed (a full disk, HDF5
// 1.10); every handle here is closed by its owner, so it is not needed. Before anything else of the
// library, which otherwise registers it: even constants such as H5F_ACC_RDONLY start the library.
[[maybe_unused]] const herr_t kNoCleanupAtExit = H5dont_atexit();

void silence_library() {
  static const herr_t status = H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
  (void)status;
}

herr_t keep_innermost(unsigned index, const H5E_error2_t* error, void* text) {
  if (index == 0 && error->desc != nullptr) *static_cast<std::string*>(text) = error->desc;
  return 0;
}

hid_t native_type(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint16:
      return H5T_NATIVE_UINT16;
    case Hdf5Type::kInt32:
      return H5T_NATIVE_INT32;
    case Hdf5Type::kInt64:
      return H5T_NATIVE_INT64;
    case Hdf5Type::kFloat32:
      return H5T_NATIVE_FLOAT;
    case Hdf5Type::kFloat64:
      return H5T_NATIVE_DOUBLE;
  }
  fail("unknown HDF5 type");
}

// The types a file may store for `type`: little and big endian.
std::pair<hid_t, hid_t> stored_types(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint16:
      return {H5T_STD_U16LE, H5T_STD_U16BE};
    case Hdf5Type::kInt32:
      return {H5T_STD_I32LE, H5T_STD_I32BE};
    case Hdf5Type::kInt64:
      return {H5T_STD_I64LE, H5T_STD_I64BE};
    case Hdf5Type::kFloat32:
      return {H5T_IEEE_F32LE, H5T_IEEE_F32BE};
    case Hdf5Type::kFloat64:
      return {H5T_IEEE_F64LE, H5T_IEEE_F64BE};
  }
  fail("unknown HDF5 type");
}

size_t element_bytes(Hdf5Type type) { return H5Tget_size(native_type(type)); }

// No chunk cache: whole rows go straight to the file, so memory does not grow with the number of
// open datasets.
Hdf5Handle uncached_access() {
  Hdf5Handle access(H5Pcreate(H5P_DATASET_ACCESS), H5Pclose);
  H5Pset_chunk_cache(access.get(), 1, 0, 0.0);
  return access;
}

// Metadata reaches the file only by flush(): between two flushes the file stays as the last one
// left it, whatever happens to the process.
void keep_metadata_until_flush(hid_t file) {
  H5AC_cache_config_t config;
  config.version = H5AC__CURR_CACHE_CONFIG_VERSION;
  if (H5Fget_mdc_config(file, &config) < 0) return;
  config.incr_mode = H5C_incr__off;
  config.flash_incr_mode = H5C_flash_incr__off;
  config.decr_mode = H5C_decr__off;
  config.evictions_enabled = 0;
  H5Fset_mdc_config(file, &config);
}

std::vector<hsize_t> to_extents(const Shape& shape) { return {shape.begin(), shape.end()}; }

}  // namespace

std::string hdf5_reason() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, &text);
  std::replace(text.begin(), text.end(), '\n', ' ');
  // A failed system call is reported with addresses and times; only its reason is of use.
  const std::string marker = "error message = '";
  const size_t at = text.find(marker);
  if (at != std::string::npos) {
    const size_t begin = at + marker.size();
    text = text.substr(begin, text.find('\'', begin) - begin);
  }
  return text.empty() ? text : " (HDF5: " + text + ")";
}

const char* type_name(Hdf5Type type) {
  switch (type) {
    case Hdf5Type::kUint16:
      return "uint16";
    case Hdf5Type::kInt32:
      return "int32";
    case Hdf5Type::kInt64:
      return "int64";
    case Hdf5Type::kFloat32:
      return "float32";
    case Hdf5Type::kFloat64:
      return "float64";
  }
  return "?";
}

// Every component must be a hard link: soft and external links could lead anywhere.
bool Hdf5File::State::exists(const std::string& object) const {
  if (object == "/") return true;
  for (size_t end = object.find('/', 1);; end = object.find('/', end + 1)) {
    const std::string prefix = object.substr(0, end);
    const htri_t found = H5Lexists(file.get(), prefix.c_str(), H5P_DEFAULT);
    check(found >= 0, "cannot look up ", prefix);
    if (found == 0) return false;
    H5L_info_t link;
    check(H5Lget_info(file.get(), prefix.c_str(), &link, H5P_DEFAULT) >= 0, "cannot look up ",
          prefix);
    OSCAR_CHECK(link.type == H5L_TYPE_HARD, path, ": ", prefix,
                " is a soft or external link, which is refused");
    if (end == std::string::npos) return true;
  }
}

hid_t Hdf5File::State::dataset(const std::string& name) const {
  const auto known = datasets.find(name);
  if (known != datasets.end()) return known->second.get();
  OSCAR_CHECK(exists(name), path, ": dataset ", name, " is missing");
  Hdf5Handle handle(H5Dopen2(file.get(), name.c_str(), uncached_access().get()), H5Dclose);
  check(handle.valid(), name, " is not a readable dataset");
  const Hdf5Handle properties(H5Dget_create_plist(handle.get()), H5Pclose);
  check(properties.valid(), name, ": cannot read its properties");
  OSCAR_CHECK(H5Pget_layout(properties.get()) != H5D_VIRTUAL &&
                  H5Pget_external_count(properties.get()) <= 0,
              path, ": ", name, " keeps its data in other files, which is refused");
  return datasets.emplace(name, std::move(handle)).first->second.get();
}

// Link first: the object's own type is checked by the open call.
Hdf5Handle Hdf5File::State::open_object(const std::string& object) const {
  OSCAR_CHECK(exists(object), path, ": ", object, " is missing");
  Hdf5Handle handle(H5Oopen(file.get(), object.c_str(), H5P_DEFAULT), H5Oclose);
  check(handle.valid(), "cannot open ", object);
  return handle;
}

Hdf5File::State::Rows Hdf5File::State::select_rows(const std::string& name, hid_t id,
                                                   size_t first_row, size_t num_rows) const {
  Rows rows;
  rows.file = Hdf5Handle(H5Dget_space(id), H5Sclose);
  const int rank = H5Sget_simple_extent_ndims(rows.file.get());
  check(rank >= 1 && static_cast<size_t>(rank) <= kMaxHdf5Rank, name, ": not an array");
  hsize_t extents[kMaxHdf5Rank] = {}, start[kMaxHdf5Rank] = {};
  H5Sget_simple_extent_dims(rows.file.get(), extents, nullptr);
  OSCAR_CHECK(first_row <= extents[0] && num_rows <= extents[0] - first_row, path, ": ", name,
              " has ", extents[0], " rows, asked for [", first_row, ", ", first_row + num_rows,
              ")");
  start[0] = first_row;
  extents[0] = num_rows;
  check(H5Sselect_hyperslab(rows.file.get(), H5S_SELECT_SET, start, nullptr, extents, nullptr) >= 0,
        name, ": cannot select rows");
  rows.memory = Hdf5Handle(H5Screate_simple(rank, extents, nullptr), H5Sclose);
  check(rows.memory.valid(), name, ": cannot describe rows");
  return rows;
}

Hdf5File::Hdf5File(std::unique_ptr<State> state) : state_(std::move(state)) {}
Hdf5File::~Hdf5File() = default;
Hdf5File::Hdf5File(Hdf5File&&) noexcept = default;
Hdf5File& Hdf5File::operator=(Hdf5File&&) noexcept = default;

Hdf5File Hdf5File::create(const std::string& path) {
  silence_library();
  auto state = std::make_unique<State>();
  state->path = path;
  const Hdf5Handle properties(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
  H5Pset_istore_k(properties.get(), kChunkIndexHalfNode);
  state->file =
      Hdf5Handle(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, properties.get(), H5P_DEFAULT), H5Fclose);
  state->check(state->file.valid(), "cannot create the file");
  keep_metadata_until_flush(state->file.get());
  return Hdf5File(std::move(state));
}

namespace {
hid_t open_existing(const std::string& path, unsigned flags) {
  silence_library();
  std::error_code error;
  OSCAR_CHECK(std::filesystem::is_regular_file(path, error), path, ": no such file");
  OSCAR_CHECK(H5Fis_hdf5(path.c_str()) > 0, path, ": not an HDF5 file");
  const hid_t file = H5Fopen(path.c_str(), flags, H5P_DEFAULT);
  OSCAR_CHECK(file >= 0, path, ": cannot open the HDF5 file", hdf5_reason());
  return file;
}
}  // namespace

Hdf5File Hdf5File::open(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->file = Hdf5Handle(open_existing(path, H5F_ACC_RDONLY), H5Fclose);
  return Hdf5File(std::move(state));
}

Hdf5File Hdf5File::open_write(const std::string& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  state->file = Hdf5Handle(open_existing(path, H5F_ACC_RDWR), H5Fclose);
  keep_metadata_until_flush(state->file.get());
  return Hdf5File(std::move(state));
}

const std::string& Hdf5File::path() const { return state_->path; }

void Hdf5File::flush() {
  state_->check(H5Fflush(state_->file.get(), H5F_SCOPE_LOCAL) >= 0, "cannot write to the file");
}

void Hdf5File::close() {
  flush();
  state_->datasets.clear();
  state_->check(state_->file.close() >= 0, "cannot close the file");
}

bool Hdf5File::exists(const std::string& object) const { return state_->exists(object); }

std::vector<std::string> Hdf5File::members(const std::string& group) const {
  OSCAR_CHECK(exists(group), path(), ": group ", group, " is missing");
  const Hdf5Handle handle(H5Gopen2(state_->file.get(), group.c_str(), H5P_DEFAULT), H5Gclose);
  state_->check(handle.valid(), group, " is not a group");
  std::vector<std::string> names;
  const auto collect = [](hid_t, const char* name, const H5L_info_t*, void* list) -> herr_t {
    auto& found = *static_cast<std::vector<std::string>*>(list);
    found.emplace_back(name);
    return found.size() > kMaxMembers ? -1 : 0;
  };
  state_->check(
      H5Literate(handle.get(), H5_INDEX_NAME, H5_ITER_NATIVE, nullptr, collect, &names) >= 0,
      "cannot list group ", group);
  return names;
}

void Hdf5File::create_group(const std::string& group) {
  const Hdf5Handle handle(
      H5Gcreate2(state_->file.get(), group.c_str(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
      H5Gclose);
  state_->check(handle.valid(), "cannot create group ", group);
}

Shape Hdf5File::shape(const std::string& dataset) const {
  const Hdf5Handle space(H5Dget_space(state_->dataset(dataset)), H5Sclose);
  state_->check(space.valid(), dataset, ": cannot read its shape");
  const int rank = H5Sget_simple_extent_ndims(space.get());
  state_->check(rank >= 0 && static_cast<size_t>(rank) <= kMaxHdf5Rank, dataset, ": rank ", rank,
                " is not supported");
  hsize_t extents[kMaxHdf5Rank] = {};
  if (rank > 0) H5Sget_simple_extent_dims(space.get(), extents, nullptr);
  return {extents, extents + rank};
}

void Hdf5File::require_type(const std::string& dataset, Hdf5Type type) const {
  const Hdf5Handle stored(H5Dget_type(state_->dataset(dataset)), H5Tclose);
  const auto [little, big] = stored_types(type);
  OSCAR_CHECK(
      stored.valid() && (H5Tequal(stored.get(), little) > 0 || H5Tequal(stored.get(), big) > 0),
      path(), ": ", dataset, ": expected type ", type_name(type));
}

Shape Hdf5File::checked_shape(const std::string& dataset, Hdf5Type type, size_t rank) const {
  require_type(dataset, type);
  const Shape extents = shape(dataset);
  OSCAR_CHECK(extents.size() == rank, path(), ": ", dataset, ": expected rank ", rank,
              ", got shape ", to_string(extents));
  const size_t count = num_elements(extents, path() + ": " + dataset);
  const uint64_t item_bytes = element_bytes(type);
  OSCAR_CHECK(count <= std::numeric_limits<size_t>::max() / item_bytes, path(), ": ", dataset,
              ": shape ", to_string(extents), " overflows");
  const uint64_t claimed = count * item_bytes;
  const hid_t id = state_->dataset(dataset);
  const Hdf5Handle properties(H5Dget_create_plist(id), H5Pclose);
  const bool filtered = H5Pget_nfilters(properties.get()) > 0;
  const uint64_t stored = H5Dget_storage_size(id);
  const uint64_t file_bytes = std::filesystem::file_size(path());
  const bool backed = filtered ? claimed / kMaxCompression <= file_bytes
                               : claimed <= stored && claimed <= file_bytes;
  OSCAR_CHECK(backed, path(), ": ", dataset, " claims ", claimed, " bytes, the file holds ",
              std::min(stored, file_bytes), " of them");
  return extents;
}

void Hdf5File::write_all(const std::string& dataset, Hdf5Type type, const Shape& extents,
                         const void* values) {
  const std::vector<hsize_t> dims = to_extents(extents);
  const Hdf5Handle space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr),
                         H5Sclose);
  Hdf5Handle handle(H5Dcreate2(state_->file.get(), dataset.c_str(), stored_types(type).first,
                               space.get(), H5P_DEFAULT, H5P_DEFAULT, H5P_DEFAULT),
                    H5Dclose);
  state_->check(handle.valid(), "cannot create ", dataset);
  if (num_elements(extents, dataset) == 0) return;
  state_->check(
      H5Dwrite(handle.get(), native_type(type), H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0,
      "cannot write ", dataset);
}

void Hdf5File::create_growing(const std::string& dataset, Hdf5Type type, const Shape& row_shape,
                              size_t chunk_rows) {
  std::vector<hsize_t> dims{0}, limits{H5S_UNLIMITED}, chunk{chunk_rows};
  for (const size_t extent : row_shape) {
    dims.push_back(extent);
    limits.push_back(extent);
    chunk.push_back(extent);
  }
  const int rank = static_cast<int>(dims.size());
  const Hdf5Handle space(H5Screate_simple(rank, dims.data(), limits.data()), H5Sclose);
  const Hdf5Handle properties(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
  H5Pset_chunk(properties.get(), rank, chunk.data());
  H5Pset_fill_time(properties.get(), H5D_FILL_TIME_NEVER);  // every row is written
  Hdf5Handle handle(H5Dcreate2(state_->file.get(), dataset.c_str(), stored_types(type).first,
                               space.get(), H5P_DEFAULT, properties.get(), uncached_access().get()),
                    H5Dclose);
  state_->check(handle.valid(), "cannot create ", dataset);
  state_->datasets.emplace(dataset, std::move(handle));
}

void Hdf5File::set_rows(const std::string& dataset, size_t num_rows) {
  std::vector<hsize_t> dims = to_extents(shape(dataset));
  OSCAR_CHECK(!dims.empty(), path(), ": ", dataset, ": not an array");
  dims[0] = num_rows;
  state_->check(H5Dset_extent(state_->dataset(dataset), dims.data()) >= 0, dataset, ": cannot set ",
                num_rows, " rows");
}

void Hdf5File::write_block(const std::string& dataset, Hdf5Type type, size_t first_row,
                           size_t num_rows, const void* values) {
  const hid_t id = state_->dataset(dataset);
  const auto rows = state_->select_rows(dataset, id, first_row, num_rows);
  state_->check(
      H5Dwrite(id, native_type(type), rows.memory.get(), rows.file.get(), H5P_DEFAULT, values) >= 0,
      "cannot write ", dataset);
}

void Hdf5File::read_block(const std::string& dataset, Hdf5Type type, size_t first_row,
                          size_t num_rows, void* values) const {
  const hid_t id = state_->dataset(dataset);
  const auto rows = state_->select_rows(dataset, id, first_row, num_rows);
  state_->check(
      H5Dread(id, native_type(type), rows.memory.get(), rows.file.get(), H5P_DEFAULT, values) >= 0,
      "cannot read ", dataset);
}

}  // namespace oscar
