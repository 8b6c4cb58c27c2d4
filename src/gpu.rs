//! What computes layers on this machine's GPU?
//!
//! A build without the feature `gpu` has nothing, and says so where a plan asks for it. Choices of kernels that were
//! measured are kept in a file of the user's cache folder; without one, kernels share their work as usual.

use hearth_exec::Accelerator;

/// What a model's layers can be given to.
#[cfg(not(feature = "gpu"))]
pub fn accelerator() -> Option<Accelerator> {
    None
}

/// What a model's layers can be given to. No GPU is looked for before a plan asks for one.
#[cfg(feature = "gpu")]
pub fn accelerator() -> Option<Accelerator> {
    let notes = std::sync::Arc::new(|note: &str| crate::output::tell!("{note}"));
    let tiling = |gpu: &hearth_gpu::Gpu| remembered::choices().get(gpu).unwrap_or(Tiling::USUAL);
    Some(hearth_gpu::accelerator(hearth_gpu::Mask::default(), tiling, notes))
}

#[cfg(feature = "gpu")]
pub use hearth_gpu::kernels::product::Tiling;

/// The file of choices.
#[cfg(feature = "gpu")]
pub mod remembered {
    use std::path::PathBuf;

    use hearth_gpu::tuning::Choices;

    /// Where choices are kept, if there is a place.
    pub fn path() -> Option<PathBuf> {
        let folder =
            |name: &str| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let cache = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")))?;
        Some(cache.join("hearth").join("gpu-kernels"))
    }

    /// What was chosen so far; nothing if there is no file or none that can be read.
    pub fn choices() -> Choices {
        let text = path().and_then(|path| std::fs::read_to_string(path).ok());
        Choices::of_text(&text.unwrap_or_default())
    }
}
