//! Fuzz target of `hearth_core::fuzzing::document`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_core::fuzzing::{allowed_memory, document};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), document));
