//! The encoding of activations, in f32 or f16.
//!
//! With `activations: f16` in the plan, every device rounds activations to f16 (to nearest, ties to even) after the
//! embedding and after every layer, whether they are sent to another device or not. So the values do not depend on the
//! windows, and a ring that continues with another plan gives the same tokens. A value that is too large for f16 is
//! not rounded: an infinity would turn all later values into NaN. Rounded values are sent without loss as f16; with a
//! value that is too large, the activations are sent as f32.

use half::f16;
use half::slice::HalfFloatSliceExt;

const CHUNK: usize = 512;

/// A chunk of values rounded to f16, and the rounded values in f32.
struct Converted {
    halves: [f16; CHUNK],
    wide: [f32; CHUNK],
}

impl Converted {
    const EMPTY: Self = Self { halves: [f16::ZERO; CHUNK], wide: [0.0; CHUNK] };

    fn convert(&mut self, chunk: &[f32]) -> (&[f16], &[f32]) {
        let (halves, wide) = (&mut self.halves[..chunk.len()], &mut self.wide[..chunk.len()]);
        halves.convert_from_f32_slice(chunk);
        halves.convert_to_f32_slice(wide);
        (halves, wide)
    }
}

/// Rounds each value to the nearest f16 value. Leaves values that are too large for f16 unchanged.
pub fn round_to_f16(values: &mut [f32]) {
    let mut converted = Converted::EMPTY;
    for chunk in values.chunks_mut(CHUNK) {
        let (_, wide) = converted.convert(chunk);
        for (value, &rounded) in chunk.iter_mut().zip(wide) {
            if rounded.is_finite() {
                *value = rounded;
            }
        }
    }
}

/// Encodes activations as little-endian bytes: as f16 if `prefer_f16` is set and f16 is lossless, otherwise as f32.
/// Returns the bytes, and whether they are f16.
pub fn encode(values: &[f32], prefer_f16: bool) -> (Vec<u8>, bool) {
    if prefer_f16 && let Some(bytes) = encode_f16(values) {
        return (bytes, true);
    }
    (bytemuck::cast_slice(values).to_vec(), false)
}

fn encode_f16(values: &[f32]) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(values.len() * size_of::<f16>());
    let mut converted = Converted::EMPTY;
    for chunk in values.chunks(CHUNK) {
        let (halves, wide) = converted.convert(chunk);
        if chunk.iter().zip(wide).any(|(value, back)| value.to_bits() != back.to_bits()) {
            return None;
        }
        bytes.extend(halves.iter().flat_map(|half| half.to_le_bytes()));
    }
    Some(bytes)
}

/// Decodes `count` activations from little-endian f16 or f32. Returns `None` if the number of bytes does not match.
pub fn decode(bytes: &[u8], is_f16: bool, count: usize) -> Option<Vec<f32>> {
    if bytes.len() != count * if is_f16 { size_of::<f16>() } else { size_of::<f32>() } {
        return None;
    }
    if !is_f16 {
        return Some(bytemuck::pod_collect_to_vec(bytes));
    }
    let mut values = vec![0.0; count];
    let mut halves = [f16::ZERO; CHUNK];
    for (values, bytes) in values.chunks_mut(CHUNK).zip(bytes.chunks(CHUNK * size_of::<f16>())) {
        let halves = &mut halves[..values.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.as_chunks::<2>().0) {
            *half = f16::from_le_bytes(*bytes);
        }
        halves.convert_to_f32_slice(values);
    }
    Some(values)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn rounded(value: f32) -> f32 {
        let mut values = [value];
        round_to_f16(&mut values);
        values[0]
    }

    #[test]
    fn rounds_to_nearest_even() {
        // f16 has ten fraction bits: 2^-10 is the distance from 1 to the next value, and half of it is a tie.
        let last = 2f32.powi(-10);
        assert_eq!(rounded(1.0 + last / 2.0), 1.0);
        assert_eq!(rounded(1.0 + last * 1.5), 1.0 + 2.0 * last);
        assert_eq!(rounded(1.0 + last * 0.51), 1.0 + last);
        // The smallest positive value, half of it, and a little more than half.
        let min_positive = 2f32.powi(-24);
        let expected = (min_positive, 0.0, min_positive);
        let own = (rounded(min_positive), rounded(min_positive / 2.0), rounded(min_positive * 0.51));
        assert_eq!(own, expected);
        assert_eq!(rounded(-0.0).to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn values_beyond_f16_are_sent_as_f32() {
        assert_eq!(rounded(65_519.0), 65_504.0);
        for large in [65_520.0, -70_000.0, 1e30] {
            assert_eq!(rounded(large), large);
            let values = [1.0, large, 2.0];
            let (bytes, is_f16) = encode(&values, true);
            assert!(!is_f16 && bytes.len() == 12);
            assert_eq!(decode(&bytes, is_f16, 3).unwrap(), values);
        }
        assert!(rounded(f32::NAN).is_nan() && rounded(f32::INFINITY).is_infinite());
        let (bytes, is_f16) = encode(&[f32::INFINITY, 1.0], true);
        assert!(is_f16 && decode(&bytes, true, 2).unwrap() == [f32::INFINITY, 1.0]);
    }

    #[test]
    fn wrong_length_is_rejected() {
        assert!(decode(&[0; 8], true, 2).is_none() && decode(&[0; 8], false, 4).is_none());
        assert!(decode(&[0; 8], true, 4).is_some() && decode(&[0; 8], false, 2).is_some());
    }

    proptest! {
        #[test]
        fn rounded_values_round_trip(
            bits in proptest::collection::vec(any::<u32>(), 0..1200),
            scale in prop_oneof![Just(1.0f32), Just(1e-6), Just(1e4)],
            plain in any::<bool>(),
        ) {
            // Any bits, or values of the common sizes of activations.
            let value = |&bits: &u32| if plain { f32::from_bits(bits) } else { bits as i32 as f32 / 2e9 * scale };
            let mut values: Vec<f32> = bits.iter().map(value).collect();
            let before = values.clone();
            round_to_f16(&mut values);
            for (&before, &after) in before.iter().zip(&values) {
                // Each value is compared with the software conversion of the crate `half`.
                let alone = f16::from_f32_const(before);
                let wanted = if alone.is_finite() { alone.to_f32_const() } else { before };
                prop_assert!(after.to_bits() == wanted.to_bits() || before.is_nan() && after.is_nan());
            }
            let (bytes, is_f16) = encode(&values, true);
            prop_assert_eq!(bytes.len(), values.len() * if is_f16 { 2 } else { 4 });
            let back = decode(&bytes, is_f16, values.len()).unwrap();
            let same = back.iter().zip(&values).all(|(back, value)| back.to_bits() == value.to_bits());
            prop_assert!(same);
            let fits = values.iter().all(|value| value.abs() <= 65_504.0);
            prop_assert!(is_f16 || !fits, "values that fit f16 are sent as f16");
        }
    }
}
