//! Integration tests with valid, invalid and random GGUF headers and documents.

mod device_document;
mod document_fuzz;
mod gguf_fuzz;
mod gguf_header;
mod psalm;

use hearth_profiles::gguf::HeaderWriter;

/// Returns the bytes of a file whose weights are all zero.
fn file(writer: HeaderWriter) -> Vec<u8> {
    let layout = writer.finish();
    let mut file = layout.header;
    file.resize(layout.file_bytes as usize, 0);
    file
}
