//! Flags about GPUs.

use clap::{Args, ValueEnum};

/// `hearth gpu`.
#[derive(Debug, Args)]
pub struct GpuArgs {
    /// Time the candidates of its kernels, and remember the fastest for this adapter and driver.
    #[arg(long)]
    pub tune: bool,
}

/// Which GPU `hearth profile` measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum MeasureGpu {
    /// One whose driver is no software.
    Auto,
    /// Whatever there is.
    Always,
    /// None.
    Never,
}

/// What becomes of weights on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuWeights {
    /// They stay what they are in the file.
    AsStored,
    /// Eight bits with one scale a row everywhere.
    Q8,
    /// Eight bits in attention, four in the feed-forward block and the output matrix, with one scale a row.
    #[value(name = "8/4/4")]
    Mixed,
}
