//! Random blocks of every weight format with a given distribution of the weights.
//!
//! A chunk is filled with random bytes. Then the fields of each block that must not be arbitrary (scales, minima,
//! factors) are computed from their random bits. Quantised weights have mean zero and the requested standard deviation,
//! so that activations stay of order one for any width. Scales are normal f16 numbers (6.1e-5 and above), or powers of
//! two (`MXFP4`). The block layouts are those of ggml-common.h.
//!
//! F32, F16 and BF16 weights are sums of four uniform 16-bit numbers. Their distribution is close to a normal one,
//! and unlike a distribution computed with logarithms, it has the same bits on every machine.

use half::{bf16, f16};
use hearth_profiles::Format;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// The smallest scale of a block, just above the smallest normal f16 number.
const MIN_SCALE: f32 = 6.2e-5;

/// Standard deviation of the sum of four uniform random integers from 0 to 65535.
const FOUR_UNIFORM_DEVIATION: f32 = 37_837.227;

/// The distribution of the weights of a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Distribution {
    pub mean: f32,
    pub standard_deviation: f32,
}

/// Fills `out`, a whole number of blocks, with random weights. Later calls can reuse the buffer `scratch`.
pub(super) fn fill_blocks(
    format: Format,
    distribution: Distribution,
    rng: &mut ChaCha8Rng,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) {
    let deviation = distribution.standard_deviation;
    match format {
        Format::F32 => floats(distribution, rng, out, scratch, f32::to_le_bytes),
        Format::F16 => floats(distribution, rng, out, scratch, |value| f16::from_f32(value).to_le_bytes()),
        Format::Bf16 => floats(distribution, rng, out, scratch, |value| bf16::from_f32(value).to_le_bytes()),
        // `[d: f16][two 4-bit q a byte; 16]`, weight `d (q - 8)`. q is uniform with mean 7.5 and standard deviation
        // 4.61. The root mean square of q - 8 is 4.64, and its mean is not zero, so that d needs a random sign.
        Format::Q4_0 => quants::<18>(rng, out, |block| signed_scale(block, deviation / 4.64)),
        // `[d: f16][m: f16][two 4-bit q a byte; 16]`, weight `d q + m`.
        Format::Q4_1 => quants::<20>(rng, out, |block| scale_and_minimum(block, deviation / 4.61, 7.5)),
        // `[d: f16][fifth bits: 4][two 4-bit q a byte; 16]`, weight `d (q - 16)`; the root mean square of q - 16 is
        // 9.25.
        Format::Q5_0 => quants::<22>(rng, out, |block| signed_scale(block, deviation / 9.25)),
        // `[d: f16][m: f16][fifth bits: 4][two 4-bit q a byte; 16]`, weight `d q + m`.
        Format::Q5_1 => quants::<24>(rng, out, |block| scale_and_minimum(block, deviation / 9.23, 15.5)),
        Format::Q8_0 => quants::<34>(rng, out, |block| q8_0(block, deviation)),
        Format::Q2K => quants::<84>(rng, out, |block| q2_k(block, deviation)),
        Format::Q3K => quants::<110>(rng, out, |block| q3_k(block, deviation)),
        // `[d: f16][dmin: f16][eight 6-bit scales and minima: 12 bytes][two 4-bit q a byte; 128]`, weight
        // `d scale q - dmin minimum`. Scales from 16 to 47, root mean square 33.
        Format::Q4K => quants::<144>(rng, out, |block| {
            scales_and_minima(block, deviation / (33.0 * 4.61), 7.5, |bits| 16 + (bits & 31));
        }),
        // `[d: f16][dmin: f16][eight 6-bit scales and minima: 12 bytes][fifth bits: 32][two 4-bit q a byte; 128]`, as
        // Q4_K. Scales from 8 to 23, root mean square 16.2. They are smaller than those of Q4_K, so that d is a
        // normal number.
        Format::Q5K => quants::<176>(rng, out, |block| {
            scales_and_minima(block, deviation / (16.2 * 9.23), 15.5, |bits| 8 + (bits & 15));
        }),
        Format::Q6K => quants::<210>(rng, out, |block| q6_k(block, deviation)),
        Format::Iq1M => quants::<56>(rng, out, |block| iq1_m(block, deviation)),
        Format::Iq2Xxs => quants::<66>(rng, out, |block| sign_magnitude(block, deviation, 23.12 / 8.0)),
        Format::Iq2Xs => quants::<74>(rng, out, |block| sign_magnitude(block, deviation, 24.22 / 8.0)),
        Format::Iq2S => quants::<82>(rng, out, |block| sign_magnitude(block, deviation, 24.43 / 8.0)),
        Format::Iq3Xxs => quants::<98>(rng, out, |block| sign_magnitude(block, deviation, 30.85 / 4.0)),
        Format::Iq3S => quants::<110>(rng, out, |block| sign_magnitude(block, deviation, 7.59)),
        Format::Iq1S => quants::<50>(rng, out, |block| iq1_s(block, deviation)),
        // `[d: f16][two 4-bit q a byte; 16]`, weight `d value[q]`; the 16 values have the root mean square 67.4.
        Format::Iq4Nl => quants::<18>(rng, out, |block| signed_scale(block, deviation / 67.4)),
        Format::Iq4Xs => quants::<136>(rng, out, |block| iq4_xs(block, deviation)),
        Format::Mxfp4 => quants::<17>(rng, out, |block| mxfp4(block, deviation)),
    }
}

/// Fills `out` with float weights of N bytes each. Each weight is computed from eight random bytes.
fn floats<const N: usize>(
    distribution: Distribution,
    rng: &mut ChaCha8Rng,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
    bytes: impl Fn(f32) -> [u8; N],
) {
    scratch.resize(out.len() / N * 8, 0);
    rng.fill_bytes(scratch);
    for (weight, bits) in out.as_chunks_mut::<N>().0.iter_mut().zip(scratch.as_chunks::<8>().0) {
        *weight = bytes(normal(*bits, distribution));
    }
}

/// Fills `out` with random blocks of N bytes; `finish` then sets the fields of each block that must not be arbitrary.
fn quants<const N: usize>(rng: &mut ChaCha8Rng, out: &mut [u8], finish: impl Fn(&mut [u8; N])) {
    rng.fill_bytes(out);
    out.as_chunks_mut::<N>().0.iter_mut().for_each(finish);
}

/// Converts eight random bytes to a weight from a nearly normal distribution.
fn normal(bits: [u8; 8], distribution: Distribution) -> f32 {
    let sum: u32 = bits.as_chunks::<2>().0.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).sum();
    distribution.mean + (sum as f32 - 131_070.0) * (distribution.standard_deviation / FOUR_UNIFORM_DEVIATION)
}

/// Converts 15 random bits to a uniform random number from `min` to `max`.
fn between(bits: u16, min: f32, max: f32) -> f32 {
    min + f32::from(bits & 0x7fff) * ((max - min) / 32_768.0)
}

fn bits16(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// Completes a random `Q8_0` block: `[d: f16][q: i8; 32]`, weight `d q` with q uniform from -127 to 127 (standard
/// deviation 73.3).
fn q8_0(block: &mut [u8; 34], deviation: f32) {
    let scale = deviation / 73.3 * between(bits16(block, 0), 0.8, 1.25);
    put_f16(block, 0, scale);
    for quant in &mut block[2..] {
        // Quantisers do not use -128.
        *quant = if *quant == 0x80 { 0 } else { *quant };
    }
}

/// Writes the scale of a block with a random sign, so that weights have mean zero although the quantised integers do
/// not.
fn signed_scale(block: &mut [u8], scale: f32) {
    let bits = bits16(block, 0);
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    put_f16(block, 0, sign * scale * between(bits, 0.8, 1.25));
}

/// Writes the scale of a block, and the minimum with which the mean of the weights is zero if the mean of the quantised
/// integers is `mean`.
fn scale_and_minimum(block: &mut [u8], scale: f32, mean: f32) {
    let scale = scale * between(bits16(block, 0), 0.8, 1.25);
    put_f16(block, 0, scale);
    put_f16(block, 2, -mean * scale);
}

/// Completes a random `IQ4_XS` block: `[d: f16][upper bits of eight scales: 2][lower bits: 4][two 4-bit q a byte;
/// 128]`, weight `d (scale - 32) value[q]`. scale - 32 is one of -4..-1 and 1..4 (root mean square 2.74).
fn iq4_xs(block: &mut [u8; 136], deviation: f32) {
    let mut high = 0u16;
    for at in 0..8 {
        let byte = 4 + at / 2;
        let shift = 4 * (at % 2);
        let random = block[byte] >> shift & 7;
        let scale = 28 + random + u8::from(random >= 4);
        block[byte] = block[byte] & !(15 << shift) | (scale & 15) << shift;
        high |= u16::from(scale >> 4) << (2 * at);
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
    put_k_scale(block, 0, deviation / (67.4 * 2.74));
}

/// Completes a random `MXFP4` block: `[exponent][two 4-bit q a byte; 16]`, weight `2^(exponent - 128) value[q]`; the 16
/// values have the root mean square 5.85. The scale is one of two adjacent powers of two. The probability p of the
/// larger one gives the weights the requested variance: `(1 - p) s^2 + p (2 s)^2`, where s is the smaller one.
fn mxfp4(block: &mut [u8; 17], deviation: f32) {
    let bits = (deviation / 5.85).to_bits();
    // The ratio of the wanted scale to s, from 1 to 2.
    let ratio = f32::from_bits(bits & 0x007f_ffff | 1.0f32.to_bits());
    let larger = f32::from(block[0]) < 256.0 * (ratio * ratio - 1.0) / 3.0;
    block[0] = (bits >> 23) as u8 + 1 + u8::from(larger);
}

/// Completes a random `IQ1_S` block: `[d: f16][codebook indices: 32][scales, signs and upper bits of indices: 16]`,
/// weight `d scale (g +- 1/8)`. The scale is odd, from 1 to 15 (root mean square 9.22), and g is from the codebook
/// (root mean square of g +- 1/8: 0.781).
fn iq1_s(block: &mut [u8; 50], deviation: f32) {
    let bits = bits16(block, 0);
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    put_f16(block, 0, sign * k_scale(bits, deviation / (9.22 * 0.781)));
}

/// Completes a random `IQ1_M` block: `[codebook indices: 32][upper bits of indices, and signs: 16][four times four
/// 3-bit scales and four bits of d: 8]`, weight `d (2 scale + 1) (g +- 1/8)`. The root mean squares are those of
/// `IQ1_S`.
fn iq1_m(block: &mut [u8; 56], deviation: f32) {
    let bits = iq1_m_scale_bits(block);
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    let scale = f16::from_f32(sign * k_scale(bits, deviation / (9.22 * 0.781))).to_bits();
    for (at, [_, byte]) in block[48..].as_chunks_mut::<2>().0.iter_mut().enumerate() {
        *byte = *byte & 15 | ((scale >> (4 * at) & 15) as u8) << 4;
    }
}

/// Returns the bits of the scale of an `IQ1_M` block.
fn iq1_m_scale_bits(block: &[u8]) -> u16 {
    block[48..56].as_chunks::<2>().0.iter().rev().fold(0, |bits, [_, byte]| bits << 4 | u16::from(byte >> 4))
}

/// Completes a random block of an `IQ2` or `IQ3` format: `[d: f16]`, then codebook indices, signs and 4-bit scales,
/// weight `d factor (2 scale + 1) g`. The root mean square of 2 scale + 1 is 18.47, and `rms` is that of `factor g`
/// over the codebook.
fn sign_magnitude(block: &mut [u8], deviation: f32, rms: f32) {
    put_k_scale(block, 0, deviation / (18.47 * rms));
}

/// Returns a random factor for the integer scales of a K-quant block: 1.0 to 1.2 times the larger of `scale` and
/// [`MIN_SCALE`].
fn k_scale(bits: u16, scale: f32) -> f32 {
    scale.max(MIN_SCALE) * between(bits, 1.0, 1.2)
}

/// Writes a random factor ([`k_scale`]) into `block` at the byte offset `at`, and returns it.
fn put_k_scale(block: &mut [u8], at: usize, scale: f32) -> f32 {
    let scale = k_scale(bits16(block, at), scale);
    put_f16(block, at, scale);
    scale
}

/// Completes a random `Q2_K` block: `[4-bit scales and minima: 16][four 2-bit q a byte; 64][d: f16][dmin: f16]`, weight
/// `d scale q - dmin minimum`. Scales are from 8 to 15 (root mean square 11.7) and minima equal to them; the standard
/// deviation of q is 1.12.
fn q2_k(block: &mut [u8; 84], deviation: f32) {
    for packed in &mut block[..16] {
        let scale = 8 + (*packed & 7);
        *packed = scale | scale << 4;
    }
    let scale = put_k_scale(block, 80, deviation / (11.7 * 1.12));
    put_f16(block, 82, 1.5 * scale);
}

/// Completes a random `Q3_K` block: `[third bits: 32][four 2-bit q a byte; 64][sixteen 6-bit scales: 12][d: f16]`,
/// weight `d (scale - 32) (q - 4)`. scale - 32 has a random sign and a magnitude from 4 to 11 (root mean square 7.84);
/// the root mean square of q - 4 is 2.35.
fn q3_k(block: &mut [u8; 110], deviation: f32) {
    let random: [u8; 8] = std::array::from_fn(|at| block[96 + at]);
    block[96..108].fill(0);
    for at in 0..16 {
        let bits = random[at % 8] >> (4 * (at / 8));
        let magnitude = 4 + (bits & 7);
        let scale = if bits & 8 == 0 { 32 + magnitude } else { 32 - magnitude };
        block[96 + at % 8] |= (scale & 15) << (4 * (at / 8));
        block[104 + at % 4] |= (scale >> 4) << (2 * (at / 4));
    }
    put_k_scale(block, 108, deviation / (7.84 * 2.35));
}

/// Writes the scales of a `Q4_K` or `Q5_K` block, computed from random bytes, and the minima with which the mean of the
/// weights is zero: minimum = scale and dmin = `mean * d`, where `mean` is the mean of the quantised integers.
fn scales_and_minima(block: &mut [u8], scale: f32, mean: f32, scale_of: impl Fn(u8) -> u8) {
    let scale = put_k_scale(block, 0, scale);
    put_f16(block, 2, mean * scale);
    let scales: [u8; 8] = std::array::from_fn(|at| scale_of(block[4 + at]));
    // Eight 6-bit scales and eight equal minima are packed into 12 bytes.
    for at in 0..4 {
        let (low, high) = (scales[at], scales[at + 4]);
        let first = low | ((high >> 4) << 6);
        block[4 + at] = first;
        block[8 + at] = first;
        block[12 + at] = (high & 15) | ((high & 15) << 4);
    }
}

/// Completes a random `Q6_K` block: `[lower 4 bits of q: 128][upper 2 bits: 64][scales: i8; 16][d: f16]`, weight
/// `d scale (q - 32)`. Scales have a random sign and a magnitude from 4 to 12.
fn q6_k(block: &mut [u8; 210], deviation: f32) {
    for scale in &mut block[192..208] {
        let magnitude = (4 + ((u16::from(*scale & 0x7f) * 9) >> 7)) as i8;
        *scale = if *scale & 0x80 == 0 { magnitude } else { -magnitude } as u8;
    }
    put_k_scale(block, 208, deviation / (8.4 * 18.47));
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;
    use hearth_kernels::dequantise;

    fn filled(format: Format, deviation: f32, weights: u64) -> Vec<u8> {
        let mut out = vec![0; format.row_bytes(weights).unwrap().0 as usize];
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        let distribution = Distribution { mean: 0.0, standard_deviation: deviation };
        fill_blocks(format, distribution, &mut rng, &mut out, &mut Vec::new());
        out
    }

    fn moments(weights: &[f32]) -> (f32, f32) {
        let count = weights.len() as f64;
        let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / count;
        let variance = weights.iter().map(|&w| (f64::from(w) - mean).powi(2)).sum::<f64>() / count;
        (mean as f32, variance.sqrt() as f32)
    }

    fn decoded(format: Format, bytes: &[u8]) -> Vec<f32> {
        let mut weights = vec![0.0; bytes.len() / format.row_bytes(256).unwrap().0 as usize * 256];
        dequantise(format, bytes, &mut weights).unwrap();
        weights
    }

    #[test]
    fn weights_have_mean_zero_and_the_requested_deviation() {
        for &format in Format::ALL {
            // The factors of blocks of 256 are from 1.0 to 1.2, so their standard deviation is up to 12 % larger.
            let widest = if format.block_len() == 256 { 1.15 } else { 1.06 };
            let deviation = 1.0 / 4096f32.sqrt();
            let weights = decoded(format, &filled(format, deviation, 1 << 18));
            let (mean, found) = moments(&weights);
            assert!(mean.abs() < deviation / 50.0, "{format}: mean {mean}");
            assert!((0.98..widest).contains(&(found / deviation)), "{format}: {}", found / deviation);
        }
    }

    #[test]
    fn scales_are_normal_numbers_for_small_deviations() {
        for &format in Format::ALL.iter().filter(|format| format.block_len() == 256) {
            let block = filled(format, 1e-9, 256);
            let at = match format {
                Format::Q2K => 80,
                Format::Q3K => 108,
                Format::Q6K => 208,
                _ => 0,
            };
            let scale = match format {
                Format::Iq1M => iq1_m_scale_bits(&block),
                _ => bits16(&block, at),
            };
            let scale = f16::from_bits(scale).to_f32();
            assert!(scale.abs() >= 6.1e-5, "{format}");
        }
    }
}
