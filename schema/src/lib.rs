//! hearth-schema
