//! Which random bytes are weights of a given spread in a given format?
//!
//! A chunk is filled with random bytes at once; then the few fields of each block that may not be arbitrary (scales,
//! minima, factors) are made from the random bits that lie there. Weights have mean zero and standard deviation
//! `spread`, so that activations stay of order one whatever the width. Scales stay in the normal range of f16
//! (6.1e-5 and above). Layouts are those of ggml-common.h.
//!
//! F32 and F16 weights are sums of four uniform 16-bit numbers, close to a normal distribution and, unlike one
//! computed with logarithms, the same bits on every machine.

use half::f16;
use hearth_profiles::Format;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// The least scale: just above the smallest normal f16.
const LEAST_SCALE: f32 = 6.2e-5;

/// Standard deviation of the sum of four uniform numbers from 0 to 65535.
const FOUR_UNIFORM: f32 = 37_837.227;

/// What the weights of a tensor look like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Spread {
    /// Their mean; quantised formats have zero.
    pub mean: f32,
    /// Their standard deviation.
    pub deviation: f32,
}

/// Whether weights of this format can be made.
pub(super) fn is_supported(format: Format) -> bool {
    matches!(format, Format::F32 | Format::F16 | Format::Q8_0 | Format::Q4_0 | Format::Q4K | Format::Q6K)
}

/// Fills `out` (a whole number of blocks) with weights; `scratch` is reused between calls.
pub(super) fn fill(
    format: Format,
    spread: Spread,
    rng: &mut ChaCha8Rng,
    out: &mut [u8],
    scratch: &mut Vec<u8>,
) {
    match format {
        Format::F32 => {
            scratch.resize(out.len() * 2, 0);
            rng.fill_bytes(scratch);
            for (weight, bits) in out.as_chunks_mut::<4>().0.iter_mut().zip(scratch.as_chunks::<8>().0) {
                *weight = normal(*bits, spread).to_le_bytes();
            }
            return;
        }
        Format::F16 => {
            scratch.resize(out.len() * 4, 0);
            rng.fill_bytes(scratch);
            for (weight, bits) in out.as_chunks_mut::<2>().0.iter_mut().zip(scratch.as_chunks::<8>().0) {
                *weight = f16::from_f32(normal(*bits, spread)).to_le_bytes();
            }
            return;
        }
        _ => rng.fill_bytes(out),
    }
    let deviation = spread.deviation;
    match format {
        Format::Q8_0 => out.as_chunks_mut::<34>().0.iter_mut().for_each(|block| q8_0(block, deviation)),
        Format::Q4_0 => out.as_chunks_mut::<18>().0.iter_mut().for_each(|block| q4_0(block, deviation)),
        Format::Q4K => out.as_chunks_mut::<144>().0.iter_mut().for_each(|block| q4_k(block, deviation)),
        Format::Q6K => out.as_chunks_mut::<210>().0.iter_mut().for_each(|block| q6_k(block, deviation)),
        _ => unreachable!("formats are checked before anything is written"),
    }
}

fn normal(bits: [u8; 8], spread: Spread) -> f32 {
    let sum: u32 = bits.as_chunks::<2>().0.iter().map(|&pair| u32::from(u16::from_le_bytes(pair))).sum();
    spread.mean + (sum as f32 - 131_070.0) * (spread.deviation / FOUR_UNIFORM)
}

/// A factor from `least` to `most` made from 15 random bits.
fn between(bits: u16, least: f32, most: f32) -> f32 {
    least + f32::from(bits & 0x7fff) * ((most - least) / 32_768.0)
}

fn bits16(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

fn put_f16(block: &mut [u8], at: usize, value: f32) {
    block[at..at + 2].copy_from_slice(&f16::from_f32(value).to_le_bytes());
}

/// `[d: f16][q: i8; 32]`, q uniform from -127 to 127 (standard deviation 73.3).
fn q8_0(block: &mut [u8; 34], deviation: f32) {
    let scale = deviation / 73.3 * between(bits16(block, 0), 0.8, 1.25);
    put_f16(block, 0, scale);
    for quant in &mut block[2..] {
        // -128 is not used by quantisers.
        *quant = if *quant == 0x80 { 0 } else { *quant };
    }
}

/// `[d: f16][two 4-bit q a byte; 16]`, weight `d (q - 8)`, q uniform (standard deviation 4.61, with its mean 4.64). q
/// has the mean 7.5, so d has a random sign.
fn q4_0(block: &mut [u8; 18], deviation: f32) {
    let bits = bits16(block, 0);
    let sign = if bits & 0x8000 == 0 { 1.0 } else { -1.0 };
    put_f16(block, 0, sign * deviation / 4.64 * between(bits, 0.8, 1.25));
}

/// `[d: f16][dmin: f16][eight 6-bit scales and minima: 12 bytes][two 4-bit q a byte; 128]`, weight
/// `d scale q - dmin minimum`. With minimum = scale and dmin = 7.5 d the mean is zero.
fn q4_k(block: &mut [u8; 144], deviation: f32) {
    // Scales from 16 to 47, root mean square 33.
    let scale = (deviation / (33.0 * 4.61)).max(LEAST_SCALE) * between(bits16(block, 0), 1.0, 1.2);
    put_f16(block, 0, scale);
    put_f16(block, 2, 7.5 * scale);
    let scales: [u8; 8] = std::array::from_fn(|at| 16 + (block[4 + at] & 31));
    for at in 0..4 {
        let (low, high) = (scales[at], scales[at + 4]);
        let first = low | ((high >> 4) << 6);
        // Scales, minima (the same), and the low bits of the last four of both.
        block[4 + at] = first;
        block[8 + at] = first;
        block[12 + at] = (high & 15) | ((high & 15) << 4);
    }
}

/// `[ql: 128][qh: 64][scales: i8; 16][d: f16]`, weight `d scale (q - 32)`, scales of random sign from 4 to 12.
fn q6_k(block: &mut [u8; 210], deviation: f32) {
    for scale in &mut block[192..208] {
        let magnitude = (4 + ((u16::from(*scale & 0x7f) * 9) >> 7)) as i8;
        *scale = if *scale & 0x80 == 0 { magnitude } else { -magnitude } as u8;
    }
    let scale = (deviation / (8.4 * 18.47)).max(LEAST_SCALE) * between(bits16(block, 208), 1.0, 1.2);
    put_f16(block, 208, scale);
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    fn filled(format: Format, deviation: f32, weights: u64) -> Vec<u8> {
        let mut out = vec![0; format.row_bytes(weights).unwrap().0 as usize];
        let mut rng = ChaCha8Rng::seed_from_u64(7);
        fill(format, Spread { mean: 0.0, deviation }, &mut rng, &mut out, &mut Vec::new());
        out
    }

    /// Mean and standard deviation.
    fn moments(weights: &[f32]) -> (f32, f32) {
        let count = weights.len() as f64;
        let mean = weights.iter().map(|&w| f64::from(w)).sum::<f64>() / count;
        let variance = weights.iter().map(|&w| (f64::from(w) - mean).powi(2)).sum::<f64>() / count;
        (mean as f32, variance.sqrt() as f32)
    }

    fn f16_at(block: &[u8], at: usize) -> f32 {
        f16::from_bits(bits16(block, at)).to_f32()
    }

    /// Weights of a chunk, decoded after the comments of ggml-common.h, slowly.
    fn decoded(format: Format, bytes: &[u8]) -> Vec<f32> {
        let mut weights = Vec::new();
        for block in bytes.chunks_exact(format.block_bytes() as usize) {
            match format {
                Format::F32 => weights.push(f32::from_le_bytes(block.try_into().unwrap())),
                Format::F16 => weights.push(f16_at(block, 0)),
                Format::Q8_0 => {
                    weights.extend(block[2..].iter().map(|&q| f16_at(block, 0) * f32::from(q as i8)));
                }
                Format::Q4_0 => weights.extend(
                    block[2..]
                        .iter()
                        .flat_map(|&q| [q & 15, q >> 4])
                        .map(|q| f16_at(block, 0) * (f32::from(q) - 8.0)),
                ),
                Format::Q4K => q4_k_weights(block, &mut weights),
                Format::Q6K => {
                    for at in 0..256 {
                        let (half, quarter, lane) = (at / 128, at % 128 / 32, at % 32);
                        let low = block[64 * half + 32 * (quarter % 2) + lane] >> (4 * (quarter / 2)) & 15;
                        let high = block[128 + 32 * half + lane] >> (2 * quarter) & 3;
                        let scale = f32::from(block[192 + at / 16] as i8);
                        weights.push(f16_at(block, 208) * scale * (f32::from(low | high << 4) - 32.0));
                    }
                }
                _ => unreachable!(),
            }
        }
        weights
    }

    fn q4_k_weights(block: &[u8], weights: &mut Vec<f32>) {
        for at in 0..256 {
            let sub = at / 32;
            let (scale, minimum) = if sub < 4 {
                (block[4 + sub] & 63, block[8 + sub] & 63)
            } else {
                let last = block[8 + sub];
                (last & 15 | block[sub] >> 6 << 4, last >> 4 | block[4 + sub] >> 6 << 4)
            };
            let q = block[16 + 32 * (sub / 2) + at % 32] >> (4 * (sub % 2)) & 15;
            weights.push(
                f16_at(block, 0) * f32::from(scale) * f32::from(q) - f16_at(block, 2) * f32::from(minimum),
            );
        }
    }

    #[test]
    fn weights_have_mean_zero_and_the_spread_asked_for() {
        // K-quant factors lie from 1.0 to 1.2, so their spread is up to 12 % wider.
        for (format, widest) in [
            (Format::F32, 1.02),
            (Format::F16, 1.02),
            (Format::Q8_0, 1.06),
            (Format::Q4_0, 1.06),
            (Format::Q4K, 1.15),
            (Format::Q6K, 1.15),
        ] {
            let deviation = 1.0 / 4096f32.sqrt();
            let weights = decoded(format, &filled(format, deviation, 1 << 18));
            let (mean, found) = moments(&weights);
            assert!(mean.abs() < deviation / 50.0, "{format}: mean {mean}");
            assert!((0.98..widest).contains(&(found / deviation)), "{format}: {}", found / deviation);
        }
    }

    #[test]
    fn scales_are_normal_numbers_however_small_the_spread() {
        let block = filled(Format::Q4K, 1e-9, 256);
        assert!(f16_at(&block, 0) >= 6.1e-5);
        let block = filled(Format::Q6K, 1e-9, 256);
        assert!(f16_at(&block, 208) >= 6.1e-5);
    }
}
