//! The encoding of activations, in f32 or f16.
//!
//! With `activations: f16` in the plan every device rounds them to f16, to nearest and to even, after the embedding and
//! after every layer, whether another device follows or not. So the numbers do not depend on the windows, and a ring
//! that continues with another plan gives the same tokens. A number too large for f16 stays as it is: an infinity would
//! make all that follows not a number, and a cut to 65504 would silently be another number.
//!
//! Rounded numbers are sent in two bytes each, which loses nothing. Activations with a number that f16 cannot hold are
//! sent in four; the frame says which.
//!
//! Not here: who may send what ([`super::OpenEpoch`]).

use half::f16;
use half::slice::HalfFloatSliceExt;

/// Numbers that are converted at once.
const CHUNK: usize = 512;

/// A chunk of numbers in f16, and what these are in f32.
struct Converted {
    halves: [f16; CHUNK],
    wide: [f32; CHUNK],
}

impl Converted {
    const EMPTY: Self = Self { halves: [f16::ZERO; CHUNK], wide: [0.0; CHUNK] };

    fn of(&mut self, chunk: &[f32]) -> (&[f16], &[f32]) {
        let (halves, wide) = (&mut self.halves[..chunk.len()], &mut self.wide[..chunk.len()]);
        halves.convert_from_f32_slice(chunk);
        halves.convert_to_f32_slice(wide);
        (halves, wide)
    }
}

/// Rounds what f16 can hold to f16, and leaves the rest.
pub fn round(numbers: &mut [f32]) {
    let mut converted = Converted::EMPTY;
    for chunk in numbers.chunks_mut(CHUNK) {
        let (_, wide) = converted.of(chunk);
        for (number, &rounded) in chunk.iter_mut().zip(wide) {
            if rounded.is_finite() {
                *number = rounded;
            }
        }
    }
}

/// Encodes activations as little-endian bytes, in f16 if requested and lossless. Returns whether f16 was used.
pub fn encode(numbers: &[f32], in_half: bool) -> (Vec<u8>, bool) {
    if in_half && let Some(bytes) = halved(numbers) {
        return (bytes, true);
    }
    (bytemuck::cast_slice(numbers).to_vec(), false)
}

fn halved(numbers: &[f32]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(numbers.len() * size_of::<f16>());
    let mut converted = Converted::EMPTY;
    for chunk in numbers.chunks(CHUNK) {
        let (halves, wide) = converted.of(chunk);
        if chunk.iter().zip(wide).any(|(number, back)| number.to_bits() != back.to_bits()) {
            return None;
        }
        bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    }
    Some(bytes)
}

/// Returns the numbers in these bytes, `None` if there are not exactly `count` of them.
pub fn decode(bytes: &[u8], in_half: bool, count: usize) -> Option<Vec<f32>> {
    if bytes.len() != count * if in_half { size_of::<f16>() } else { size_of::<f32>() } {
        return None;
    }
    if !in_half {
        return Some(bytemuck::pod_collect_to_vec(bytes));
    }
    let mut numbers = vec![0.0; count];
    let mut halves = [f16::ZERO; CHUNK];
    for (numbers, bytes) in numbers.chunks_mut(CHUNK).zip(bytes.chunks(CHUNK * size_of::<f16>())) {
        let halves = &mut halves[..numbers.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(numbers);
    }
    Some(numbers)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rounded(number: f32) -> f32 {
        let mut numbers = [number];
        round(&mut numbers);
        numbers[0]
    }

    #[test]
    fn rounds_to_nearest_even() {
        // f16 has ten bits after the point: 2^-10 is the last of 1, and halves of it are ties.
        let last = 2f32.powi(-10);
        assert_eq!(rounded(1.0 + last / 2.0), 1.0);
        assert_eq!(rounded(1.0 + last * 1.5), 1.0 + 2.0 * last);
        assert_eq!(rounded(1.0 + last * 0.51), 1.0 + last);
        // The smallest there is, half of it, and a little more.
        let least = 2f32.powi(-24);
        assert_eq!((rounded(least), rounded(least / 2.0), rounded(least * 0.51)), (least, 0.0, least));
        assert_eq!(rounded(-0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn numbers_beyond_f16_are_sent_as_f32() {
        assert_eq!(rounded(65_519.0), 65_504.0);
        for large in [65_520.0, -70_000.0, 1e30] {
            assert_eq!(rounded(large), large);
            let numbers = [1.0, large, 2.0];
            let (bytes, in_half) = encode(&numbers, true);
            assert!(!in_half && bytes.len() == 12);
            assert_eq!(decode(&bytes, in_half, 3).unwrap(), numbers);
        }
        assert!(rounded(f32::NAN).is_nan() && rounded(f32::INFINITY).is_infinite());
        let (bytes, in_half) = encode(&[f32::INFINITY, 1.0], true);
        assert!(in_half && decode(&bytes, true, 2).unwrap() == [f32::INFINITY, 1.0]);
    }

    #[test]
    fn wrong_length_is_refused() {
        assert!(decode(&[0; 8], true, 2).is_none() && decode(&[0; 8], false, 4).is_none());
        assert!(decode(&[0; 8], true, 4).is_some() && decode(&[0; 8], false, 2).is_some());
    }

    proptest! {
        #[test]
        fn rounded_numbers_round_trip(
            bits in proptest::collection::vec(any::<u32>(), 0..1200),
            scale in prop_oneof![Just(1.0f32), Just(1e-6), Just(1e4)],
            plain in any::<bool>(),
        ) {
            // Any bits there are, or numbers of a size that activations have.
            let number = |&bits: &u32| if plain { f32::from_bits(bits) } else { bits as i32 as f32 / 2e9 * scale };
            let mut numbers: Vec<f32> = bits.iter().map(number).collect();
            let before = numbers.clone();
            round(&mut numbers);
            for (&before, &after) in before.iter().zip(&numbers) {
                // One by one, as the crate `half` has it without the processor's help.
                let alone = f16::from_f32_const(before);
                let wanted = if alone.is_finite() { alone.to_f32_const() } else { before };
                prop_assert!(after.to_bits() == wanted.to_bits() || before.is_nan() && after.is_nan());
            }
            let (bytes, in_half) = encode(&numbers, true);
            prop_assert_eq!(bytes.len(), numbers.len() * if in_half { 2 } else { 4 });
            let back = decode(&bytes, in_half, numbers.len()).unwrap();
            let same = back.iter().zip(&numbers).all(|(back, number)| back.to_bits() == number.to_bits());
            prop_assert!(same);
            let held = numbers.iter().all(|number| number.abs() <= 65_504.0);
            prop_assert!(in_half || !held, "what f16 holds is sent in it");
        }
    }
}
