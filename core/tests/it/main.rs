//! Integration tests: fuzzed documents, links of a cluster, and the model of a phone.

mod document_fuzz;
mod links;
mod soc;
