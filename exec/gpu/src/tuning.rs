//! How should threads share a product's work on this device?
//!
//! ML Drift paper, section 3.4: the fastest of some candidates is chosen on the device itself. Here they differ in the
//! layout of weights, in how many slices of rows a group has, and in how many threads share a row. Each is timed on one
//! product of random weights in one format, and the choice is remembered for the adapter and its driver.
//!
//! Not here: the file in which choices are kept. The command line has it.

use std::collections::BTreeMap;
use std::fmt::Write;

use hearth_exec::clock::wall_nanos;
use hearth_exec::kernels::{Matrix, Supported};

use crate::device::Gpu;
use crate::error::GpuError;
use crate::kernels::product::Tiling;
use crate::matrix::GpuMatrix;
use crate::measure::product_launches;
use crate::virtual_tensor::WeightOrder;

/// Rows and inputs of the product that is timed.
/// source: assumed, the shape of a model of 1 to 3 billion weights
const SIDE: usize = 2048;

/// Launches that are timed together, and how often: the shortest time counts.
/// source: assumed, some milliseconds on a GPU
const LAUNCHES: usize = 8;
const REPEATS: usize = 3;

/// Choices by adapter and driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices(BTreeMap<String, Tiling>);

/// A candidate and what its product took.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timed {
    /// How threads share the work.
    pub tiling: Tiling,
    /// Of one product.
    pub seconds: f64,
}

impl Choices {
    /// Reads what [`Choices::text`] wrote. A line that is not understood is no choice: it is measured again.
    pub fn of_text(text: &str) -> Choices {
        Choices(text.lines().filter_map(line).collect())
    }

    /// One line a choice.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (key, tiling) in &self.0 {
            let Tiling { order, slices, splits, rows_of_tokens, tokens } = tiling;
            let order = if *order == WeightOrder::ByOutput { "by-output" } else { "interleaved" };
            let _ = writeln!(text, "{order} {slices} {splits} {rows_of_tokens} {tokens} {key}");
        }
        text
    }

    /// What was chosen for this device.
    pub fn get(&self, gpu: &Gpu) -> Option<Tiling> {
        let threads = gpu.capabilities().group_threads;
        self.0.get(&gpu.facts().key()).copied().filter(|tiling| fits(tiling, threads))
    }

    /// Remembers a choice.
    pub fn set(&mut self, gpu: &Gpu, tiling: Tiling) {
        self.0.insert(gpu.facts().key(), tiling);
    }
}

fn line(line: &str) -> Option<(String, Tiling)> {
    let mut words = line.splitn(6, ' ');
    let order = match words.next()? {
        "by-output" => WeightOrder::ByOutput,
        "interleaved" => WeightOrder::Interleaved,
        _ => return None,
    };
    let mut number = || words.next()?.parse::<u32>().ok().filter(|number| (1..=1024).contains(number));
    let [slices, splits, rows_of_tokens, tokens] = [number()?, number()?, number()?, number()?];
    let tiling = Tiling { order, slices, splits, rows_of_tokens, tokens };
    Some((words.next()?.to_owned(), tiling))
}

/// Whether groups of a device can have so many threads. Eight threads round a block of 256 together.
fn fits(tiling: &Tiling, threads: u32) -> bool {
    let all = [tiling.slices * tiling.splits, tiling.slices * tiling.rows_of_tokens];
    all.iter().all(|&all| all <= threads && all.is_multiple_of(8)) && tiling.tokens <= 8
}

/// What is tried.
pub fn candidates(threads: u32) -> Vec<Tiling> {
    let mut all = Vec::new();
    for order in [WeightOrder::Interleaved, WeightOrder::ByOutput] {
        for (slices, splits) in [(8, 8), (16, 4), (16, 8), (8, 16), (32, 8), (16, 16)] {
            let rows_of_tokens = (128 / slices).max(1);
            let tiling = Tiling { order, slices, splits, rows_of_tokens, ..Tiling::USUAL };
            if fits(&tiling, threads) {
                all.push(tiling);
            }
        }
    }
    all
}

/// Times every candidate, the fastest first.
pub fn measure(gpu: &Gpu) -> Result<Vec<Timed>, GpuError> {
    let format = Supported::Q8_0;
    let row = format.row_bytes(SIDE).unwrap_or(0);
    // Any bytes are weights; their scales are the same small number.
    let scale = half::f16::from_f32(0.01).to_le_bytes();
    let mut bytes: Vec<u8> = (0..SIDE * row).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8).collect();
    bytes.chunks_exact_mut(34).for_each(|block| block[..2].copy_from_slice(&scale));
    let matrix = Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes };
    let mut timed = Vec::new();
    for tiling in candidates(gpu.capabilities().group_threads) {
        timed.push(Timed { tiling, seconds: product_seconds(gpu, matrix, tiling)? });
    }
    timed.sort_by(|one, other| one.seconds.total_cmp(&other.seconds));
    Ok(timed)
}

/// What one product of a token takes.
pub fn product_seconds(gpu: &Gpu, matrix: Matrix<'_>, tiling: Tiling) -> Result<f64, GpuError> {
    let weights = GpuMatrix::upload(gpu, matrix, tiling)?;
    let launches = product_launches(gpu, &weights, 1)?;
    let mut best = f64::INFINITY;
    for _ in 0..REPEATS {
        let begin = wall_nanos();
        gpu.submit(launches.iter().cycle().take(launches.len() * LAUNCHES))?;
        gpu.wait("a product")?;
        let seconds = wall_nanos().saturating_sub(begin) as f64 * 1e-9 / LAUNCHES as f64;
        best = best.min(seconds);
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_are_read_as_they_were_written_and_nonsense_is_none() {
        let mut choices = Choices::default();
        choices.0.insert("llvmpipe | vulkan | Mesa 22".into(), Tiling::BY_OUTPUT);
        choices.0.insert("a b".into(), Tiling::USUAL);
        assert_eq!(Choices::of_text(&choices.text()), choices);
        for text in
            ["", "interleaved", "interleaved 0 1 1 1 a", "diagonal 8 8 8 4 a", "by-output 9999 1 1 1 a"]
        {
            assert_eq!(Choices::of_text(text), Choices::default(), "{text}");
        }
    }

    #[test]
    fn candidates_fit_the_device() {
        let few = candidates(64);
        assert!(few.iter().all(|tiling| tiling.slices * tiling.splits <= 64));
        assert!(candidates(256).len() > few.len());
        assert!(candidates(256).contains(&Tiling::USUAL) && candidates(256).contains(&Tiling::BY_OUTPUT));
    }
}
