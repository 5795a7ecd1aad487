# Shared by the scripts: folders, package installation, checksummed downloads. Sourced, not run.

set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cache=${OSCAR_CACHE:-$root/.cache}
jobs=${OSCAR_JOBS:-$(nproc)}
# The compiler cache serves every checkout: paths below the source folder are hashed relative to it.
export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1

say() { printf '== %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"; else command -v sudo >/dev/null || die "need root or sudo for: $*"; sudo -n "$@" || sudo "$@"; fi
}

build_packages="g++ cmake ninja-build ccache git pkg-config libcli11-dev libeigen3-dev libopenblas-dev libhdf5-dev catch2 libfmt-dev
  nlohmann-json3-dev libpcre2-dev libutf8proc-dev libzip-dev libssl-dev"
demo_packages="ca-certificates python3 python3-pip unzip"

# Installs the named Debian packages that are missing; asks nothing.
install_packages() {
  local missing=() package
  for package in "$@"; do
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
  [ ${#missing[@]} -eq 0 ] && return 0
  say "installing: ${missing[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# A python3 that has pip: the one on the PATH when it does, else Debian's.
python_with_pip() {
  if command -v python3 >/dev/null && python3 -m pip --version >/dev/null 2>&1; then echo python3; else echo /usr/bin/python3; fi
}

# Configures and builds; `targets` (a variable, default all) limits what is built. usage: build FOLDER [cmake options]
build() {
  local folder=$1
  shift
  cmake -G Ninja -S "$root" -B "$folder" "$@" >"$folder.configure.log" 2>&1 || { tail -n 30 "$folder.configure.log" >&2; die "cmake failed, see $folder.configure.log"; }
  rm -f "$folder.configure.log"
  cmake --build "$folder" -j "$jobs" --target ${targets:-all}
}
