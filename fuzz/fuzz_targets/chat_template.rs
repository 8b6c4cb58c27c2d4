//! Fuzz target of `hearth_runtime::fuzzing::chat_template`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_runtime::fuzzing::{allowed_memory, chat_template};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), chat_template));
