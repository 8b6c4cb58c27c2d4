//! The initial windows of Algorithm 1, in proportion to memory.
//!
//! prima.cpp paper, Algorithm 1, line 1 and its footnote: one round of all L layers in proportion to the memory
//! budgets, without GPU layers. The budget is the available RAM, with Metal its working set, and on Android RAM and
//! what can be swapped out. The paper does not define the rounding. Here every device gets one layer, and the other
//! layers are distributed in proportion by the largest remainder method; ties go to the lower index.
//!
//! Not here: GPU memory, which is not part of the paper's budget.

/// Returns windows in proportion to `budgets`, each of at least one layer; `None` if there are more devices than
/// layers.
pub(crate) fn proportional_windows(budgets: &[u64], layers: u32) -> Option<Vec<u32>> {
    let shared = u128::from(layers).checked_sub(budgets.len() as u128)?;
    let total: u128 = budgets.iter().map(|budget| u128::from(*budget)).sum();
    // If no device has memory, all get equal shares.
    let (total, least) = if total == 0 { (budgets.len() as u128, 1) } else { (total, 0) };
    let parts = budgets.iter().map(|budget| shared * u128::from(*budget).max(least));
    let (mut windows, rests): (Vec<u32>, Vec<u128>) =
        parts.map(|part| (1 + (part / total) as u32, part % total)).unzip();
    let missing = layers - windows.iter().sum::<u32>();
    let mut order: Vec<usize> = (0..rests.len()).collect();
    order.sort_by_key(|device| (std::cmp::Reverse(rests[*device]), *device));
    order.iter().take(missing as usize).for_each(|device| windows[*device] += 1);
    Some(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn largest_remainders_get_the_rest() {
        // 13 - 3 = 10 layers in the ratio 5:3:3 are 4.55, 2.73, 2.73: the last two go to the second and the third.
        assert_eq!(proportional_windows(&[5, 3, 3], 13), Some(vec![5, 4, 4]));
        // All remainders are 1/3, so the lower index gets the layer.
        assert_eq!(proportional_windows(&[1, 1, 1], 4), Some(vec![2, 1, 1]));
    }

    #[test]
    fn every_device_gets_a_layer() {
        assert_eq!(proportional_windows(&[1, 1000, 0], 10), Some(vec![1, 8, 1]));
        assert_eq!(proportional_windows(&[0, 0], 5), Some(vec![3, 2]));
        assert_eq!(proportional_windows(&[0, u64::MAX, u64::MAX], 3), Some(vec![1, 1, 1]));
        assert_eq!(proportional_windows(&[1, 1], 1), None);
    }
}
