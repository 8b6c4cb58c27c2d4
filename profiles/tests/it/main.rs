//! Integration tests with valid, invalid and random GGUF headers, and with documents.

mod device_document;
mod gguf_header;
mod gguf_round_trip;
mod psalm;

use hearth_profiles::gguf::{HeaderWriter, Value};

/// Returns a header writer for file `number` (from 0) of `count` files, which have `tensors` tensors in total.
fn split_writer(number: u32, count: u32, tensors: usize) -> HeaderWriter {
    let mut writer = HeaderWriter::default();
    writer.add_key("split.no", Value::U16(number as u16)).unwrap();
    writer.add_key("split.count", Value::U16(count as u16)).unwrap();
    writer.add_key("split.tensors.count", Value::I32(tensors as i32)).unwrap();
    writer
}

/// Returns the bytes of a file with the writer's header and with zero bytes as weights.
fn file(writer: HeaderWriter) -> Vec<u8> {
    let layout = writer.finish();
    let mut file = layout.header;
    file.resize(layout.file_bytes as usize, 0);
    file
}
