//! How long does a plan take, and what does every device do meanwhile?
//!
//! A discrete-event simulator. [`engine`] orders events, [`resource`] says when processors, disks and links are
//! done, [`page_cache`] says which bytes must be read again.

pub mod engine;
pub mod page_cache;
pub mod resource;
pub mod storage;
