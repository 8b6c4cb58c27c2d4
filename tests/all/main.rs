//! One integration binary across crates.
