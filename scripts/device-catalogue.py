#!/usr/bin/env python3
"""Compares the catalogue of parts with profiles of devices, and prints a report in Markdown.

usage: device-catalogue.py HEARTH [PROFILE PARTS]...

HEARTH is the program. The shipped devices are always compared; more profiles can be named, each with its parts.
"""
import json
import subprocess
import sys

SHIPPED = {
    "d1": "apple-m1, 8 GiB, apple-ssd, macos",
    "d2": "rtx-3070-laptop, laptop-ddr4-3200, 8 GiB, nvme-gen3, linux",
    "d3": "rtx-2080-ti, ddr4-2666-dual, 16 GiB, nvme-gen3, linux",
    "d4": "kirin-9000, 8 GiB, ufs-3.1, android",
    "d5": "kirin-990, 8 GiB, ufs-2.1, android",
    "d6": "laptop-ddr3-1600, 8 GiB, sata-ssd, linux",
    "snapdragon-8-gen-3": "snapdragon-8-gen-3, 16 GiB, ufs-4.0, android",
    "dimensity-9300": "dimensity-9300, 16 GiB, ufs-4.0, android",
    "apple-a18": "apple-a18, 8 GiB, apple-ssd, macos",
    "nvidia-orin": "jetson-agx-orin, 32 GiB, nvme-gen3, linux",
    "tesla-fsd": "tesla-fsd, 8 GiB, nvme-gen3, linux",
}
VALUES = [
    "memory.available",
    "memory.can_swap",
    "cpu.read_bandwidth",
    "cpu.matmul.q4_k",
    "cpu.token_overhead",
    "disk.sequential",
    "disk.random",
    "gpu.memory_available",
    "gpu.read_bandwidth",
    "gpu.matmul.q4_k",
    "gpu.layer_overhead",
]


def main() -> None:
    hearth, extra = sys.argv[1], sys.argv[2:]
    pairs = list(SHIPPED.items()) + list(zip(extra[::2], extra[1::2], strict=True))
    for device, parts in pairs:
        command = [hearth, "device", "compare", device, parts, "--json"]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = {pair["name"]: pair for pair in json.loads(output)}
        print(f"\n### {device.rsplit('/')[-1].removesuffix('.yaml')}\n\n`{parts}`\n")
        print("| value | profile | source | catalogue | ratio |\n| --- | --- | --- | --- | --- |")
        for name in VALUES:
            if pair := found.get(name):
                profile, catalogue = (value or "-" for value in pair["values"])
                source = (pair["sources"][0] or "-").split(":")[0].split(",")[0]
                ratio = f"{pair['ratio']:.2f}" if pair["ratio"] else "-"
                print(f"| `{name}` | {profile} | {source} | {catalogue} | {ratio} |")


if __name__ == "__main__":
    main()
