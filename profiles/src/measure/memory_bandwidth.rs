//! Measures the bandwidth of reading memory: T_cpu of the prima.cpp paper.
//!
//! All threads sum up the words of one large buffer. A shared counter gives each thread its next piece of the buffer,
//! as the kernels do with the rows of a matrix. Summing is the cheapest arithmetic that reads every byte, so the result
//! is an upper bound for decoding. The buffer is as large as memory allows, because the weights of a model do not stay
//! in a CPU cache.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::MeasurementError;
use super::mapping::WeightBuffer;
use super::sampling::{MeasurementOptions, measure_rate};
use crate::document_values::Sourced;
use crate::units::BytesPerSecond;

/// Size in bytes of the piece of the buffer that a thread reads at a time.
const PIECE_BYTES: usize = 256 << 10;

/// Measures the total bandwidth with which `threads` threads read the buffer.
pub fn measure_read_bandwidth(
    buffer: &WeightBuffer,
    threads: usize,
    options: &MeasurementOptions,
) -> Result<Sourced<BytesPerSecond>, MeasurementError> {
    let rates = measure_rate(options, || {
        read_all(buffer.as_bytes(), threads);
        buffer.as_bytes().len() as f64
    });
    let what = format!("reads of {} in pages of 4 KiB by {threads} threads", buffer.size());
    rates.sourced_positive_median(BytesPerSecond, &what)
}

fn read_all(bytes: &[u8], threads: usize) {
    let next = AtomicUsize::new(0);
    let read = || {
        loop {
            let start = next.fetch_add(PIECE_BYTES, Ordering::Relaxed);
            if start >= bytes.len() {
                return;
            }
            std::hint::black_box(sum(&bytes[start..bytes.len().min(start + PIECE_BYTES)]));
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(read);
        }
        read();
    });
}

/// Returns the wrapping sum of all 8-byte words, from 16 independent sums so that additions do not wait for each other.
fn sum(bytes: &[u8]) -> u64 {
    let mut lanes = [0u64; 16];
    for chunk in bytes.as_chunks::<128>().0 {
        for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *lane = lane.wrapping_add(u64::from_ne_bytes(*word));
        }
    }
    lanes.iter().fold(0, |total, lane| total.wrapping_add(*lane))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Bytes;

    #[test]
    fn sum_covers_every_word() {
        // 256 bytes of 1: 32 words of 0x0101010101010101.
        assert_eq!(sum(&[1; 256]), 0x0101_0101_0101_0101_u64.wrapping_mul(32));
    }

    #[test]
    fn read_bandwidth_is_positive() {
        let buffer = WeightBuffer::new(Bytes::from_mib(1)).unwrap();
        let rate = measure_read_bandwidth(&buffer, 2, &MeasurementOptions::minimal()).unwrap();
        assert!(rate.value.0 > 0.0 && rate.value.0.is_finite());
        assert!(rate.source.contains("by 2 threads"), "{}", rate.source);
    }
}
