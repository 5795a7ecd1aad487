#!/bin/sh
# Runs the binary as a user does: help of every subcommand with an example, version, errors with exit code 1 and one line that names the culprit.
# usage: test_cli.sh OSCAR_BINARY
oscar=${1:?usage: test_cli.sh OSCAR_BINARY}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failures=0
fail() { echo "FAIL: $1"; failures=$((failures + 1)); }

# expect CODE "text that must be in the output" ARGUMENTS...
expect() {
  code=$1
  text=$2
  shift 2
  output=$("$oscar" "$@" 2>&1 </dev/null)
  got=$?
  [ "$got" = "$code" ] || fail "oscar $*: exit code $got, expected $code: $output"
  case "$output" in *"$text"*) ;; *) fail "oscar $*: '$text' not in: $output" ;; esac
}

expect 0 "SIMD" --version
expect 0 "Usage" --help
expect 1 "subcommand"
expect 1 "nonsense" nonsense
for command in $("$oscar" --help | sed -n '/^Subcommands:/,$s/^  \([a-z]*\) .*/\1/p'); do
  expect 0 "xample" "$command" --help
done
expect 1 "absent.gguf: no such file" inspect "$folder/absent.gguf"
printf 'hello' > "$folder/notes.txt"
expect 1 "notes.txt: not a capture" inspect "$folder/notes.txt"

[ "$failures" = 0 ] && echo "cli: ok"
[ "$failures" = 0 ]
