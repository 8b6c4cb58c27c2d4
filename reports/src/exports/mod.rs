//! Exports for other programs: a table for spreadsheets, and time lines for trace viewers.

pub mod csv;
pub mod perfetto;
