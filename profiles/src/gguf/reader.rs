//! Reads numbers and strings from an untrusted file with bounded memory.
//!
//! Every length is checked before memory is allocated: against a limit that no real model exceeds, and against the
//! number of bytes that remain in the file.

use std::io::{ErrorKind, Read};

use super::error::HeaderError;

/// Maximum size of a header in bytes. A vocabulary of 256 k tokens with merges takes about 20 MB.
pub(super) const MAX_HEADER_BYTES: u64 = 256 << 20;

/// A reader of the header of a file, with its position in the file and the size of the file.
pub(super) struct HeaderReader<R> {
    pub(super) reader: R,
    /// Number of bytes read so far.
    pub(super) offset: u64,
    pub(super) file_bytes: u64,
}

impl<R: Read> HeaderReader<R> {
    /// Returns an error if `count` items of at least `min_bytes` bytes each exceed the rest of the file or the maximum
    /// size of a header. `what` names the items in the error.
    pub(super) fn check_remaining(&self, what: &str, count: u64, min_bytes: u64) -> Result<(), HeaderError> {
        let needed = count.saturating_mul(min_bytes);
        let remaining = self.file_bytes.saturating_sub(self.offset);
        if needed > remaining {
            let (what, offset) = (what.to_owned(), self.offset);
            return Err(HeaderError::Truncated { what, offset, needed, remaining });
        }
        let end = self.offset.saturating_add(needed);
        if end > MAX_HEADER_BYTES {
            let (what, offset, limit) = (what.to_owned(), self.offset, MAX_HEADER_BYTES);
            return Err(HeaderError::HeaderTooLarge { what, offset, header_bytes: end, limit });
        }
        Ok(())
    }

    fn read_exact(&mut self, what: &str, buffer: &mut [u8]) -> Result<(), HeaderError> {
        let needed = buffer.len() as u64;
        self.check_remaining(what, needed, 1)?;
        let offset = self.offset;
        self.reader.read_exact(buffer).map_err(|source| {
            if source.kind() == ErrorKind::UnexpectedEof {
                // The file was truncated while it was read.
                HeaderError::Truncated { what: what.to_owned(), offset, needed, remaining: 0 }
            } else {
                HeaderError::Io { offset, source }
            }
        })?;
        self.offset += needed;
        Ok(())
    }

    pub(super) fn read_array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], HeaderError> {
        let mut buffer = [0; N];
        self.read_exact(what, &mut buffer)?;
        Ok(buffer)
    }

    pub(super) fn read_u32(&mut self, what: &str) -> Result<u32, HeaderError> {
        Ok(u32::from_le_bytes(self.read_array(what)?))
    }

    pub(super) fn read_u64(&mut self, what: &str) -> Result<u64, HeaderError> {
        Ok(u64::from_le_bytes(self.read_array(what)?))
    }

    /// Reads a count or a length, which must be at most `limit`.
    pub(super) fn read_count(&mut self, what: &str, limit: u64) -> Result<u64, HeaderError> {
        let offset = self.offset;
        let found = self.read_u64(what)?;
        if found > limit {
            return Err(HeaderError::TooLarge { what: what.to_owned(), offset, found, limit });
        }
        Ok(found)
    }

    pub(super) fn read_string_bytes(&mut self, what: &str, limit: u64) -> Result<Vec<u8>, HeaderError> {
        let length = self.read_count(&format!("the length of {what}"), limit)?;
        self.check_remaining(what, length, 1)?;
        let mut bytes = vec![0; length as usize];
        self.read_exact(what, &mut bytes)?;
        Ok(bytes)
    }

    /// Reads a key or a tensor name, which must be UTF-8 because keys and names are compared with known names.
    pub(super) fn read_name(&mut self, what: &str, limit: u64) -> Result<String, HeaderError> {
        let offset = self.offset;
        let bytes = self.read_string_bytes(what, limit)?;
        String::from_utf8(bytes).map_err(|_| HeaderError::NotUtf8 { what: what.to_owned(), offset })
    }
}
