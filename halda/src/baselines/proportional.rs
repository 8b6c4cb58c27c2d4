//! Proportional sharing of layers with cumulative rounding.
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
//! Where devices have limited memory, what exceeds the limit of one is shared among those that have
//! some left, again in proportion, until all is placed or all are full. But for the rounding these are the
//! windows min(capacity, lambda d) with one lambda for all.
//!
//! Not here: what to be proportional to. The strategies decide that.

/// The weight of the fastest device where weights are speeds. source: assumed; fine enough to separate two devices
/// whose shares of [`crate::problem::validation::MAX_MODEL_LAYERS`] layers differ.
const FASTEST_WEIGHT: f64 = (1_u64 << 40) as f64;

/// Returns the windows of the formula above, `None` if all sizes are zero.
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

/// Distributes `layers` in proportion to the weights, at most `capacity` to each device. Layers that exceed all
/// capacities are not placed.
pub(crate) fn within_room(weights: &[u64], capacity: &[u32], layers: u32) -> Vec<u32> {
    let mut placed = vec![0; capacity.len()];
    let mut left = layers;
    while left > 0 {
        // A weight of at least one: every device with memory left gets a share in the end.
        let open = |device: usize| placed[device] < capacity[device];
        let sizes: Vec<u64> = weights
            .iter()
            .enumerate()
            .map(|(device, weight)| if open(device) { (*weight).max(1) } else { 0 })
            .collect();
        let Some(shares) = cumulative_rounding(&sizes, left) else { break };
        for (device, share) in shares.into_iter().enumerate() {
            let taken = share.min(capacity[device] - placed[device]);
            placed[device] += taken;
            left -= taken;
        }
    }
    placed
}

/// Converts seconds per layer to integer weights in proportion to layers per second.
pub(crate) fn speed_weights(layer_seconds: &[f64]) -> Vec<u64> {
    let fastest = layer_seconds.iter().copied().fold(f64::INFINITY, f64::min);
    layer_seconds.iter().map(|seconds| (fastest / seconds * FASTEST_WEIGHT).round() as u64).collect()
}

/// Moves one layer of the largest window to device 0, the head, if it has none; ties go to the lower index.
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
    fn paper_example_of_exo() {
        assert_eq!(cumulative_rounding(&[8, 8, 11], 32), Some(vec![9, 10, 13]));
    }

    #[test]
    fn windows_sum_to_the_layers() {
        for sizes in [&[1, 1, 1][..], &[u64::MAX, 1], &[0, 5, 0], &[3, 7, 11, 13]] {
            let windows = cumulative_rounding(sizes, 80).unwrap();
            assert_eq!(windows.iter().sum::<u32>(), 80, "{sizes:?}");
        }
        assert_eq!(cumulative_rounding(&[0, 0], 80), None);
    }

    #[test]
    fn excess_goes_to_devices_with_room() {
        // 4 : 2 : 1 of 14 layers are 8, 4, 2; the first holds 5, and its 3 go to the others as 2 : 1.
        assert_eq!(within_room(&[4, 2, 1], &[5, 14, 14], 14), [5, 6, 3]);
        // Then the second is full too, and the third takes what is left.
        assert_eq!(within_room(&[4, 2, 1], &[5, 5, 14], 14), [5, 5, 4]);
        assert_eq!(within_room(&[4, 2, 1], &[5, 5, 1], 14), [5, 5, 1], "three layers find no room");
        assert_eq!(within_room(&[4, 0], &[5, 14], 14), [5, 9], "room counts, however slow");
        assert_eq!(within_room(&[1, 1], &[0, 0], 14), [0, 0]);
        assert_eq!(within_room(&[1, 1], &[9, 9], 0), [0, 0]);
    }

    #[test]
    fn speed_weights_are_inverse_to_times() {
        let one = 1 << 40;
        assert_eq!(speed_weights(&[0.25, 0.5, 1.0]), [one, one / 2, one / 4]);
        assert_eq!(speed_weights(&[5e-324, 1e300]), [one, 0]);
    }

    #[test]
    fn head_takes_its_layer_from_the_largest_window() {
        let mut windows = [0, 4, 9, 9];
        keep_head(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
        keep_head(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
    }
}
