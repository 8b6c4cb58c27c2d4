//! Fuzz target of `hearth_profiles::fuzzing::gguf_header`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_profiles::fuzzing::{allowed_memory, gguf_header};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), gguf_header));
