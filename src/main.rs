//! `hearth`: plan, simulate and run language models across the devices people already own.

fn main() {}
