//! Tests of the public interface of the workflow library.

mod limits;
