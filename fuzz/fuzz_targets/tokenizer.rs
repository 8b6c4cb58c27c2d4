//! Fuzz target of `hearth_runtime::fuzzing::tokenizer`.

#![no_main]

#[path = "../memory.rs"]
mod memory;

use hearth_runtime::fuzzing::{allowed_memory, tokenizer};

libfuzzer_sys::fuzz_target!(|input: &[u8]| memory::check(input, allowed_memory(input.len()), tokenizer));
