#!/usr/bin/env bash
# Fuzzes the parsers of untrusted bytes with cargo-fuzz, and prints a table of the results.
#
#   scripts/fuzz.sh                         every target for 600 s
#   scripts/fuzz.sh SECONDS                 every target for SECONDS
#   scripts/fuzz.sh SECONDS TARGET...       these targets, for example `frame trace`
#
# The targets are in fuzz/fuzz_targets. Fuzzing begins with the inputs in fuzz/corpus and those of earlier runs in
# fuzz/work. A target ends at its first finding: a crash, an input that takes longer than 10 s, or one that needs more
# than 2048 MiB. Findings are kept in fuzz/artifacts. Exit status: 0 without findings, 1 otherwise.
#
# Installs cargo-fuzz if it is missing. Sanitizers need a nightly compiler; without one, the stable compiler builds with
# RUSTC_BOOTSTRAP=1, which enables the same options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    printf 'fuzz: error: %s\n' "$1" >&2
    printf 'fuzz: hint:  %s\n' "$2" >&2
    exit 2
}

readonly seconds="${1:-600}"
[[ "$seconds" =~ ^[1-9][0-9]*$ ]] || fail "\`$seconds\` is not a number of seconds" "run scripts/fuzz.sh 60 frame"
targets=("${@:2}")
if [[ ${#targets[@]} == 0 ]]; then
    for file in fuzz/fuzz_targets/*.rs; do targets+=("$(basename "$file" .rs)"); done
fi
for target in "${targets[@]}"; do
    [[ -e "fuzz/fuzz_targets/$target.rs" ]] || fail "there is no target \`$target\`" "ls fuzz/fuzz_targets"
done

cargo fuzz --version >/dev/null 2>&1 || cargo install --locked cargo-fuzz
if rustup toolchain list 2>/dev/null | grep -q '^nightly'; then
    export RUSTUP_TOOLCHAIN=nightly
else
    export RUSTC_BOOTSTRAP=1
fi
cargo fuzz build --target-dir fuzz/target
programs="fuzz/target/$(rustc -vV | sed -n 's/^host: //p')/release"
readonly programs

# Maximum length of an input in bytes: long enough for several levels of structure, short enough for many runs.
max_length() {
    case "$1" in
        document | trace) echo 16384 ;;
        frame | handshake) echo 1024 ;;
        http) echo 4096 ;;
        *) echo 8192 ;;
    esac
}

# Runs a target and adds its row to the table.
rows=()
found=()
fuzz() {
    local target=$1 log="fuzz/work/$1.log" options=()
    mkdir -p "fuzz/work/$target" "fuzz/artifacts/$target"
    [[ ! -e "fuzz/dictionaries/$target.dict" ]] || options+=("-dict=fuzz/dictionaries/$target.dict")
    touch "fuzz/work/started"
    printf '\n== %s\n' "$target"
    "$programs/$target" "fuzz/work/$target" "fuzz/corpus/$target" "${options[@]}" \
        -artifact_prefix="fuzz/artifacts/$target/" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
        -max_len="$(max_length "$target")" -detect_leaks=0 -print_final_stats=1 2>&1 |
        tee "$log" | grep -E '^(==|.*ERROR|.*panicked)' || true
    local runs rate coverage new
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n 1)
    rate=$(sed -n 's/^stat::average_exec_per_sec: *//p' "$log" | tail -n 1)
    # The last line of progress, such as `#512 pulse  cov: 310 ft: 720 corp: 88/9Kb exec/s: 256 rss: 60Mb`.
    coverage=$(sed -n 's/^#.* cov: \([0-9]*\) ft: \([0-9]*\) corp: \([0-9]*\).*/\1 \2 \3/p' "$log" | tail -n 1)
    mapfile -t new < <(find "fuzz/artifacts/$target" -type f ! -name 'slow-unit-*' -newer fuzz/work/started)
    found+=("${new[@]}")
    # shellcheck disable=SC2086
    rows+=("$(printf '%-14s %10s %8s %7s %8s %7s %9d' "$target" "${runs:--}" "${rate:--}" ${coverage:-- - -} "${#new[@]}")")
    # A target that fails without a finding, for example because it does not start, is a failure too.
    [[ -n "$runs" ]] || found+=("$log")
}

for target in "${targets[@]}"; do fuzz "$target"; done

printf '\n%-14s %10s %8s %7s %8s %7s %9s\n' target runs runs/s edges features corpus findings
printf '%s\n' "${rows[@]}"
[[ ${#found[@]} -gt 0 ]] || exit 0
printf '\nfindings, with a command that repeats each:\n'
for file in "${found[@]}"; do
    if [[ "$file" == *.log ]]; then
        printf '  %s: the target did not run\n' "$file"
    else
        printf '  %s/%s %s\n' "$programs" "$(basename "$(dirname "$file")")" "$file"
    fi
done
exit 1
