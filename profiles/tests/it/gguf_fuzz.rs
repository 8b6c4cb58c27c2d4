//! Tests that the GGUF reader never panics or hangs, and that its memory use is proportional to the file size.
//!
//! Run a million cases with `PROPTEST_CASES=1000000 cargo test --release -p hearth-profiles --test it gguf_fuzz`.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use hearth_profiles::gguf::{Array, GgufHeader, GgufModel, HeaderWriter, Value};
use hearth_profiles::model::{ModelDocument, ModelProfile, Quant, layout};
use hearth_profiles::{Document, Format};
use proptest::prelude::*;

/// The system allocator, which also records the largest allocation of each thread.
struct RecordingAllocator;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call is passed on unchanged to the system's allocator; the thread-local needs no allocation and
// has no destructor.
unsafe impl GlobalAlloc for RecordingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(layout.size())));
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: `at` came from `System` through `alloc` or `realloc`.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.with(|largest| largest.set(largest.get().max(size)));
        // SAFETY: `at` came from `System`, and the caller upholds the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: RecordingAllocator = RecordingAllocator;

/// Reads a header, and checks the tensors of the header and the largest memory allocation of the reader.
fn read(file: &[u8]) -> Option<GgufHeader> {
    LARGEST.with(|largest| largest.set(0));
    let header = GgufHeader::from_bytes(file).ok();
    let largest = LARGEST.with(Cell::get);
    // Memory for 4096 elements is reserved unconditionally. The rest is proportional to the file: at most 32 bytes of
    // memory for 8 bytes of the file, doubled by growing vectors.
    let allowed = 4096 * size_of::<hearth_profiles::gguf::TensorInfo>() + 8 * file.len();
    assert!(largest <= allowed, "one request for {largest} bytes for a file of {}", file.len());
    for tensor in header.iter().flat_map(|header| &header.tensors) {
        assert!(tensor.end_offset() <= file.len() as u64);
        assert_eq!(tensor.format.row_bytes(tensor.element_count()), Some(tensor.bytes));
    }
    header
}

/// Computes the shape and the profile of a valid header, to check that computing them never panics.
fn interpret(header: Option<GgufHeader>) -> Option<ModelProfile> {
    let header = header?;
    let model = GgufModel { metadata: header.metadata, tensors: header.tensors, ..GgufModel::default() };
    let _ = model.shape();
    let _ = model.metadata.get_i32_array("tokenizer.ggml.token_type");
    ModelProfile::from_gguf(&model).ok()
}

/// Returns the file of a model with 2 layers and keys of many value types, and the size of the file's header.
fn valid_model() -> (Vec<u8>, usize) {
    let document = "schema: model/1\nname: m\nsource: t\narchitecture: llama\nlayers: 2 layers\nembedding: 32\n\
        feed_forward: 64\nheads: 2\nkv_heads: 1\nvocabulary: 4\ntied_embeddings: true\ncontext_length: 64\n\
        quant: q8_0\n";
    let shape = ModelDocument::from_yaml(document).unwrap().to_shape();
    let mut writer = HeaderWriter::default();
    let mut key = |name: &str, value| assert!(writer.add_key(name, value).is_ok());
    key("general.architecture", Value::Str("llama".into()));
    for (name, value) in [
        ("block_count", 2),
        ("embedding_length", 32),
        ("feed_forward_length", 64),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("context_length", 64),
    ] {
        key(&format!("llama.{name}"), Value::U32(value));
    }
    let tokens = ["<unk>", "<s>", "</s>", "\u{2581}a"].map(str::to_owned).to_vec();
    key("tokenizer.ggml.tokens", Value::Array(Array::Str(tokens)));
    key("tokenizer.ggml.scores", Value::Array(Array::F32(vec![0.0, -1.0, -2.0, -3.0])));
    key("tokenizer.ggml.token_type", Value::Array(Array::I32(vec![2, 3, 3, 1])));
    key("scalars.wide", Value::U64(1 << 40));
    key("scalars.double", Value::F64(0.5));
    key("scalars.flag", Value::Bool(true));
    key("nested", Value::Array(Array::Array(vec![Array::U8(vec![1, 2]), Array::Bool(vec![false])])));
    for tensor in layout::tensor_specs(&shape) {
        let format = Quant::Pure(Format::Q8_0).tensor_format(&tensor, &shape).unwrap();
        writer.add_tensor(&tensor.name, &tensor.dims, format).unwrap();
    }
    let layout = writer.finish();
    let header = layout.header.len();
    let mut file = layout.header;
    file.resize(layout.file_bytes as usize, 0x5a);
    (file, header)
}

/// A change to a byte range of a file: a flipped bit, other bytes, or a repetition of the range.
#[derive(Debug, Clone)]
enum Change {
    Flip(u8),
    Put(Vec<u8>),
    Repeat,
}

/// Generates 64-bit numbers that cause overflow in unchecked arithmetic.
fn hostile64() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0u32..64).prop_map(|shift| 1 << shift),
        (0u32..64).prop_map(|shift| (1 << shift) - 1),
        (0u64..64).prop_map(|less| u64::MAX - less),
        0u64..5000,
        any::<u64>(),
    ]
}

fn put(bytes: &[u8]) -> (usize, Change) {
    (bytes.len(), Change::Put(bytes.to_vec()))
}

/// Generates an offset in a file, a number of bytes after the offset, and the change of these bytes.
fn damage(length: usize) -> impl Strategy<Value = (usize, (usize, Change))> {
    let change = prop_oneof![
        4 => (0u8..8).prop_map(|bit| (1, Change::Flip(bit))),
        2 => any::<u8>().prop_map(|value| put(&[value])),
        3 => hostile64().prop_map(|value| put(&(value as u32).to_le_bytes())),
        4 => hostile64().prop_map(|value| put(&value.to_le_bytes())),
        1 => Just((usize::MAX, Change::Put(vec![]))),
        1 => (1usize..64).prop_map(|count| (count, Change::Put(vec![]))),
        1 => prop::collection::vec(any::<u8>(), 1..32).prop_map(|bytes| (0, Change::Put(bytes))),
        1 => (1usize..128).prop_map(|count| (count, Change::Repeat)),
    ];
    (0..length, change)
}

fn apply((at, (count, change)): (usize, (usize, Change)), file: &mut Vec<u8>) {
    let range = at.min(file.len())..at.saturating_add(count).min(file.len());
    let old = &file[range.clone()];
    let new = match change {
        Change::Flip(bit) => old.iter().map(|byte| byte ^ (1 << bit)).collect(),
        Change::Put(bytes) => bytes,
        Change::Repeat => old.repeat(2),
    };
    file.splice(range, new);
}

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
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..512)) {
        prop_assert!(read(&bytes).is_none());
    }

    #[test]
    fn random_bytes_after_a_valid_start_never_panic(
        version in 2u32..4,
        tensors in 0u64..4,
        keys in 0u64..4,
        bytes in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => 0u8..14, 1 => any::<u8>()], 0..512),
    ) {
        let mut file = b"GGUF".to_vec();
        file.extend(version.to_le_bytes());
        file.extend(tensors.to_le_bytes());
        file.extend(keys.to_le_bytes());
        file.extend(bytes);
        interpret(read(&file));
    }

    #[test]
    fn damaged_model_never_panics(damages in prop::collection::vec(damage(valid_model().1), 1..5)) {
        let mut file = valid_model().0;
        for damage in damages {
            apply(damage, &mut file);
        }
        interpret(read(&file));
    }

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
        let header = read(&crate::file(writer)).expect("what was written is valid");
        prop_assert_eq!(header.tensors, tensors);
        let read: Vec<_> = header.metadata.iter().map(|(key, value)| (key.to_owned(), value.clone())).collect();
        prop_assert_eq!(read, keys.into_iter().collect::<Vec<_>>());
    }
}

#[test]
fn valid_model_has_a_profile() {
    assert_eq!(interpret(read(&valid_model().0)).unwrap().quant, "q8_0");
}
