//! Fuzz target of `hearth_ring::fuzzing::frame`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_ring::fuzzing::{allowed_memory, frame};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), frame));
