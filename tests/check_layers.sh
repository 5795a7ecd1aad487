#!/bin/sh
# Enforces the layer table: who may include whom, and where third-party headers, stdout and exit() may stand.
# usage: check_layers.sh SOURCE_FOLDER
cd "${1:?usage: check_layers.sh SOURCE_FOLDER}" || exit 1
bad=0
report() { echo "layer violation: $1"; bad=1; }

# allow LAYER "regex of our include prefixes"
check_ours() {
  found=$(grep -nE '^#include "' "$1"/*.h "$1"/*.cpp 2>/dev/null | grep -vE "#include \"($2)" || true)
  [ -z "$found" ] || report "$1 may include only \"$2\":
$found"
}
check_ours lib/base 'base/'
check_ours lib/quant 'base/|quant/'
check_ours lib/linalg 'base/|linalg/'
check_ours lib/io 'base/|io/|quant/int2_format.h'
check_ours lib/model 'base/|quant/|linalg/|io/|model/'
check_ours lib/model/cuda 'base/|quant/|linalg/|io/|model/|kernels/'
check_ours lib/calib 'base/|quant/|linalg/|io/|model/|calib/'
check_ours lib/eval 'base/|quant/|linalg/|io/|model/|eval/'
check_ours lib/report 'base/|report/|io/results.h'

# Third-party headers: pattern, then the only files that may have them.
third_party() {
  found=$(grep -rnE "^#include [<\"]($1)" lib kernels tools --include='*.h' --include='*.cpp' --include='*.cu' | grep -vE "^($2)" || true)
  [ -z "$found" ] || report "<$1> is allowed only in $2:
$found"
}
third_party 'hdf5' 'lib/io/hdf5_file[a-z_]*\.(h|cpp)'
third_party 'Eigen/' 'lib/linalg/[a-z0-9_]*\.cpp'
third_party 'cblas' 'lib/(linalg|model)/[a-z0-9_]*\.cpp'
third_party 'nlohmann/' '(lib/io|tools)/[a-z0-9_]*\.cpp|lib/(model|calib|eval|report)/[a-z0-9_]*\.cpp'
third_party 'zip\.h' 'lib/io/[a-z0-9_]*\.cpp'
third_party 'openssl/' 'lib/io/[a-z0-9_]*\.cpp'
third_party 'pcre2|utf8proc' 'lib/model/[a-z0-9_]*\.cpp'
third_party 'curl/' 'lib/eval/endpoint[a-z0-9_]*\.cpp'
third_party 'CLI/' 'tools/'
third_party 'fmt/' 'tools/'
third_party 'cuda' 'kernels/[a-z0-9_]*\.(cu|cuh|cpp)|lib/model/cuda/'

found=$(grep -rnE 'std::(cout|cerr|clog|printf|fprintf|puts)|[^:a-z_](printf|fprintf|puts|exit|_exit|abort)\(' lib --include='*.h' --include='*.cpp' | grep -vE '//.*(printf|exit|abort)' || true)
[ -z "$found" ] || report "lib never prints and never exits:
$found"
long=$(find lib kernels tools tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs wc -l | awk '$2 != "total" && $1 > 400 {print $2 ": " $1 " lines"}')
[ -z "$long" ] || report "files are at most 400 lines:
$long"
# ctest would cut such a name in two that run nothing and pass.
found=$(grep -rnE 'TEST_CASE\("[^"]*;' tests --include='*.cpp' || true)
[ -z "$found" ] || report "no semicolon in the name of a test:
$found"
[ "$bad" = 0 ] && echo "layers: ok"
exit "$bad"
