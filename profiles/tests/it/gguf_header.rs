//! Tests of errors in GGUF headers, and of split models.

use std::path::{Path, PathBuf};

use hearth_profiles::Format;
use hearth_profiles::gguf::{
    Array, GgufError, GgufHeader, GgufModel, HeaderError, HeaderWriter, Value, split_suffix,
};

use crate::file;

fn two_tensors() -> Vec<u8> {
    let mut writer = HeaderWriter::default();
    writer.add_key("general.architecture", Value::Str("llama".into())).unwrap();
    writer.add_key("answer", Value::U32(42)).unwrap();
    writer.add_tensor("first", &[64, 2], Format::Q8_0).unwrap();
    writer.add_tensor("second", &[32], Format::F32).unwrap();
    file(writer)
}

fn position(file: &[u8], needle: &[u8]) -> usize {
    file.windows(needle.len()).position(|window| window == needle).unwrap()
}

fn put(file: &mut [u8], at: usize, bytes: &[u8]) {
    file[at..at + bytes.len()].copy_from_slice(bytes);
}

fn error(file: &[u8]) -> HeaderError {
    GgufHeader::from_bytes(file).unwrap_err()
}

/// Replaces bytes of the file with two tensors at offset `at`, and checks the beginning of the error's debug text.
fn check(at: usize, bytes: &[u8], expected: &str) {
    let mut file = two_tensors();
    put(&mut file, at, bytes);
    let error = format!("{:?}", error(&file));
    assert!(error.starts_with(expected), "{bytes:?} at {at}: {error}, not {expected}");
}

#[test]
fn valid_header_is_read() {
    let header = GgufHeader::from_bytes(&two_tensors()).unwrap();
    assert_eq!(header.version, 3);
    assert_eq!(header.metadata.get_u32("answer").unwrap(), Some(42));
    assert_eq!((header.tensors[0].row_count(), header.tensors[0].element_count()), (2, 128));
    let mut second = two_tensors();
    second[4] = 2;
    let second = GgufHeader::from_bytes(&second).unwrap();
    assert_eq!(second.tensors, header.tensors, "version 2 has the same layout");
}

#[test]
fn invalid_numbers_and_keys_are_refused() {
    check(0, b"<htm", "Magic");
    check(4, &3u32.to_be_bytes(), "BigEndian");
    for version in [0u32, 1, 4, u32::MAX] {
        check(4, &version.to_le_bytes(), "Version");
    }
    let key = position(&two_tensors(), b"answer");
    // The numbers of tensors and of keys, and the length of a key: rejected before memory is allocated.
    for at in [8, 16, key - 8] {
        check(at, &(1u64 << 60).to_le_bytes(), "TooLarge");
        check(at, &60_000u64.to_le_bytes(), "Truncated");
    }
    check(key + 6, &13u32.to_le_bytes(), "UnknownValueType { key: \"answer\", type_number: 13 }");
    // The number 42 is read as a boolean.
    check(key + 6, &7u32.to_le_bytes(), "Boolean { key: \"answer\", found: 42 }");
    check(key, &[0xff], "NotUtf8");
}

#[test]
fn array_nesting_is_limited() {
    let nested = |depth: u32| {
        let mut array = Array::U8(vec![7]);
        for _ in 1..depth {
            array = Array::Array(vec![array]);
        }
        let mut writer = HeaderWriter::default();
        writer.add_key("deep", Value::Array(array)).unwrap();
        GgufHeader::from_bytes(&writer.finish().header)
    };
    assert!(nested(4).is_ok());
    assert!(matches!(nested(5), Err(HeaderError::TooDeep { .. })));
}

#[test]
fn duplicate_keys_and_tensors_are_refused() {
    let mut writer = HeaderWriter::default();
    writer.add_key("a.b", Value::U8(1)).unwrap().add_key("a.c", Value::U8(1)).unwrap();
    writer.add_tensor("t.a", &[1], Format::F32).unwrap().add_tensor("t.b", &[1], Format::F32).unwrap();
    let mut wrong = file(writer);
    let (key, tensor) = (position(&wrong, b"a.c"), position(&wrong, b"t.b"));
    put(&mut wrong, tensor, b"t.a");
    assert!(matches!(error(&wrong), HeaderError::DuplicateTensor { .. }));
    put(&mut wrong, key, b"a.b");
    assert!(matches!(error(&wrong), HeaderError::DuplicateKey { .. }));
}

#[test]
fn invalid_tensors_are_refused() {
    // After the name: number of dimensions (4), two dimensions (16), type (4), offset (8).
    let first = position(&two_tensors(), b"first") + 5;
    let second = position(&two_tensors(), b"second") + 6;
    check(first, &0u32.to_le_bytes(), "Dimensions");
    check(first, &5u32.to_le_bytes(), "Dimensions");
    for (number, expected) in [(0u64, "Dimensions"), (33, "PartialBlock { tensor: \"first\", row: 33,")] {
        check(first + 4, &number.to_le_bytes(), expected);
    }
    // 3 rows of 68 bytes end at 204, the second tensor starts at 160.
    for (number, expected) in [(u64::MAX, "Overflow"), (1000, "PastEnd"), (3, "Overlap")] {
        check(first + 12, &number.to_le_bytes(), expected);
    }
    check(first + 20, &99u32.to_le_bytes(), "UnknownTensorType { tensor: \"first\", type_number: 99 }");
    let unknown = HeaderError::UnknownTensorType { tensor: "first".into(), type_number: 99 };
    assert!(unknown.to_string().starts_with("tensor `first` has type number 99, which is not supported"));
    // The second tensor: one dimension (8).
    for (number, expected) in
        [(7u64, "Misaligned"), (96, "Overlap"), (1 << 40, "PastEnd"), (u64::MAX - 31, "PastEnd")]
    {
        check(second + 16, &number.to_le_bytes(), expected);
    }
}

#[test]
fn alignment_is_a_power_of_two_in_range() {
    // The writer rejects `general.alignment`, so a key of equal length is renamed in the file.
    let with = |alignment: u32| {
        let mut writer = HeaderWriter::default();
        writer.add_key("general.alignmenx", Value::U32(alignment)).unwrap();
        writer.add_tensor("t", &[8], Format::F32).unwrap();
        let layout = writer.finish();
        let mut file = layout.header;
        let at = position(&file, b"general.alignmenx");
        put(&mut file, at, b"general.alignment");
        file.resize(file.len().next_multiple_of(alignment.clamp(1, 1 << 20) as usize) + 32, 0);
        GgufHeader::from_bytes(&file)
    };
    for alignment in [8, 32, 64, 4096, 1 << 20] {
        let header = with(alignment).unwrap();
        assert_eq!(header.data_start % u64::from(alignment), 0);
    }
    for alignment in [0, 1, 7, 48, 1 << 21, 1 << 31] {
        assert!(matches!(with(alignment), Err(HeaderError::Alignment { .. })), "{alignment}");
    }
}

/// Writes file `number` (from 0) of a model that is split into `count` files, with one tensor. Returns the path.
fn write_split(folder: &Path, number: u32, count: u32, tensors: usize, tensor: &str) -> PathBuf {
    let mut writer = crate::split_writer(number, count, tensors);
    if number == 0 {
        writer.add_key("general.architecture", Value::Str("llama".into())).unwrap();
    }
    writer.add_tensor(tensor, &[8], Format::F32).unwrap();
    let path = folder.join(format!("model{}", split_suffix(number, count)));
    std::fs::write(&path, file(writer)).unwrap();
    path
}

#[test]
fn split_model_opens_from_any_file() {
    let folder = tempfile::tempdir().unwrap();
    let paths: Vec<_> =
        (0..3).map(|part| write_split(folder.path(), part, 3, 3, &format!("t{part}"))).collect();
    assert!(paths[1].ends_with("model-00002-of-00003.gguf"));
    for path in &paths {
        let model = GgufModel::open(path).unwrap();
        assert_eq!(model.file_paths, paths);
        assert_eq!(model.metadata.get_str("general.architecture").unwrap(), Some("llama"));
        let parts: Vec<_> =
            model.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.file_index)).collect();
        assert_eq!(parts, [("t0", 0), ("t1", 1), ("t2", 2)]);
    }
}

#[test]
fn mismatched_files_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = write_split(folder.path(), 0, 2, 3, "t0");
    let open = || GgufModel::open(&first).unwrap_err();
    assert!(matches!(open(), GgufError::Open { .. }), "the second file is missing");
    let second = write_split(folder.path(), 1, 2, 3, "t1");
    assert!(matches!(open(), GgufError::Split { .. }), "3 tensors announced, 2 found");
    write_split(folder.path(), 0, 2, 2, "t0");
    write_split(folder.path(), 1, 2, 2, "t0");
    assert!(matches!(open(), GgufError::Header { source: HeaderError::DuplicateTensor { .. }, .. }));
    std::fs::copy(&first, &second).unwrap();
    assert!(matches!(open(), GgufError::Split { .. }), "file 1 under the name of file 2");
    let renamed = folder.path().join("renamed.gguf");
    std::fs::copy(&first, &renamed).unwrap();
    let text = GgufModel::open(&renamed).unwrap_err().to_string();
    assert!(text.contains("is file 1 of 2 of a split model, but its name does not end in `-00001"), "{text}");
}
