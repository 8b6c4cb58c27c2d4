//! Writes GGUF headers of version 3, little-endian.
//!
//! Keys and tensors are added to a [`HeaderWriter`] in file order. The caller writes the tensor data after the header,
//! in the same order, with each tensor aligned to 32 bytes. [`GgufHeader::read`](super::GgufHeader::read) accepts the
//! written header, because reader and writer have the same limits.
//!
//! ```
//! use hearth_profiles::Format;
//! use hearth_profiles::gguf::{GgufHeader, HeaderWriter, Value};
//!
//! let mut writer = HeaderWriter::default();
//! writer.add_key("general.architecture", Value::Str("llama".into())).unwrap();
//! writer.add_tensor("output_norm.weight", &[64], Format::F32).unwrap();
//! let layout = writer.finish();
//! let mut file = layout.header.clone();
//! file.resize(layout.file_bytes as usize, 0);
//! assert_eq!(GgufHeader::from_bytes(&file).unwrap().tensors, layout.tensors);
//! ```

use super::error::HeaderError;
use super::read::{
    DEFAULT_ALIGNMENT, MAX_DIMENSIONS, MAX_KEY_BYTES, MAX_TENSOR_NAME_BYTES, TensorInfo, tensor_bytes,
};
use super::value::{Element, Value};
use crate::format::Format;

/// A builder that collects keys and tensors, and encodes the header.
#[derive(Debug, Clone, Default)]
pub struct HeaderWriter {
    keys: Vec<(String, Value)>,
    /// The tensors, with offsets from the start of the data section.
    tensors: Vec<TensorInfo>,
    /// Size of the data of all tensors that were added, with padding.
    data_bytes: u64,
}

/// An encoded header and the positions of the tensors in the file.
#[derive(Debug, Clone, PartialEq)]
pub struct FileLayout {
    /// The header with padding. The data of the first tensor follow directly.
    pub header: Vec<u8>,
    /// The tensors in file order, with offsets from the start of the file. The padding after tensors is zero bytes.
    pub tensors: Vec<TensorInfo>,
    pub file_bytes: u64,
}

impl HeaderWriter {
    /// Appends a key and its value. Fails for `general.alignment`, because the alignment is always the default.
    pub fn add_key(&mut self, key: &str, value: Value) -> Result<&mut Self, HeaderError> {
        check_length("a key", key, MAX_KEY_BYTES)?;
        if key == "general.alignment" || self.keys.iter().any(|(name, _)| name == key) {
            return Err(HeaderError::DuplicateKey { key: key.to_owned() });
        }
        self.keys.push((key.to_owned(), value));
        Ok(self)
    }

    /// Appends the tensor info of a tensor, without the tensor's data. `dims[0]` is the length of a row.
    pub fn add_tensor(&mut self, name: &str, dims: &[u64], format: Format) -> Result<&mut Self, HeaderError> {
        check_length("the name of a tensor", name, MAX_TENSOR_NAME_BYTES)?;
        if dims.is_empty() || dims.len() > MAX_DIMENSIONS as usize || dims.contains(&0) {
            let (tensor, dims) = (name.to_owned(), dims.to_vec());
            return Err(HeaderError::Dimensions { tensor, dims, limit: MAX_DIMENSIONS });
        }
        let overflow = || HeaderError::Overflow { tensor: name.to_owned(), dims: dims.to_vec() };
        let bytes = tensor_bytes(name, dims, format)?;
        let end = self.data_bytes.checked_add(bytes.0).ok_or_else(overflow)?;
        let padded = end.checked_next_multiple_of(DEFAULT_ALIGNMENT).ok_or_else(overflow)?;
        if self.tensors.iter().any(|tensor| tensor.name == name) {
            return Err(HeaderError::DuplicateTensor { tensor: name.to_owned() });
        }
        let (name, dims) = (name.to_owned(), dims.to_vec());
        self.tensors.push(TensorInfo { name, dims, format, file_index: 0, offset: self.data_bytes, bytes });
        self.data_bytes = padded;
        Ok(self)
    }

    /// Encodes the header and returns it with the positions of the tensors.
    pub fn finish(self) -> FileLayout {
        let mut header = Vec::new();
        header.extend(b"GGUF");
        header.extend(3u32.to_le_bytes());
        header.extend((self.tensors.len() as u64).to_le_bytes());
        header.extend((self.keys.len() as u64).to_le_bytes());
        for (key, value) in &self.keys {
            key.write(&mut header);
            value.write(&mut header);
        }
        for tensor in &self.tensors {
            tensor.name.write(&mut header);
            header.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| dim.write(&mut header));
            header.extend(tensor.format.ggml_id().to_le_bytes());
            header.extend(tensor.offset.to_le_bytes());
        }
        header.resize(header.len().next_multiple_of(DEFAULT_ALIGNMENT as usize), 0);
        let data_start = header.len() as u64;
        let mut tensors = self.tensors;
        for tensor in &mut tensors {
            tensor.offset += data_start;
        }
        FileLayout { header, tensors, file_bytes: data_start + self.data_bytes }
    }
}

fn check_length(what: &str, text: &str, limit: u64) -> Result<(), HeaderError> {
    let found = text.len() as u64;
    if found > limit {
        let what = format!("the length of {what}");
        return Err(HeaderError::TooLarge { what, offset: 0, found, limit });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn writer_enforces_reader_limits() {
        let mut writer = HeaderWriter::default();
        writer.add_key("a", Value::U8(1)).unwrap();
        assert!(matches!(writer.add_key("a", Value::U8(2)), Err(HeaderError::DuplicateKey { .. })));
        writer.add_tensor("t", &[32], Format::Q8_0).unwrap();
        assert!(matches!(
            writer.add_tensor("t", &[32], Format::F32),
            Err(HeaderError::DuplicateTensor { .. })
        ));
        assert!(matches!(writer.add_tensor("u", &[33], Format::Q8_0), Err(HeaderError::PartialBlock { .. })));
        let large = writer.add_tensor("u", &[1 << 40, 1 << 40], Format::F32);
        assert!(matches!(large, Err(HeaderError::Overflow { .. })));
        assert!(matches!(writer.add_tensor("u", &[0], Format::F32), Err(HeaderError::Dimensions { .. })));
        let long = writer.add_tensor(&"u".repeat(65), &[1], Format::F32);
        assert!(matches!(long, Err(HeaderError::TooLarge { .. })));
        let layout = writer.finish();
        assert_eq!(layout.tensors.len(), 1);
        // Padding after the 34 bytes of the only block.
        assert_eq!(layout.file_bytes, layout.header.len() as u64 + 64);
    }
}
