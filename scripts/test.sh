#!/usr/bin/env bash
# Builds and runs the tests; installs the Debian packages it lacks. usage: scripts/test.sh [--all]
#   --all   also: formatting, address and undefined-behaviour sanitizers over the unit tests, CUDA code compiled where nvcc is, the installed bundle started from elsewhere
# The tests with the demo model (ctest label `model`) run too: the model is fetched into the cache folder once.
. "$(dirname "$0")/common.sh"
all=0
case "${1:-}" in
  "") ;;
  --all) all=1 ;;
  *) die "usage: scripts/test.sh [--all]" ;;
esac

install_packages $build_packages $demo_packages
bash "$root/scripts/fetch_demo.sh" >/dev/null
export OSCAR_CACHE=$cache

if [ "$all" = 1 ]; then
  install_packages clang-format patchelf
  say "formatting"
  (cd "$root" && git ls-files '*.h' '*.cpp' '*.cu' '*.cuh' | xargs clang-format --dry-run -Werror)
  say "sanitizers: unit tests without the demo model"
  targets="test_base test_quant test_linalg test_io test_model test_calib test_eval test_report test_kernels test_fuzz" \
    build "$root/build-sanitize" -DCMAKE_BUILD_TYPE=Debug -DCMAKE_CXX_FLAGS_DEBUG="-O1 -g1" -DOSCAR_SANITIZE=address,undefined -DOSCAR_DEV=ON -DOSCAR_CUDA=OFF
  # libhdf5 1.10 itself reads out of bounds and leaks on some damaged files, which stops the sanitizer: those tests run in the release build only.
  (cd "$root/build-sanitize" && ctest -LE model -E "^cli|tools|damaged HDF5|damaged bundles|damaged captures" -j "$jobs" --output-on-failure --timeout 600 | tail -n 15)
fi

say "release build and tests"
if [ "$all" = 1 ]; then
  build "$root/build" -DOSCAR_DEV=ON -DOSCAR_CUDA=AUTO "-DOSCAR_CUDA_ARCHS=80-real;90a-real"
  say "installed bundle"
  rm -rf "$root/build/bundle"
  cmake --install "$root/build" --prefix "$root/build/bundle" >/dev/null
  env -u LD_LIBRARY_PATH "$root/build/bundle/bin/oscar" --version
else
  build "$root/build" -DOSCAR_DEV=ON
fi
cd "$root/build"
ctest -j "$jobs" --output-on-failure --timeout 900
