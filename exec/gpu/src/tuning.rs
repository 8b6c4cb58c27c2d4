//! Autotuning of the matmul kernels: times candidate tilings on the GPU and selects the fastest.
//!
//! ML Drift paper, section 3.4: the fastest candidate is selected on the device itself. Candidates differ in the
//! layout of the weights, the number of row slices per workgroup, and the number of threads that share a row. Each
//! candidate is timed on matmuls with one token and with a batch, with random weights in three formats: blocks of 32,
//! blocks of 256, and unquantised floats. The candidate with the smallest geometric mean of the times is stored for
//! the adapter and its driver.
//!
//! Other kernels, such as attention, have one tiling and are not timed. The tests compare every candidate with the
//! scalar oracle.
//!
//! Not here: the file in which the tunings are stored. The command line reads and writes it.

use std::collections::BTreeMap;
use std::fmt::Write;

use hearth_kernels::{Layout, Matrix};
use hearth_profiles::Format;
use hearth_runtime::clock::monotonic_nanos;

use crate::device::{Capabilities, Gpu};
use crate::error::GpuError;
use crate::kernels::matmul::Tiling;
use crate::matrix::GpuMatrix;
use crate::measure::{matmul_launches, random_weights};
use crate::virtual_tensor::WeightOrder;

/// Weight formats of the timed matmuls: blocks of 32, blocks of 256, and floats.
const FORMATS: [Format; 3] = [Format::Q8_0, Format::Q4K, Format::F16];

/// Token counts of the timed matmuls: one token, and a batch that fills a tile.
const TOKEN_COUNTS: [u32; 2] = [1, 32];

/// Rows and columns of the weight matrix of the timed matmuls.
/// source: assumed, the shape of a model of 1 to 3 billion weights
const MATRIX_SIDE: usize = 2048;

/// Rows and columns of the weight matrix on a slow device, where a matmul with [`MATRIX_SIDE`] takes at least
/// [`LONG_MATMUL_SECONDS`]. source: assumed, sixteen times less work
const SMALL_MATRIX_SIDE: usize = 512;

/// Number of matmuls that are timed together, in one submission. source: assumed, a few milliseconds on a GPU
const MATMULS_PER_SAMPLE: usize = 4;

/// Number of timed submissions, of which the fastest counts. source: assumed
const SAMPLES: usize = 3;

/// Minimum duration, in seconds, of matmuls that are timed one at a time, as on a software driver. source: assumed
const LONG_MATMUL_SECONDS: f64 = 0.005;

/// The fastest matmul tiling for each GPU adapter and driver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TunedTilings(BTreeMap<String, Tiling>);

/// A candidate tiling and the measured times of matmuls with this tiling.
#[derive(Debug, Clone, PartialEq)]
pub struct TimedTiling {
    pub tiling: Tiling,
    /// Duration of each matmul in seconds: for each weight format, with one token and with a batch.
    pub matmul_seconds: Vec<f64>,
}

impl TimedTiling {
    /// Returns the geometric mean of the times, in which every weight format and token count has the same influence.
    pub fn geometric_mean_seconds(&self) -> f64 {
        let logs: f64 = self.matmul_seconds.iter().map(|seconds| seconds.ln()).sum();
        (logs / self.matmul_seconds.len().max(1) as f64).exp()
    }
}

impl TunedTilings {
    /// Parses text in the format of [`TunedTilings::to_text`]. Ignores invalid lines.
    pub fn parse(text: &str) -> TunedTilings {
        TunedTilings(text.lines().filter_map(parse_line).collect())
    }

    /// Returns a line of text for each adapter, with the weight layout, the numbers of the tiling, and the adapter key.
    pub fn to_text(&self) -> String {
        let mut text = String::new();
        for (key, tiling) in &self.0 {
            let order =
                if tiling.weight_order == WeightOrder::ByOutput { "by-output" } else { "interleaved" };
            let (slices, splits) = (tiling.slices_per_workgroup, tiling.split_k);
            let (threads, tokens) = (tiling.threads_per_slice, tiling.tokens_per_thread);
            let _ = writeln!(text, "{order} {slices} {splits} {threads} {tokens} {key}");
        }
        text
    }

    /// Returns the stored tiling for the adapter of `gpu`, if the tiling is one of the current candidates.
    pub fn get(&self, gpu: &Gpu) -> Option<Tiling> {
        let known = self.0.get(&gpu.info().tuning_key()).copied();
        known.filter(|tiling| candidate_tilings(gpu.capabilities()).contains(tiling))
    }

    /// Stores the tiling for the adapter of `gpu`.
    pub fn set(&mut self, gpu: &Gpu, tiling: Tiling) {
        self.0.insert(gpu.info().tuning_key(), tiling);
    }
}

fn parse_line(line: &str) -> Option<(String, Tiling)> {
    let mut words = line.splitn(6, ' ');
    let weight_order = match words.next()? {
        "by-output" => WeightOrder::ByOutput,
        "interleaved" => WeightOrder::Interleaved,
        _ => return None,
    };
    let mut number = || words.next()?.parse::<u32>().ok().filter(|number| (1..=1024).contains(number));
    let (slices_per_workgroup, split_k) = (number()?, number()?);
    let (threads_per_slice, tokens_per_thread) = (number()?, number()?);
    let tiling = Tiling { weight_order, slices_per_workgroup, split_k, threads_per_slice, tokens_per_thread };
    Some((words.next()?.to_owned(), tiling))
}

/// Workgroup memory of the decode kernel in bytes per thread: two texels of quants, two sums, a scale, the largest
/// value, and a partial result.
const BYTES_PER_THREAD: u32 = 2 * 16 + 2 * 4 + 4 + 4 + 16;

/// Whether a device supports the workgroup size and the workgroup memory of a tiling. Eight threads quantise a block
/// of 256 inputs together, so the number of threads in a workgroup must be a multiple of eight.
fn fits(tiling: &Tiling, device: Capabilities) -> bool {
    let (decode, prefill) = (
        tiling.slices_per_workgroup * tiling.split_k,
        tiling.slices_per_workgroup * tiling.threads_per_slice,
    );
    let is_valid = |threads: u32| threads <= device.max_workgroup_threads && threads.is_multiple_of(8);
    is_valid(decode) && is_valid(prefill) && decode * BYTES_PER_THREAD <= device.workgroup_memory_bytes
}

/// Returns the candidate tilings that a device supports.
pub fn candidate_tilings(device: Capabilities) -> Vec<Tiling> {
    let all = [WeightOrder::Interleaved, WeightOrder::ByOutput].into_iter().flat_map(|weight_order| {
        [(8, 8), (16, 4), (16, 8), (8, 16), (32, 8), (16, 16)].map(|(slices_per_workgroup, split_k)| {
            let threads_per_slice = 128 / slices_per_workgroup;
            Tiling { weight_order, slices_per_workgroup, split_k, threads_per_slice, ..Tiling::DEFAULT }
        })
    });
    all.filter(|tiling| fits(tiling, device)).collect()
}

/// Times every candidate tiling on the GPU and returns all candidates, the fastest first.
pub fn time_candidates(gpu: &Gpu) -> Result<Vec<TimedTiling>, GpuError> {
    let untimed = |tiling| TimedTiling { tiling, matmul_seconds: Vec::new() };
    let mut timed: Vec<TimedTiling> =
        candidate_tilings(gpu.capabilities()).into_iter().map(untimed).collect();
    let Some(first) = timed.first().map(|timed| timed.tiling) else { return Ok(timed) };
    let bytes = random_weights(FORMATS[0], MATRIX_SIDE);
    let largest = square_matrix(FORMATS[0], MATRIX_SIDE, &bytes);
    let is_long = measure_matmul_seconds(gpu, largest, first, TOKEN_COUNTS[1])? >= LONG_MATMUL_SECONDS;
    let side = if is_long { SMALL_MATRIX_SIDE } else { MATRIX_SIDE };
    for format in FORMATS {
        let bytes = random_weights(format, side);
        let matrix = square_matrix(format, side, &bytes);
        for timed in &mut timed {
            for tokens in TOKEN_COUNTS {
                timed.matmul_seconds.push(measure_matmul_seconds(gpu, matrix, timed.tiling, tokens)?);
            }
        }
    }
    fastest_first(&mut timed);
    Ok(timed)
}

fn square_matrix(format: Format, side: usize, bytes: &[u8]) -> Matrix<'_> {
    Matrix { format, row_length: side, rows: side, layout: Layout::Rows, bytes }
}

fn fastest_first(timed: &mut [TimedTiling]) {
    timed.sort_by(|one, other| one.geometric_mean_seconds().total_cmp(&other.geometric_mean_seconds()));
}

/// Measures the duration of one matmul of `matrix` with `tokens` tokens, in seconds.
pub fn measure_matmul_seconds(
    gpu: &Gpu,
    matrix: Matrix<'_>,
    tiling: Tiling,
    tokens: u32,
) -> Result<f64, GpuError> {
    let weights = GpuMatrix::upload(gpu, matrix, tiling)?;
    let launches = matmul_launches(gpu, &weights, tokens)?;
    let sample = |matmuls: usize| {
        let begin = monotonic_nanos();
        gpu.submit(launches.iter().cycle().take(launches.len() * matmuls))?;
        gpu.wait("a matmul")?;
        Ok::<_, GpuError>(monotonic_nanos().saturating_sub(begin) as f64 * 1e-9 / matmuls as f64)
    };
    let mut best = sample(1)?;
    if best < LONG_MATMUL_SECONDS {
        for _ in 0..SAMPLES {
            best = best.min(sample(MATMULS_PER_SAMPLE)?);
        }
    }
    Ok(best)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stored_tilings_round_trip_and_invalid_lines_are_ignored() {
        let mut tunings = TunedTilings::default();
        tunings.0.insert("llvmpipe | vulkan | Mesa 22".into(), Tiling::BY_OUTPUT);
        tunings.0.insert("a b".into(), Tiling::DEFAULT);
        assert_eq!(TunedTilings::parse(&tunings.to_text()), tunings);
        let outside = ["interleaved 0 1 1 1 a", "by-output 9999 1 1 1 a"];
        for text in ["", "interleaved", "diagonal 8 8 8 4 a"].into_iter().chain(outside) {
            assert_eq!(TunedTilings::parse(text), TunedTilings::default(), "{text}");
        }
    }

    fn device(max_workgroup_threads: u32, workgroup_memory_bytes: u32) -> Capabilities {
        Capabilities { workgroup_memory_bytes, max_workgroup_threads, ..Capabilities::default() }
    }

    #[test]
    fn candidates_fit_the_device() {
        let (few, all) = (candidate_tilings(device(64, 1 << 15)), candidate_tilings(device(256, 1 << 15)));
        let max_threads = |tilings: &[Tiling]| {
            tilings.iter().map(|tiling| tiling.slices_per_workgroup * tiling.split_k).max().unwrap_or(0)
        };
        assert!(max_threads(&few) <= 64);
        assert!(all.len() > few.len());
        assert!(all.contains(&Tiling::DEFAULT) && all.contains(&Tiling::BY_OUTPUT));
        // 128 threads share 8 KiB.
        let tight = candidate_tilings(device(256, 8 << 10));
        assert!(!tight.is_empty() && max_threads(&tight) <= 128);
        assert_eq!(candidate_tilings(device(256, 1 << 10)), []);
    }

    #[test]
    fn tiling_that_is_fast_in_one_format_only_is_not_selected() {
        let timed = |tiling, seconds: &[f64]| TimedTiling { tiling, matmul_seconds: seconds.to_vec() };
        let mut all = [
            timed(Tiling::DEFAULT, &[1e-6, 9e-6, 9e-6, 9e-6]),
            timed(Tiling::BY_OUTPUT, &[2e-6, 2e-6, 3e-6, 2e-6]),
        ];
        fastest_first(&mut all);
        assert_eq!(all[0].tiling, Tiling::BY_OUTPUT);
        let mean = all[0].geometric_mean_seconds();
        assert!((mean - 2.2134e-6).abs() < 1e-9, "{mean}");
    }
}
