//! hearth-exec
