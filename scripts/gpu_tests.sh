#!/usr/bin/env bash
# Runs the kernel tests on this machine's CUDA device. usage: scripts/gpu_tests.sh [--sanitize] TEST_GPU
#   TEST_GPU    the test executable: build/tests/test_gpu, or bin/test_gpu of an installed bundle
#   --sanitize  also a reduced set under compute-sanitizer: memcheck, racecheck, initcheck
set -euo pipefail
sanitize=0
[ "${1:-}" = --sanitize ] && { sanitize=1; shift; }
[ $# = 1 ] && [ -x "$1" ] || { echo "usage: scripts/gpu_tests.sh [--sanitize] TEST_GPU" >&2; exit 1; }
nvidia-smi -L >/dev/null 2>&1 || { echo "gpu_tests.sh: no CUDA device here" >&2; exit 1; }
"$1" --durations no
if [ "$sanitize" = 1 ]; then
  command -v compute-sanitizer >/dev/null || { echo "gpu_tests.sh: compute-sanitizer not found" >&2; exit 1; }
  for tool in memcheck racecheck initcheck; do
    echo "== $tool"
    compute-sanitizer --tool "$tool" --error-exitcode 3 "$1" "[sanitize]"
  done
fi
