#!/usr/bin/env bash
# Draws the six timelines of the prima.cpp paper's Fig. 6 from scenarios/paper/fig-6-*.yaml into docs/studies/fig-6.
set -euo pipefail
cd "$(dirname "$0")/.."
hearth="${HEARTH:-target/release/hearth}"
out="docs/studies/fig-6"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
{
    echo "# Timelines of the prima.cpp paper's Fig. 6"
    echo
    echo "Written by \`scripts/fig-6.sh\` from \`scenarios/paper/fig-6-*.yaml\`, the same bytes on every machine."
    echo "Green: reading ahead that overlaps with computation. Orange: computation waits for the disk. The devices are"
    echo "invented, because the paper does not describe them. The page caches are warm from earlier tokens."
} > "$out/README.md"
declare -A captions=(
    [a]="Several rounds on equal devices with fast disks (Fig. 6a)"
    [b]="Several rounds on equal devices with slow disks (Fig. 6b)"
    [c]="Equal windows with one slow disk (Fig. 6c)"
    [d]="A single round without prefetch (Fig. 6d)"
    [e]="A single round in which prefetched pages evict each other (Fig. 6e)"
    [f]="A smaller window on the device with the slow disk (Fig. 6f)"
)
for name in a b c d e f; do
    scenario="scenarios/paper/fig-6-$name.yaml"
    "$hearth" simulate "$scenario" --warm --trace "$work/trace" --json > "$work/numbers.json"
    "$hearth" report "$work/trace" -o "$work/report" > /dev/null
    cp "$work/report/gantt-simulated.svg" "$out/fig-6-$name.svg"
    tpot="$(sed -n '/"tpot_ms"/,/}/s/.*"mean": \([0-9.]*\).*/\1/p' "$work/numbers.json" | head -1)"
    {
        echo
        echo "## $name"
        echo
        echo "${captions[$name]}: ${tpot%%.*} ms a token."
        echo
        echo "![timeline $name](fig-6-$name.svg)"
    } >> "$out/README.md"
done
