//! Integration tests: GGUF headers and documents, valid, wrong and random.

mod device_document;
mod document_fuzz;
mod gguf_fuzz;
mod gguf_header;
mod psalm;

use hearth_profiles::gguf::HeaderWriter;

/// A file of zero weights.
fn file(writer: HeaderWriter) -> Vec<u8> {
    let layout = writer.finish();
    let mut file = layout.header;
    file.resize(layout.file_bytes as usize, 0);
    file
}
