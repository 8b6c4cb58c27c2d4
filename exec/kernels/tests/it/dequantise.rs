//! Tests of dequantisation against the reference Python package `gguf`.
//!
//! `tests/data/make_vectors.py` wrote the data: blocks as stored (`*.blocks`), and their expected f32 values (`*.f32`).

use std::path::PathBuf;

use hearth_kernels::dequantise;
use hearth_profiles::Format;

fn data(file: String) -> Vec<u8> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(file);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn dequantisation_equals_the_reference_bit_for_bit() {
    for format in Format::ALL {
        let blocks = data(format!("{format}.blocks"));
        let words = data(format!("{format}.f32"));
        let wanted: Vec<u32> = words.as_chunks().0.iter().map(|word| u32::from_le_bytes(*word)).collect();
        let mut values = vec![0.0f32; wanted.len()];
        dequantise(*format, &blocks, &mut values).unwrap();
        let found: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
        assert!(!wanted.is_empty());
        assert_eq!(found, wanted, "{format}");
    }
}

#[test]
fn a_row_of_the_wrong_length_is_rejected() {
    let error = dequantise(Format::Q4K, &[0; 144], &mut [0.0; 512]).unwrap_err();
    assert_eq!(error.to_string(), "a row of 512 q4_k weights cannot have 144 bytes");
    dequantise(Format::Q8_0, &[0; 34], &mut [0.0; 31]).unwrap_err();
}

#[test]
fn the_codebook_of_iq1_s_equals_the_reference() {
    // The file has one integer for each row of the codebook: the sum of (weight + 1) 3^position.
    let wanted: Vec<u16> =
        data("iq1_s.book".into()).as_chunks::<2>().0.iter().map(|bytes| u16::from_le_bytes(*bytes)).collect();
    assert_eq!(wanted.len(), 2048);
    for (row, &wanted) in wanted.iter().enumerate() {
        // A block with the f16 scale 1 and codebook index `row` for its first eight weights. All other bits are zero,
        // so the sub-block scale is 1 and the shift +1/8.
        let mut block = [0u8; 50];
        block[..2].copy_from_slice(&0x3c00u16.to_le_bytes());
        block[2] = row as u8;
        block[34] = (row >> 8) as u8;
        let mut weights = [0.0f32; 256];
        dequantise(Format::Iq1S, &block, &mut weights).unwrap();
        let digits = weights[..8].iter().rev();
        let found = digits.fold(0, |number, weight| number * 3 + (weight - 0.125 + 1.0) as u16);
        assert_eq!(found, wanted, "row {row}");
    }
}

#[test]
fn the_codebooks_of_magnitudes_equal_the_reference() {
    let rows = [
        (Format::Iq2Xxs, 256 * 8),
        (Format::Iq2Xs, 512 * 8),
        (Format::Iq2S, 1024 * 8),
        (Format::Iq3Xxs, 256 * 4),
        (Format::Iq3S, 512 * 4),
    ];
    for (format, length) in rows {
        // The blocks have every codebook index in ascending order, and positive weights with the factor 1.
        let mut weights = vec![0.0f32; length];
        dequantise(format, &data(format!("{format}.codebook.blocks")), &mut weights).unwrap();
        let wanted = data(format!("{format}.codebook.i8"));
        assert_eq!(wanted.len(), length, "{format}");
        for (index, (&found, &wanted)) in weights.iter().zip(&wanted).enumerate() {
            assert_eq!(found, f32::from(wanted), "{format}, magnitude {index}");
        }
    }
}
