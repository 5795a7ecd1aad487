#include <fmt/format.h>

#include <memory>

#include "tools/commands.h"
#include "tools/inspect.h"

namespace oscar {

void add_inspect(CLI::App& app) {
  auto options = std::make_shared<InspectOptions>();
  CLI::App* command = app.add_subcommand(
      "inspect", "Show what is in a model, capture, bundle, moments or rows file");
  command
      ->add_option(
          "file", options->path,
          "GGUF file, Hugging Face folder, safetensors, capture, bundle, moments or rows file")
      ->required();
  command->add_flag("--json", options->json, "Print one JSON document");
  command->add_flag("!--no-hash", options->hash, "Do not compute the model's SHA-256");
  command->footer("Example: oscar inspect bundle.h5");
  command->callback([options] { fmt::print("{}", inspect(*options)); });
}

}  // namespace oscar
