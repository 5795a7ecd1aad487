#!/usr/bin/env bash
# Times the kernels on this machine's CUDA device and writes rows. usage: scripts/gpu_bench.sh OSCAR OUT_FOLDER
#   OSCAR  the program: build/tools/oscar, or bin/oscar of an installed bundle (a build with CUDA)
# cuDNN's BF16 attention is timed beside them when python3 has PyTorch with CUDA.
set -euo pipefail
[ $# = 2 ] && [ -x "$1" ] || { echo "usage: scripts/gpu_bench.sh OSCAR OUT_FOLDER" >&2; exit 1; }
oscar=$1 out=$2
mkdir -p "$out"
against=()
if python3 -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
  against=(--against cudnn --script "$(dirname "$0")/cudnn_sdpa.py")
fi
if [ ${#against[@]} -gt 0 ]; then  # prefill attention in BF16, to be read beside attend_prefill's rows
  python3 "$(dirname "$0")/cudnn_prefill.py" 32x8x128 4096 0,28672 > "$out/prefill_bf16.jsonl"
fi
"$oscar" bench kernels "${against[@]}" --out "$out/kernels.jsonl"
for shape in 64x8x128 96x8x128 128x8x128 32x8x64 32x8x96 32x8x192 32x8x256; do
  "$oscar" bench kernels --shape "$shape" --context 128k --batch 8 --out "$out/kernels-$shape.jsonl"
done
