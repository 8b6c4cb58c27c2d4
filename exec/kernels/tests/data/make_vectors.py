#!/usr/bin/env python3
"""Writes test vectors of dequantisation with the reference package.

For every format with kernels, writes NAME.blocks (bytes as in a GGUF file) and NAME.f32 (the result of
gguf.quants.dequantize, little-endian). Needs `gguf` and `numpy`; the Rust test needs only the files.
"""
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Q

HERE = Path(__file__).parent
# Scales to test: ordinary, negative, zero, negative zero, subnormal, maximum.
SCALES = np.array([0.0123, -0.7, 0.0, -0.0, 6e-8, 5e-5, 65504.0, 1.0], np.float16).view(np.uint8).reshape(-1, 2)


def blocks(name, quant, count, halves):
    """Writes random blocks with the f16 scales of SCALES at the byte offsets in `halves`."""
    rng = np.random.default_rng(quant.value)
    size = gguf.GGML_QUANT_SIZES[quant][1]
    out = rng.integers(0, 256, (count, size), dtype=np.uint8)
    for n, at in enumerate(halves):
        out[:, at : at + 2] = SCALES[(np.arange(count) * (2 * n + 1) + n) % len(SCALES)]
    write(name, quant, out)


def blocks_iq1_m(count):
    """Writes random blocks of IQ1_M, whose f16 scales of SCALES are in the upper four bits of four 16-bit integers."""
    out = np.random.default_rng(Q.IQ1_M.value).integers(0, 256, (count, 56), dtype=np.uint8)
    scales = SCALES.view("<u2").reshape(-1, 1)[np.arange(count) % len(SCALES)]
    out[:, 49::2] = out[:, 49::2] & 15 | (scales >> np.array([0, 4, 8, 12]) & 15) << 4
    write("iq1_m", Q.IQ1_M, out)


def write(name, quant, out):
    (HERE / f"{name}.blocks").write_bytes(out.tobytes())
    with np.errstate(all="ignore"):
        values = gguf.quants.dequantize(out, quant)
    (HERE / f"{name}.f32").write_bytes(np.ascontiguousarray(values, "<f4").tobytes())


blocks("q8_0", Q.Q8_0, 16, [0])
blocks("q4_k", Q.Q4_K, 8, [0, 2])
blocks("q6_k", Q.Q6_K, 8, [208])
blocks("q4_0", Q.Q4_0, 16, [0])
blocks("q4_1", Q.Q4_1, 16, [0, 2])
blocks("q5_0", Q.Q5_0, 16, [0])
blocks("q5_1", Q.Q5_1, 16, [0, 2])
blocks("q2_k", Q.Q2_K, 8, [80, 82])
blocks("q3_k", Q.Q3_K, 8, [108])
blocks("q5_k", Q.Q5_K, 8, [0, 2])
blocks("iq1_s", Q.IQ1_S, 8, [0])
blocks_iq1_m(8)
blocks("iq2_xxs", Q.IQ2_XXS, 8, [0])
blocks("iq2_xs", Q.IQ2_XS, 8, [0])
blocks("iq2_s", Q.IQ2_S, 8, [0])
blocks("iq3_xxs", Q.IQ3_XXS, 8, [0])
blocks("iq3_s", Q.IQ3_S, 8, [0])
# Every exponent.
mxfp4 = np.random.default_rng(Q.MXFP4.value).integers(0, 256, (256, 17), dtype=np.uint8)
mxfp4[:, 0] = np.arange(256)
write("mxfp4", Q.MXFP4, mxfp4)
blocks("iq4_nl", Q.IQ4_NL, 16, [0])
blocks("iq4_xs", Q.IQ4_XS, 8, [0])
halves = np.arange(0, 0x10000, 61, dtype=np.uint16)
halves = halves[(halves & 0x7C00) != 0x7C00]
write("f16", Q.F16, halves.view(np.uint8).reshape(1, -1))
write("bf16", Q.BF16, halves.view(np.uint8).reshape(1, -1))
write("f32", Q.F32, np.array([[0.0, -0.0, 1.5, -3.4e38, 1e-45]], np.float32).view(np.uint8))

# The codebook of IQ1_S: each row as a 16-bit integer, the sum of (weight + 1) 3^position. The rows are dequantised from
# blocks with 32 rows each and the scale 1.
book = np.zeros((64, 50), np.uint8)
book[:, 0:2] = np.array([1.0], np.float16).view(np.uint8)
rows = np.arange(2048).reshape(64, 8, 4)
book[:, 2:34] = (rows & 255).reshape(64, 32)
high = (rows >> 8 << np.array([0, 3, 6, 9])).sum(axis=2).astype("<u2")
book[:, 34:50] = high.view(np.uint8).reshape(64, 16)
values = gguf.quants.dequantize(book, Q.IQ1_S).reshape(2048, 8)
digits = np.rint(values - 0.125).astype(int) + 1
(HERE / "iq1_s.book").write_bytes((digits * 3 ** np.arange(8)).sum(axis=1).astype("<u2").tobytes())


def codebook(name, quant, scale, rows, place):
    """Writes blocks with every index of a codebook, NAME.codebook.blocks, and their weights as bytes, NAME.codebook.i8.

    The signs and scales are zero, and the f16 `scale` makes the weights the magnitudes in the codebook. `place` writes
    indices, an array [blocks, indices of a block], to the blocks.
    """
    block_rows = 64 if name.startswith("iq3") else 32
    indices = np.arange(rows).reshape(-1, block_rows)
    out = np.zeros((len(indices), gguf.GGML_QUANT_SIZES[quant][1]), np.uint8)
    out[:, 0:2] = np.array([scale], np.float16).view(np.uint8)
    place(out, indices)
    (HERE / f"{name}.codebook.blocks").write_bytes(out.tobytes())
    (HERE / f"{name}.codebook.i8").write_bytes(gguf.quants.dequantize(out, quant).astype(np.int8).tobytes())


def place_iq2_xxs(out, indices):
    out[:, 2:66].reshape(-1, 8, 8)[..., :4] = indices.reshape(-1, 8, 4)


def place_iq2_xs(out, indices):
    out[:, 2:66] = indices.astype("<u2").view(np.uint8)


def place_iq2_s(out, indices):
    out[:, 2:34] = indices & 255
    out[:, 66:74] = (indices.reshape(-1, 8, 4) >> 8 << np.array([0, 2, 4, 6])).sum(axis=2)


def place_iq3_xxs(out, indices):
    out[:, 2:66] = indices


def place_iq3_s(out, indices):
    out[:, 2:66] = indices & 255
    out[:, 66:74] = (indices.reshape(-1, 8, 8) >> 8 << np.arange(8)).sum(axis=2)


codebook("iq2_xxs", Q.IQ2_XXS, 8.0, 256, place_iq2_xxs)
codebook("iq2_xs", Q.IQ2_XS, 8.0, 512, place_iq2_xs)
codebook("iq2_s", Q.IQ2_S, 8.0, 1024, place_iq2_s)
codebook("iq3_xxs", Q.IQ3_XXS, 4.0, 256, place_iq3_xxs)
codebook("iq3_s", Q.IQ3_S, 1.0, 512, place_iq3_s)
