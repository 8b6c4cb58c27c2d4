//! Documents read, links joined and phones computed, checked across modules.

mod document_fuzz;
mod links;
mod soc;
