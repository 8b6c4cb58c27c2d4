//! Integration tests of the kernels.

mod dequantise;
