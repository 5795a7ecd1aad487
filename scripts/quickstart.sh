#!/usr/bin/env bash
# From a fresh Debian 12 to a table: installs what is missing, builds, fetches the demo model and text, then captures, calibrates, simulates, evaluates and
# compares. Results land in demo-results/; a second run skips what is done. usage: scripts/quickstart.sh [--model PATH] [--results FOLDER]
. "$(dirname "$0")/common.sh"
model=""
results=$root/demo-results
while [ $# -gt 0 ]; do
  case "$1" in
    --model) model=${2:?--model needs a path}; shift 2 ;;
    --results) results=${2:?--results needs a folder}; shift 2 ;;
    *) die "usage: scripts/quickstart.sh [--model PATH] [--results FOLDER]" ;;
  esac
done

install_packages $build_packages $demo_packages
say "building (about 3 minutes on two free cores)"
if [ -t 2 ]; then build "$root/build" -DOSCAR_TESTS=OFF >&2; else build "$root/build" -DOSCAR_TESTS=OFF >/dev/null; fi
bash "$root/scripts/fetch_demo.sh" >/dev/null
[ -n "$model" ] || model=$cache/smollm2-135m-instruct-q4_1.gguf
oscar=$root/build/tools/oscar
austen=$cache/austen
mkdir -p "$results"

# usage: step NAME OUTPUT COMMAND...   Skips the command when OUTPUT is there and was made by the same command. What it prints goes to NAME.txt in the results folder.
step() {
  local name=$1 output=$2 stamp
  shift 2
  stamp=$results/.$name.stamp
  if [ -e "$output" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$*" ]; then say "$name: done before, skipped"; return 0; fi
  say "$name"
  rm -f "$stamp"
  "$@" >"$results/$name.txt"
  printf '%s' "$*" >"$stamp"
}

calibration_text=(--text "$austen/emma.txt" --text "$austen/sense_and_sensibility.txt")
step capture "$results/capture.h5" "$oscar" capture --model "$model" "${calibration_text[@]}" --tokens 4096 --seq-len 2048 --out "$results/capture.h5"
step calibrate "$results/best.h5" "$oscar" calibrate --model "$model" "${calibration_text[@]}" --tokens 12288 --seq-len 2048 \
  --recipe official,centered,light,best --out "$results/{recipe}.h5"
step simulate "$results/simulate.jsonl" "$oscar" simulate --capture "$results/capture.h5" --bundle "$results/best.h5" \
  --arm naive-windows,hadamard,oscar-best --out "$results/simulate.jsonl"
step eval "$results/eval.jsonl" "$oscar" eval --model "$model" --text "$austen/persuasion.txt" --bundle "$results/best.h5" --arm oscar-best \
  --set ppl,kl,recall --recall-contexts 2 --length 2048 --windows 1 --out "$results/eval.jsonl"
arms=naive,naive-windows,quarot,hadamard,kivi,oscar@$results/official.h5,oscar-centered@$results/centered.h5,oscar-light@$results/light.h5,oscar-best,int4,int8
step compare "$results/compare.jsonl" "$oscar" compare --model "$model" --text "$austen/pride_and_prejudice.txt" --bundle "$results/best.h5" --arm "$arms" \
  --length 2048 --windows 2 --out "$results/compare.jsonl" --markdown "$results/compare.md" --html "$results/compare.html"
"$oscar" report "$results/compare.jsonl"
say "files are in $results"
