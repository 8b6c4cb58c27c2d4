//! Model hub: finds, downloads and verifies GGUF models from Hugging Face in the cache that its other tools share.
//!
//! A [`Hub`] lists the models of a repository, which differ in their quantisation ([`Variant`]), downloads one of them,
//! and returns the path of its file. Everything that a server sends is checked: names, sizes, redirects, and the
//! SHA-256 digest of each file. Every wait has a deadline ([`RetryPolicy`]).
//!
//! ```no_run
//! use hearth_hub::{Hub, HubConfig, Monitor};
//!
//! let hub = Hub::new(HubConfig::from_env()?);
//! let name = "hf:Qwen/Qwen3-8B-GGUF:Q4_K_M".parse().expect("a valid name");
//! let path = hub.locate(&name, &Monitor::NONE)?;
//! # Ok::<(), hearth_hub::HubError>(())
//! ```
//!
//! Not here: the syntax of the names (`hearth_schema::hub_model`), and the content of the files
//! (`hearth_profiles::gguf`).

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr, clippy::exit))]

mod cache;
mod config;
mod download;
mod error;
mod http;
mod hub;
mod listing;
mod monitor;
mod variant;

pub use config::{HubConfig, RetryPolicy};
pub use error::{HubError, HubErrorKind};
pub use hub::{Hub, ListedModel, Pull};
pub use listing::{Listing, RemoteFile};
pub use monitor::{Activity, Monitor, Progress};
pub use variant::{Variant, select};
