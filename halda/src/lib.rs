//! hearth-halda
