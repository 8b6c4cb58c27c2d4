//! Tests that a GGUF header that was written is read without a change.

use hearth_profiles::Format;
use hearth_profiles::gguf::{Array, GgufHeader, HeaderWriter, Value};
use proptest::prelude::*;

/// Generates a metadata value of any type, with arrays nested up to the limit of the reader.
fn value() -> impl Strategy<Value = Value> {
    let text = || "\\PC{0,12}";
    let flat = prop_oneof![
        prop::collection::vec(any::<i8>(), 0..9).prop_map(Array::I8),
        prop::collection::vec(any::<u16>(), 0..9).prop_map(Array::U16),
        prop::collection::vec(any::<i32>(), 0..9).prop_map(Array::I32),
        prop::collection::vec(-1e9f32..1e9, 0..9).prop_map(Array::F32),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(Array::Bool),
        prop::collection::vec(text(), 0..9).prop_map(Array::Str),
        prop::collection::vec(any::<u64>(), 0..9).prop_map(Array::U64),
    ];
    let array =
        flat.prop_recursive(3, 16, 4, |inner| prop::collection::vec(inner, 0..4).prop_map(Array::Array));
    prop_oneof![
        any::<u8>().prop_map(Value::U8),
        any::<i16>().prop_map(Value::I16),
        any::<u32>().prop_map(Value::U32),
        any::<i64>().prop_map(Value::I64),
        (-1e300f64..1e300).prop_map(Value::F64),
        any::<bool>().prop_map(Value::Bool),
        text().prop_map(Value::Str),
        array.prop_map(Value::Array),
    ]
}

proptest! {
    #[test]
    fn written_header_round_trips(
        keys in prop::collection::btree_map("[a-z.]{1,20}", value(), 0..8),
        tensors in prop::collection::btree_map("[a-z.0-9]{1,64}", (prop::collection::vec(1u64..9, 1..5), 0usize..16), 0..8),
    ) {
        let mut writer = HeaderWriter::default();
        for (key, value) in &keys {
            writer.add_key(key, value.clone()).unwrap();
        }
        for (name, (dims, format)) in &tensors {
            let format = Format::ALL[*format % Format::ALL.len()];
            let mut dims = dims.clone();
            dims[0] *= format.block_len();
            writer.add_tensor(name, &dims, format).unwrap();
        }
        let tensors = writer.clone().finish().tensors;
        let header = GgufHeader::from_bytes(&crate::file(writer)).expect("what was written is valid");
        prop_assert_eq!(header.tensors, tensors);
        let read: Vec<_> = header.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        prop_assert_eq!(read, keys.into_iter().collect::<Vec<_>>());
    }
}
