//! Models: dimensions, quantisations, and the bytes and floating-point operations of each layer.
//!
//! [`ModelShape`] has the dimensions of a model. [`ModelProfile`] has the bytes and the floating-point operations of
//! its layers; it is made from a GGUF file or from a `model/1` document, such as a shipped document:
//!
//! ```
//! let model = hearth_profiles::model::shipped_profile("llama-70b").unwrap();
//! assert_eq!(model.shape.layers.to_string(), "80 layers");
//! assert_eq!(model.total_bytes().to_string(), "39.6 GiB");
//! ```

pub mod architecture;
mod digest;
pub mod document;
pub mod experts;
mod gguf_shape;
pub mod layout;
pub mod profile;
pub mod quant;
pub mod shape;
pub mod shipped;
pub mod tensor_group;
pub mod token_mixer;

pub use architecture::{
    Architecture, ArchitectureSpec, ExpertUse, GateActivation, PairLayout, UnknownArchitecture,
};
pub use document::ModelDocument;
pub use experts::Experts;
pub use layout::{TensorKind, TensorSpec};
pub use profile::{DigestMatch, ModelProfile};
pub use quant::{PartialBlockError, Quant, UnknownQuant};
pub use shape::{ModelShape, ModelShapeError};
pub use shipped::{shipped_document, shipped_names, shipped_profile, shipped_yaml};
pub use tensor_group::{FormatTotals, TensorGroup};
pub use token_mixer::{AttentionShape, DeltaNetShape, Hybrid, SharedKv, TokenMixer};
