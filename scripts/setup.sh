#!/usr/bin/env bash
# Installs missing packages for building hearth, on Debian and its derivatives.
#
#   scripts/setup.sh            packages to build and run hearth
#   scripts/setup.sh --tests    also packages for the checks: rustfmt, clippy, and a software Vulkan driver
#
# Rust must be installed. HiGHS, the solver of a planner, comes prebuilt (scripts/highs.sh) or is built from source
# with cmake and a C++ compiler; libclang parses its header. The crates link through a C compiler and need no other
# system library.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$1" >&2
    printf 'setup: hint:  %s\n' "$2" >&2
    exit 1
}
has() { command -v "$1" >/dev/null 2>&1; }

# rustup installs cargo here, and the PATH of the current shell may not include it yet.
if ! has cargo && [[ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]]; then
    fail "cargo is installed but not on the PATH" "source \"${CARGO_HOME:-$HOME/.cargo}/env\", then run this again"
fi
has cargo && has rustc || fail "Rust is not installed" "install it with rustup, then run this again"

wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
found=$(rustc --version | awk '{ print $2 }')
if [[ "$(printf '%s\n%s\n' "$wanted" "${found%%-*}" | sort -V | head -n 1)" != "$wanted" ]]; then
    fail "Rust $found is too old; $wanted or newer is needed" "rustup update stable"
fi

# A package is missing if its program is.
packages=()
has cc || packages+=(gcc libc6-dev)
has c++ || packages+=(g++)
has cmake || packages+=(cmake make)
has pkg-config || packages+=(pkg-config)
# exists PATTERN...: whether a file matches one of the patterns.
exists() {
    local pattern
    for pattern in "$@"; do
        if compgen -G "$pattern" >/dev/null; then return 0; fi
    done
    return 1
}
# bindgen needs libclang (not libclang-cpp) and the headers of the same version of clang.
libraries=() headers=()
for folder in '/usr/lib' '/usr/lib64' '/usr/lib/*' '/usr/lib/llvm*/lib*'; do
    libraries+=("$folder/libclang.so*" "$folder/libclang-[0-9]*.so*")
    headers+=("$folder/clang/*/include/stddef.h")
done
if [[ -z "${LIBCLANG_PATH:-}" ]] && { ! exists "${libraries[@]}" || ! exists "${headers[@]}"; }; then
    packages+=(libclang-dev)
fi

# install PACKAGE...: installs packages with this system's package manager.
install() {
    has apt-get || fail "these are missing: $*" "install them with this system's package manager"
    local root=()
    if [[ "$(id -u)" -ne 0 ]]; then
        has sudo || fail "these are missing: $*" "run as root: apt-get install $*"
        root=(sudo)
    fi
    say "installing $*"
    "${root[@]}" apt-get update -qq
    "${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

if ((${#packages[@]})); then
    install "${packages[@]}"
fi

# Without a GPU, the tests of the GPU backend run on a software driver. Without either they are skipped.
if [[ "${1:-}" == "--tests" ]]; then
    optional=()
    exists '/usr/lib/*/libvulkan.so.1' || optional+=(libvulkan1)
    exists '/usr/share/vulkan/icd.d/*.json' || optional+=(mesa-vulkan-drivers)
    if ((${#optional[@]})); then
        (install "${optional[@]}") || say "no Vulkan driver can be installed; tests that need one are skipped"
    fi
fi

if [[ "${1:-}" == "--tests" ]]; then
    for component in rustfmt clippy; do
        if ! cargo "${component#rust}" --version >/dev/null 2>&1; then
            if has rustup; then
                say "installing $component"
                rustup component add "$component" || say "$component cannot be installed; its check is skipped"
            else
                say "$component is missing; its check is skipped"
            fi
        fi
    done
fi

scripts/highs.sh

say "ready: $(rustc --version), $(cc --version | head -n 1)"
