//! How long does a plan take, and what does every device do meanwhile?
//!
//! A discrete-event simulator. [`engine`] orders events, [`resource`] says when processors, disks and links are
//! done.

pub mod engine;
pub mod resource;
