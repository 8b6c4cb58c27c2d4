//! hearth-reports
