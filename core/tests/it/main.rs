//! Integration tests: links of a cluster, slots of a server, and the model of a phone.

mod cache_pool;
mod links;
mod soc;
