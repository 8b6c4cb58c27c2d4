//! Escaping of names from a trace, and rounding of numbers such that printed columns add up.

pub mod escape;
pub mod numbers;

/// Returns the distinct names, in the order in which they first occur.
pub fn distinct_names<'n>(names: impl Iterator<Item = &'n str>) -> Vec<&'n str> {
    let mut distinct = Vec::new();
    for name in names {
        if !distinct.contains(&name) {
            distinct.push(name);
        }
    }
    distinct
}
