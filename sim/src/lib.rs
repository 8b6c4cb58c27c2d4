//! hearth-sim
