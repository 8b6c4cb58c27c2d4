//! Integration tests: links of a cluster, and the model of a phone.

mod links;
mod soc;
