//! What does a model ask of the devices that run it?

pub mod shape;

pub use shape::{Architecture, ModelShape, ShapeError, UnknownArchitecture};
