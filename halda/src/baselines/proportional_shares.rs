//! Proportional distribution of layers with cumulative rounding.
//!
//! Of L layers, device m with the weight `d_m` gets the difference of two cumulative shares. They are rounded half up:
//!
//! ```text
//! w_m = round(L (d_1 + ... + d_m)/D) - round(L (d_1 + ... + d_{m-1})/D),     D = sum d
//! ```
//!
//! For example, memory sizes of 8, 8 and 11 and 32 layers give the cumulative shares 9.48, 18.96 and 32. The windows
//! are 9, 10 and 13, as in exo's plan for Llama-3-8B in the prima.cpp paper (section 4.1). A window differs from its
//! share by less than one layer, so it never exceeds an integer limit that its share satisfies.
//!
//! If devices have limited capacity, the layers above it are distributed to devices with free capacity, again in
//! proportion, until all layers are assigned or all devices are full. Apart from rounding, the windows are then
//! min(capacity, lambda d) with the same lambda for all devices.

/// The integer weight of the fastest device in [`speed_weights`]. source: assumed; fine enough to distinguish two
/// devices whose windows differ with [`crate::problem::validation::MAX_MODEL_LAYERS`] layers
const MAX_SPEED_WEIGHT: f64 = (1_u64 << 40) as f64;

/// Returns windows in proportion to `sizes` that sum to `layers`; `None` if all sizes are zero.
pub(crate) fn cumulative_rounding(sizes: &[u64], layers: u32) -> Option<Vec<u32>> {
    let total: u128 = sizes.iter().map(|size| u128::from(*size)).sum();
    let (mut sum, mut before) = (0, 0);
    let window = |size: &u64| {
        sum += u128::from(*size);
        let after = (2 * u128::from(layers) * sum + total).checked_div(2 * total)? as u32;
        Some(after - std::mem::replace(&mut before, after))
    };
    sizes.iter().map(window).collect()
}

/// Returns windows in proportion to the weights, each reduced to the capacity of its device.
pub(crate) fn proportional_within_capacity(weights: &[u64], capacity: &[u32], layers: u32) -> Vec<u32> {
    let shares = cumulative_rounding(weights, layers).unwrap_or_else(|| vec![0; weights.len()]);
    shares.iter().zip(capacity).map(|(share, capacity)| *share.min(capacity)).collect()
}

/// Distributes the layers that are in no window yet to the devices in proportion to the weights, at most `capacity`
/// additional layers to each device. Layers above the total capacity are not assigned.
pub(crate) fn distribute_remaining(windows: &mut [u32], weights: &[u64], capacity: &[u32], layers: u32) {
    let mut free = capacity.to_vec();
    let mut left = layers - windows.iter().sum::<u32>();
    while left > 0 {
        // The minimum weight is one, so that every device with free capacity eventually gets layers.
        let open_weight = |(weight, free): (&u64, &u32)| if *free > 0 { (*weight).max(1) } else { 0 };
        let sizes: Vec<u64> = weights.iter().zip(&free).map(open_weight).collect();
        let Some(shares) = cumulative_rounding(&sizes, left) else { break };
        for (device, share) in shares.into_iter().enumerate() {
            let taken = share.min(free[device]);
            windows[device] += taken;
            free[device] -= taken;
            left -= taken;
        }
    }
}

/// Converts the seconds per layer of each device to integer weights in proportion to its layers per second.
pub(crate) fn speed_weights(layer_seconds: &[f64]) -> Vec<u64> {
    let fastest = layer_seconds.iter().copied().fold(f64::INFINITY, f64::min);
    layer_seconds.iter().map(|seconds| (fastest / seconds * MAX_SPEED_WEIGHT).round() as u64).collect()
}

/// Moves one layer of the largest window to the head, device 0, if the head has none. Ties go to the lower index.
pub(crate) fn ensure_head_layer(windows: &mut [u32]) {
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
    fn windows_sum_to_the_layers() {
        for sizes in [&[1, 1, 1][..], &[u64::MAX, 1], &[0, 5, 0], &[3, 7, 11, 13]] {
            let windows = cumulative_rounding(sizes, 80).unwrap();
            assert_eq!(windows.iter().sum::<u32>(), 80, "{sizes:?}");
        }
        assert_eq!(cumulative_rounding(&[8, 8, 11], 32), Some(vec![9, 10, 13]), "exo in the paper");
        assert_eq!(cumulative_rounding(&[0, 0], 80), None);
    }

    #[test]
    fn excess_goes_to_devices_with_free_capacity() {
        // 14 layers in the ratio 4:2:1 are 8, 4, 2. Of the 8, 5 fit; the other 3 go to the others in the ratio 2:1.
        for (case, weights, capacity, layers, expected) in [
            ("first is full", &[4, 2, 1][..], &[5, 14, 14][..], 14, &[5, 6, 3][..]),
            ("third gets the rest", &[4, 2, 1], &[5, 5, 14], 14, &[5, 5, 4]),
            ("three layers are not assigned", &[4, 2, 1], &[5, 5, 1], 14, &[5, 5, 1]),
            ("a weight of zero excludes no device", &[4, 0], &[5, 14], 14, &[5, 9]),
            ("no capacity", &[1, 1], &[0, 0], 14, &[0, 0]),
            ("no layers", &[1, 1], &[9, 9], 0, &[0, 0]),
        ] {
            let mut windows = vec![0; weights.len()];
            distribute_remaining(&mut windows, weights, capacity, layers);
            assert_eq!(windows, expected, "{case}");
        }
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
        ensure_head_layer(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
        ensure_head_layer(&mut windows);
        assert_eq!(windows, [1, 4, 8, 9]);
    }
}
