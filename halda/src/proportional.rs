//! How are layers shared out in proportion to something?
//!
//! Windows are contiguous, so each is the distance of two cumulative shares, each rounded to the nearest layer
//! (half up):
//!
//! ```text
//! w_m = round(L (d_1 + ... + d_m)/D) - round(L (d_1 + ... + d_{m-1})/D),     D = sum d
//! ```
//!
//! Memories 8, 8, 11 and 32 layers give 9.48 -> 9, 18.96 -> 19, 32: windows 9, 10, 13, exo's plan for Llama-3-8B
//! in the prima.cpp paper (section 4.1). Every window is at most one layer off its share, they sum to L, and a
//! share between two whole numbers gives a window between the same two: rounding breaks no whole limit.
//!
//! Not here: what to be proportional to. That is the strategies' affair.

/// The windows of the formula above, `None` if all sizes are zero.
pub(crate) fn cumulative_rounding(sizes: &[u64], layers: u32) -> Option<Vec<u32>> {
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    let mut before = 0;
    let mut sum = 0;
    sizes
        .iter()
        .map(|size| {
            sum += u128::from(*size);
            let after = (2 * u128::from(layers) * sum + total).checked_div(2 * total)? as u32;
            let window = after - before;
            before = after;
            Some(window)
        })
        .collect()
}

/// Gives device 0, the head, one layer of the largest window if it has none itself; ties go to the lower index.
pub(crate) fn keep_head(windows: &mut [u32]) {
    if windows[0] == 0 {
        let largest = (0..windows.len()).rev().max_by_key(|device| windows[*device]).unwrap_or(0);
        windows[largest] -= 1;
        windows[0] = 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_papers_example() {
        assert_eq!(cumulative_rounding(&[8, 8, 11], 32), Some(vec![9, 10, 13]));
    }

    #[test]
    fn windows_always_cover_the_model() {
        for sizes in [&[1, 1, 1][..], &[u64::MAX, 1], &[0, 5, 0], &[3, 7, 11, 13]] {
            let windows = cumulative_rounding(sizes, 80).unwrap();
            assert_eq!(windows.iter().sum::<u32>(), 80, "{sizes:?}");
        }
        assert_eq!(cumulative_rounding(&[0, 0], 80), None);
    }

    #[test]
    fn the_head_takes_its_layer_from_the_largest_window() {
        let mut windows = [0, 4, 9, 9];
        keep_head(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
        keep_head(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
    }
}
