//! Fuzz target of `hearth_ring::fuzzing::handshake`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_ring::fuzzing::{allowed_memory, handshake};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), handshake));
