//! Tests of the workflow library through its public interface.

mod limits;
