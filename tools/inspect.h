// What is in a file: captures, bundles, GGUF files, safetensors files, Hugging Face folders, result
// rows.
#pragma once

#include <string>

namespace oscar {

struct InspectOptions {
  std::string path;
  bool json = false;  // one JSON document instead of text
  bool hash = true;   // SHA-256 of models (reads the whole file)
};

// The description, ending in a newline. Throws Error naming the file when it is none of the above
// or is damaged.
std::string inspect(const InspectOptions& options);

// Parts of inspect(): each returns a JSON document. A model whose configuration or tensors are not
// supported is described all the same, with the reason under "not_supported".
std::string describe_gguf(const std::string& path, bool hash);
std::string describe_model_folder(const std::string& folder, bool hash);
std::string describe_safetensors(const std::string& path);
std::string describe_hdf5(const std::string& path);
std::string describe_rows(const std::string& path);

// Text for people of such a document: scalars as "name: value", arrays of objects as tables.
std::string render_document(const std::string& json);

}  // namespace oscar
