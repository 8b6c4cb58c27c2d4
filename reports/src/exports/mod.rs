//! Exports for other programs: CSV for spreadsheets, and timelines for trace viewers.

pub mod csv;
pub mod perfetto;
