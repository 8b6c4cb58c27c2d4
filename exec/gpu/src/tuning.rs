//! Tuning: chooses how threads share a product's work on a device by timing candidates.
//!
//! ML Drift paper, section 3.4: the fastest candidate is chosen on the device itself. Candidates differ in the layout
//! of weights, the number of slices of rows of a group, and the number of threads that share a row. Each is timed on
//! products of one token and of a batch, with random weights in a format of each kind: blocks of 32, blocks of 256, and
//! plain numbers. The candidate with the smallest geometric mean is stored for the adapter and its driver.
//!
//! Other kernels, such as attention, have one tiling and are not timed. The tests compare every candidate with the
//! scalar oracle.
//!
//! Not here: the file of choices, which belongs to the command line.

use std::collections::BTreeMap;
use std::fmt::Write;

use hearth_kernels::{KernelFormat, Matrix};
use hearth_runtime::clock::wall_nanos;

use crate::device::{Capabilities, Gpu};
use crate::error::GpuError;
use crate::kernels::product::Tiling;
use crate::matrix::GpuMatrix;
use crate::measure::{arbitrary_weights, product_launches};
use crate::virtual_tensor::WeightOrder;

/// Formats that are timed, one of each kind.
const FORMATS: [KernelFormat; 3] = [KernelFormat::Q8_0, KernelFormat::Q4K, KernelFormat::F16];

/// Tokens of a product that are timed: one, and a batch that fills a tile.
const TOKENS: [u32; 2] = [1, 32];

/// Rows and inputs of the product that is timed.
/// source: assumed, the shape of a model of 1 to 3 billion weights
const SIDE: usize = 2048;

/// Launches that are timed together, and how often: the shortest time counts.
/// source: assumed, some milliseconds on a GPU
const LAUNCHES: usize = 4;
const REPEATS: usize = 3;

/// Chosen tilings by adapter and driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices(BTreeMap<String, Tiling>);

/// A candidate and the times of its products.
#[derive(Debug, Clone, PartialEq)]
pub struct Timed {
    pub tiling: Tiling,
    /// Seconds of each product: format by format, of a token and of a batch.
    pub products: Vec<f64>,
}

impl Timed {
    /// The geometric mean of its products: each format and stage counts as much as another.
    pub fn mean(&self) -> f64 {
        let logs: f64 = self.products.iter().map(|seconds| seconds.ln()).sum();
        (logs / self.products.len().max(1) as f64).exp()
    }
}

impl Choices {
    /// Reads the text of [`Choices::text`]. An invalid line is ignored: its device is measured again.
    pub fn of_text(text: &str) -> Choices {
        Choices(text.lines().filter_map(line).collect())
    }

    /// Writes one line a choice.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (key, tiling) in &self.0 {
            let Tiling { order, slices, splits, rows_of_tokens, tokens } = tiling;
            let order = if *order == WeightOrder::ByOutput { "by-output" } else { "interleaved" };
            let _ = writeln!(text, "{order} {slices} {splits} {rows_of_tokens} {tokens} {key}");
        }
        text
    }

    /// Returns the choice for this device, if it is still a candidate.
    pub fn get(&self, gpu: &Gpu) -> Option<Tiling> {
        let known = self.0.get(&gpu.facts().key()).copied();
        known.filter(|tiling| candidates(gpu.capabilities()).contains(tiling))
    }

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

/// Bytes that each thread of a group in decode shares: two texels of codes, two sums, a scale, the largest value, and
/// what it has added up.
const SHARED_BYTES: u32 = 2 * 16 + 2 * 4 + 4 + 4 + 16;

/// Whether a device supports the workgroup size and the shared memory of a tiling. Eight threads round a block of 256
/// together.
fn fits(tiling: &Tiling, device: Capabilities) -> bool {
    let (decode, prefill) = (tiling.slices * tiling.splits, tiling.slices * tiling.rows_of_tokens);
    let threads = [decode, prefill].iter().all(|&all| all <= device.group_threads && all.is_multiple_of(8));
    threads && decode * SHARED_BYTES <= device.shared_bytes
}

/// Returns the tilings that fit a device.
pub fn candidates(device: Capabilities) -> Vec<Tiling> {
    let mut all = Vec::new();
    for order in [WeightOrder::Interleaved, WeightOrder::ByOutput] {
        for (slices, splits) in [(8, 8), (16, 4), (16, 8), (8, 16), (32, 8), (16, 16)] {
            let rows_of_tokens = (128 / slices).max(1);
            let tiling = Tiling { order, slices, splits, rows_of_tokens, ..Tiling::USUAL };
            if fits(&tiling, device) {
                all.push(tiling);
            }
        }
    }
    all
}

/// Times every candidate, the fastest first.
pub fn measure(gpu: &Gpu) -> Result<Vec<Timed>, GpuError> {
    let mut timed: Vec<Timed> = candidates(gpu.capabilities())
        .into_iter()
        .map(|tiling| Timed { tiling, products: Vec::new() })
        .collect();
    for format in FORMATS {
        let bytes = arbitrary_weights(format, SIDE);
        let matrix = Matrix { format, length: SIDE, rows: SIDE, bytes: &bytes };
        for timed in &mut timed {
            for tokens in TOKENS {
                timed.products.push(product_seconds(gpu, matrix, timed.tiling, tokens)?);
            }
        }
    }
    fastest_first(&mut timed);
    Ok(timed)
}

fn fastest_first(timed: &mut [Timed]) {
    timed.sort_by(|one, other| one.mean().total_cmp(&other.mean()));
}

/// Returns the seconds that one product of `tokens` tokens takes.
pub fn product_seconds(gpu: &Gpu, matrix: Matrix<'_>, tiling: Tiling, tokens: u32) -> Result<f64, GpuError> {
    let weights = GpuMatrix::upload(gpu, matrix, tiling)?;
    let launches = product_launches(gpu, &weights, tokens)?;
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

    fn device(group_threads: u32, shared_bytes: u32) -> Capabilities {
        Capabilities {
            packed_dot: false,
            subgroups: None,
            half: false,
            timestamps: false,
            binding_bytes: 1 << 27,
            buffer_bytes: 1 << 28,
            shared_bytes,
            group_threads,
        }
    }

    #[test]
    fn candidates_fit_the_device() {
        let (few, all) = (candidates(device(64, 1 << 15)), candidates(device(256, 1 << 15)));
        assert!(few.iter().all(|tiling| tiling.slices * tiling.splits <= 64));
        assert!(all.len() > few.len());
        assert!(all.contains(&Tiling::USUAL) && all.contains(&Tiling::BY_OUTPUT));
        // 128 threads share 8 KiB.
        let tight = candidates(device(256, 8 << 10));
        assert!(!tight.is_empty() && tight.iter().all(|tiling| tiling.slices * tiling.splits <= 128));
        assert_eq!(candidates(device(256, 1 << 10)), []);
    }

    #[test]
    fn what_is_fast_in_one_format_only_is_not_the_fastest() {
        let timed = |tiling, products: &[f64]| Timed { tiling, products: products.to_vec() };
        let mut all = [
            timed(Tiling::USUAL, &[1e-6, 9e-6, 9e-6, 9e-6]),
            timed(Tiling::BY_OUTPUT, &[2e-6, 2e-6, 3e-6, 2e-6]),
        ];
        fastest_first(&mut all);
        assert_eq!(all[0].tiling, Tiling::BY_OUTPUT);
        assert!((all[0].mean() - 2.2134e-6).abs() < 1e-9, "{}", all[0].mean());
    }
}
