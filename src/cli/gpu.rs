//! Flags about GPUs.

use clap::{Args, ValueEnum};

/// `hearth gpu`.
#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Benchmark the kernel variants, and remember the fastest for this adapter and driver.
    #[arg(long)]
    pub tune: bool,
}

/// When `hearth profile` measures the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MeasureGpu {
    /// If its driver is not software.
    Auto,
    /// Always.
    Always,
    /// Never.
    Never,
}

/// The conversion of weights on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuWeights {
    /// As in the file.
    AsStored,
    /// 8 bits with one scale a row.
    Q8,
    /// 8 bits in attention, 4 bits in the feed-forward block and the output matrix, with one scale a row.
    #[value(name = "8/4/4")]
    Mixed,
}
