//! The inference runtime of one device: weights, tokenizer, decoder layers and sampler.
//!
//! [`Tokenizer`] converts text to tokens, [`InputOutputLayers`] converts tokens to hidden states, [`Stage`] runs the
//! decoder layers of the memory-mapped [`Weights`] over the hidden states, [`InputOutputLayers`] converts the final
//! hidden states to logits, and [`Sampler`] chooses the next token.
//!
//! Not here: the kernels (`hearth_kernels`) and the communication between devices (`hearth_ring`).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

pub mod backend;
pub mod backend_factory;
pub mod cache;
pub mod chat;
pub mod clock;
pub mod cost;
pub mod cpu;
pub mod engine;
pub mod error;
mod experts;
pub mod fetched_file;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
pub mod grammar;
pub mod hyperparameters;
pub mod input_output;
pub mod logit_statistics;
pub mod memory;
pub mod oracle;
pub mod pages;
pub mod pool;
pub mod pooling;
pub mod profile;
pub mod read_counter;
pub mod residency;
pub mod rope;
pub mod sampler;
pub mod speed;
pub mod stage;
pub mod synth;
pub mod token_inputs;
pub mod tokenizer;
pub mod weights;

pub use backend::Backend;
pub use backend_factory::{BackendError, BackendFactory, BackendOptions, UploadProgressReporter};
pub use cache::KvCacheOptions;
pub use chat::{ChatMessage, ChatTemplate, JsonValue, ToolSyntax};
pub use cost::CriticalPathCost;
pub use cpu::{Cpu, CpuBackend};
pub use engine::Engine;
pub use error::ExecError;
pub use experts::{ReplayedRoutes, RouteOptions, RouteRecorder};
pub use grammar::{GrammarCompiler, GrammarMatcher};
pub use input_output::InputOutputLayers;
pub use logit_statistics::{LogitStatistics, LogitSummary};
pub use oracle::Oracle;
pub use pool::{ThreadPool, ThreadPoolOptions};
pub use pooling::Pooling;
pub use sampler::{Sampler, SamplerOptions};
pub use stage::Stage;
pub use tokenizer::{IncrementalDetokenizer, Tokenizer};
pub use weights::{Extent, Weights};
// The format of a KV cache is part of the API of this crate.
pub use hearth_schema::scenario::KvFormat;
