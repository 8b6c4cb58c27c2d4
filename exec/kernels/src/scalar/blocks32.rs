//! Scalar dot products of weights in blocks of 32 with rounded activations.
//!
//! Minima are added, not subtracted; the minimum of a block is multiplied by the sum of the block's activations.

use super::total;
use crate::activations::QuantisedRow;
use crate::blocks::{BlockIq4Nl, BlockQ4_0, BlockQ4_1, BlockQ5_0, BlockQ5_1, BlockQ8_0, ScaledBlock, blocks};

macro_rules! dots {
    ($($name:ident: $block:ident, |$this:ident, $index:ident| $weight:expr;)+) => {$(
        pub(crate) fn $name(row: &[u8], input: QuantisedRow<'_>) -> f32 {
            dot::<$block>(row, input, |$this, $index| i32::from($weight))
        }
    )+};
}
dots! {
    dot_q4_0: BlockQ4_0, |block, index| block.quant(index);
    dot_q4_1: BlockQ4_1, |block, index| block.quant(index);
    dot_q5_0: BlockQ5_0, |block, index| block.quant(index);
    dot_q5_1: BlockQ5_1, |block, index| block.quant(index);
    dot_q8_0: BlockQ8_0, |block, index| block.quants[index];
    dot_iq4_nl: BlockIq4Nl, |block, index| block.quant(index);
}

fn dot<B: ScaledBlock>(row: &[u8], input: QuantisedRow<'_>, quant: impl Fn(&B, usize) -> i32) -> f32 {
    let mut sum = 0.0f32;
    for (at, block) in blocks::<B>(row).iter().enumerate() {
        let quants = &input.quants[32 * at..][..32];
        let products = total(quants, |j| quant(block, j));
        sum = (block.scale() * input.scales[at]).mul_add(products as f32, sum);
        if B::MINIMUM {
            sum = (block.minimum() * input.scales[at]).mul_add(total(quants, |_| 1) as f32, sum);
        }
    }
    sum
}
