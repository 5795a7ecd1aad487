#include "tools/inspect.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "base/error.h"
#include "io/results.h"

namespace oscar {
namespace {

// The first bytes of a file, which tell formats apart.
std::string first_bytes(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  OSCAR_CHECK(file.good(), path, ": cannot open");
  std::string bytes(16, '\0');
  file.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<size_t>(file.gcount()));
  OSCAR_CHECK(!bytes.empty(), path, ": the file has zero bytes");
  return bytes;
}

std::string describe(const InspectOptions& options) {
  const std::string& path = options.path;
  OSCAR_CHECK(std::filesystem::exists(path), path, ": no such file or folder");
  if (std::filesystem::is_directory(path)) return describe_model_folder(path, options.hash);
  const std::string start = first_bytes(path);
  if (start.starts_with("GGUF")) return describe_gguf(path, options.hash);
  if (start.starts_with("\x89HDF\r\n")) return describe_hdf5(path);
  if (path.ends_with(".safetensors") || (start.size() > 8 && start[8] == '{')) {
    return describe_safetensors(path);
  }
  if (start[0] == '{') return describe_rows(path);
  fail(path,
       ": not a capture, bundle, moments file, GGUF file, safetensors file, model folder or rows "
       "file");
}

}  // namespace

std::string describe_rows(const std::string& path) {
  const std::vector<ResultRow> rows = read_rows(path);
  nlohmann::ordered_json document;
  document["file"] = path;
  document["format"] = "result rows";
  document["bytes"] = std::filesystem::file_size(path);
  document["rows"] = rows.size();
  const auto names = [&](std::string ResultRow::*member) {
    std::set<std::string> found;
    for (const ResultRow& row : rows) found.insert(row.*member);
    std::string text;
    for (const std::string& name : found) text += (text.empty() ? "" : " ") + name;
    return text;
  };
  document["suites"] = names(&ResultRow::suite);
  document["cells"] = names(&ResultRow::cell);
  document["metrics"] = names(&ResultRow::metric);
  document["arms"] = names(&ResultRow::arm);
  document["modes"] = names(&ResultRow::mode);
  for (const char* label : {"tool", "device", "command", "hashes.model"}) {
    const auto found = rows[0].labels.find(label);
    if (found != rows[0].labels.end()) document[label] = found->second;
  }
  return document.dump();
}

std::string inspect(const InspectOptions& options) {
  const std::string document = describe(options);
  if (!options.json) return render_document(document);
  return nlohmann::ordered_json::parse(document).dump(2) + "\n";
}

}  // namespace oscar
