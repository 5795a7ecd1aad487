#include "tools/version.h"

#include <fmt/format.h>

#include "base/cpu.h"
#include "oscar_commit.h"

#ifndef OSCAR_VERSION
#define OSCAR_VERSION "0.0.0"
#endif

extern "C" {
char* openblas_get_config(void);
char* openblas_get_corename(void);
}

namespace oscar {

std::string tool_version() { return fmt::format("{}+{}", OSCAR_VERSION, OSCAR_COMMIT); }

std::string version_text() {
  return fmt::format("oscar {}\nbuild: {}, CUDA {}, compiler " __VERSION__
                     "\nSIMD: {}\nBLAS: {} ({})",
                     tool_version(), OSCAR_BUILD_TYPE, OSCAR_CUDA_BUILT ? "on" : "off", simd_name(),
                     openblas_get_config(), openblas_get_corename());
}

}  // namespace oscar
