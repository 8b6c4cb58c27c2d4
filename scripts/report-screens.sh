#!/usr/bin/env bash
# Takes screenshots of reports in a browser, light and dark, 1280 and 390 pixels wide.
#
#   scripts/report-screens.sh [FOLDER]    default: docs/studies/report
#
# The reports: the synthetic pair of traces of the tests (simulated and measured); runs of the paper's testbed in 1, 2
# and 4 rounds with published numbers and a sweep; and the reproduction of Table 4. Needs Debian or a derivative:
# installs its chromium, and playwright in target/screens. Not part of ./run-tests. The exit status is 1 if a page is
# too wide, fetches anything, or has labels that overlap.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=${1:-docs/studies/report}
work=${CARGO_TARGET_DIR:-target}/screens
mkdir -p "$folder" "$work"

if [[ ! -x /usr/bin/chromium ]]; then
    root=()
    [[ "$(id -u)" -eq 0 ]] || root=(sudo)
    "${root[@]}" apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core
fi
if [[ ! -x "$work/venv/bin/python" ]]; then
    python3 -m venv "$work/venv"
    "$work/venv/bin/pip" install --quiet playwright pillow
fi

cargo build --quiet --bin hearth
cargo run --quiet -p hearth-reports --example sample_report "$work/pair" >"$work/pair.txt"
hearth=${CARGO_TARGET_DIR:-target}/debug/hearth
scenario=scenarios/paper/llama-70b-on-d1-d4.yaml
traces=()
for rounds in 1 2 4; do
    "$hearth" simulate "$scenario" --strategy exact --rounds "$rounds" --tokens 8 --trace "$work/k-$rounds.trace" >"$work/k.txt"
    traces+=("$work/k-$rounds.trace")
done
"$hearth" sweep "$scenario" --vary model.profile=llama-8b,llama-14b,llama-30b,llama-45b,llama-60b,llama-70b \
    --vary planner.strategy=halda,overlap,mem --tokens 6 -o "$work/sizes.csv"
"$hearth" report "${traces[@]}" --published prima-table-4 --system prima.cpp --sweep "$work/sizes.csv" -o "$work/paper"
"$hearth" reproduce reports/published/prima-table-4.yaml -o "$work"

result=0
for name in pair paper prima-table-4; do
    "$work/venv/bin/python" scripts/report-screens.py "$work/$name/index.html" "$folder" "$name" || result=1
done
exit $result
