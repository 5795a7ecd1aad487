#!/bin/bash
# The pipeline on the demo model as a user runs it, and what happens when things go wrong: interruption, kill, full disk, damaged files, unusable text.
# usage: test_cli_model.sh OSCAR_BINARY CACHE_FOLDER
oscar=${1:?usage: test_cli_model.sh OSCAR_BINARY CACHE_FOLDER}
cache=${OSCAR_CACHE:-$2}
model=$cache/smollm2-135m-instruct-q4_1.gguf
text=$cache/austen/emma.txt
other=$cache/austen/persuasion.txt
[ -f "$model" ] && [ -f "$text" ] || { echo "skipped: no demo model in $cache (scripts/fetch_demo.sh)"; exit 77; }
folder=$(mktemp -d)
mounted=""
cleanup() { [ -n "$mounted" ] && umount "$mounted"; rm -rf "$folder"; }
trap cleanup EXIT
failures=0
fail() { echo "FAIL: $1"; failures=$((failures + 1)); }

# expect CODE "text that must be in the output" ARGUMENTS...
expect() {
  local code=$1 needed=$2 output got
  shift 2
  output=$("$oscar" "$@" 2>&1 </dev/null)
  got=$?
  [ "$got" = "$code" ] || fail "oscar $*: exit code $got, expected $code: $output"
  case "$output" in *"$needed"*) ;; *) fail "oscar $*: '$needed' not in: $output" ;; esac
}
absent() { for path in "$@"; do [ -e "$path" ] && fail "$path was left behind"; done; }

capture=(capture --model "$model" --text "$text" --seq-len 512 --tokens 2048)

# Interrupted, killed, resumed: nothing under the final name until it is complete.
"$oscar" "${capture[@]}" --out "$folder/capture.h5" >/dev/null 2>"$folder/log" &
pid=$!
for _ in $(seq 100); do [ "$(stat -c %s "$folder/capture.h5.part" 2>/dev/null || echo 0)" -gt 20000000 ] && break; sleep 0.1; done
kill -INT $pid
wait $pid
[ $? = 1 ] || fail "capture after Ctrl-C: exit code is not 1"
grep -q interrupted "$folder/log" || fail "capture after Ctrl-C: 'interrupted' not in: $(cat "$folder/log")"
absent "$folder/capture.h5"
"$oscar" "${capture[@]}" --out "$folder/capture.h5" >/dev/null 2>&1 &
pid=$!
sleep 1
kill -KILL $pid
wait $pid 2>/dev/null
absent "$folder/capture.h5"
expect 0 "2048 tokens in 4 sequences" "${capture[@]}" --out "$folder/capture.h5"
absent "$folder/capture.h5.part"
expect 0 "2048 tokens in 4 sequences (0 resumed)" "${capture[@]}" --out "$folder/whole.h5"
if command -v h5diff >/dev/null; then h5diff -q "$folder/capture.h5" "$folder/whole.h5" /layers /layers || fail "a resumed capture differs from one made at once"; fi

# The rest of the pipeline on that capture.
expect 0 "official" calibrate --capture "$folder/capture.h5" --recipe official --out "$folder/official.h5"
expect 0 "oscar" simulate --capture "$folder/whole.h5" --bundle "$folder/official.h5" --arm oscar --out "$folder/simulate.jsonl"
expect 0 "oscar" eval --model "$model" --text "$other" --bundle "$folder/official.h5" --arm oscar --set ppl,kl --length 512 --windows 1 --out "$folder/rows.jsonl"
[ -s "$folder/rows.jsonl" ] || fail "eval wrote no rows"
expect 0 "" generate --model "$model" --prompt "The year 2026 has" --max-tokens 4 --arm oscar --bundle "$folder/official.h5"

# Damaged and unusable input: exit code 1, the culprit named, nothing left behind.
head -c 5000000 "$model" >"$folder/short.gguf"
expect 1 "short.gguf" capture --model "$folder/short.gguf" --text "$text" --seq-len 256 --tokens 512 --out "$folder/none.h5"
expect 1 "missing.gguf" generate --model "$folder/missing.gguf" --prompt x
head -c 100000 "$folder/capture.h5" >"$folder/short.h5"
expect 1 "short.h5" calibrate --capture "$folder/short.h5" --recipe official --out "$folder/none.h5"
expect 1 "short.h5" eval --model "$model" --text "$other" --bundle "$folder/short.h5" --arm oscar --set kl --length 512 --windows 1 --out "$folder/none.jsonl"
: >"$folder/empty.txt"
expect 1 "empty" capture --model "$model" --text "$folder/empty.txt" --seq-len 256 --tokens 512 --out "$folder/none.h5"
echo "A short text." >"$folder/brief.txt"
expect 1 "brief.txt" eval --model "$model" --text "$folder/brief.txt" --arm naive-windows --set kl --length 512 --windows 1 --out "$folder/none.jsonl"
expect 1 "nonsense" eval --model "$model" --text "$other" --arm nonsense --set kl --length 512 --windows 1 --out "$folder/none.jsonl"
expect 1 "bundle" eval --model "$model" --text "$other" --arm oscar --set kl --length 512 --windows 1 --out "$folder/none.jsonl"
expect 1 "max-kl" eval --model "$model" --text "$other" --arm int8 --set kl --length 512 --windows 1 --max-kl -1 --out "$folder/none.jsonl"
expect 1 "no arm of this run" compare --model "$model" --text "$other" --arm int8 --set kl --length 512 --windows 1 --baseline absent --out "$folder/none.jsonl"
expect 1 "sink" eval --model "$model" --text "$other" --arm hadamard --set kl --length 512 --windows 1 --sink 18446744073709551615 --out "$folder/none.jsonl"
expect 1 "recent" generate --model "$model" --arm hadamard --recent -1 --prompt x
expect 1 "context" capture --model "$model" --text "$text" --seq-len 16384 --tokens 16384 --out "$folder/none.h5"
expect 1 "context" calibrate --model "$model" --text "$text" --seq-len 16384 --out "$folder/none.h5"
expect 1 "not a number" calibrate --capture "$folder/capture.h5" --recipe official --clip-k nan --out "$folder/none.h5"
absent "$folder/none.h5" "$folder/none.jsonl"
# Results never replace what the run reads, nor anything that is no regular file.
expect 1 "read by this run" calibrate --capture "$folder/capture.h5" --recipe official --out "$folder/capture.h5"
expect 1 "read by this run" eval --model "$model" --text "$other" --arm naive --set kl --length 512 --windows 1 --out "$model"
mkfifo "$folder/fifo"
expect 1 "regular file" calibrate --capture "$folder/capture.h5" --recipe official --out "$folder/fifo"
expect 1 "regular file" simulate --capture "$folder/whole.h5" --arm naive-windows --out "$folder/fifo"
"$oscar" tokenize --model "$model" hello >/dev/full 2>/dev/null && fail "tokenize: a full standard output passed for success"

# A limit on the size of files: the bundle cannot be closed, the process ends as after any error.
ls "$folder" >"$folder/before"
(ulimit -f 100 && "$oscar" calibrate --capture "$folder/capture.h5" --recipe official --out "$folder/limited.h5") >/dev/null 2>"$folder/log"
[ $? = 1 ] || fail "calibrate under a limit on file sizes: exit code is not 1"
grep -q "limited.h5.*File too large" "$folder/log" || fail "calibrate under a limit on file sizes: $(cat "$folder/log")"
[ "$(ls "$folder")" = "$(cat "$folder/before")" ] || fail "calibrate under a limit on file sizes left something behind: $(ls "$folder")"

# A full disk.
mkdir "$folder/full"
if [ "$(id -u)" = 0 ] && mount -t tmpfs -o size=4m tmpfs "$folder/full" 2>/dev/null; then
  mounted=$folder/full
  expect 1 "full/capture.h5" "${capture[@]}" --out "$folder/full/capture.h5"
  absent "$folder/full/capture.h5"
  dd if=/dev/zero of="$folder/full/ballast" bs=4k 2>/dev/null
  expect 1 "full/b.h5" calibrate --capture "$folder/capture.h5" --recipe official --out "$folder/full/b.h5"
  expect 1 "full/rows.jsonl" simulate --capture "$folder/whole.h5" --arm naive-windows --out "$folder/full/rows.jsonl"
  absent "$folder/full/b.h5" "$folder/full/rows.jsonl"
else
  echo "skipped: full disk (needs root and tmpfs)"
fi

[ "$failures" = 0 ] && echo "cli with the demo model: ok"
[ "$failures" = 0 ]
