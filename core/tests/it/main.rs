//! Integration tests: links of a cluster, slots of a server, and the model of a phone.

mod links;
mod request_slots;
mod soc;
