//! Fuzz target of `hearth_serve::fuzzing::http`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_serve::fuzzing::{allowed_memory, http};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), http));
