//! In which pieces does a device that manages its own residency keep and stream its weights?
//!
//! A piece is a run of one matrix, cut where pages begin, in the order in which the computation uses it:
//! tensor by tensor, rows upward. It is what is read, waited for and given up as one. Two tensors may share a
//! page; it comes with whichever is read first, and is not given up with either. The norms, some KiB a layer,
//! are no pieces: they are always kept.

use std::ops::Range;

use hearth_core::residency::Share;
use hearth_core::schedule::ModelPart;
use hearth_core::schedule::visits;
use hearth_schema::Plan;

use crate::pages::page_bytes;
use crate::weights::{Extent, Weights};

/// A run of one matrix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where in the file.
    pub extent: Extent,
    /// Where in this process.
    pub addresses: Range<usize>,
    /// Bytes of the pages that it touches.
    pub pages: u64,
}

/// All pieces of a device.
#[derive(Debug)]
pub struct Pieces {
    /// In the order of use.
    pub list: Vec<Piece>,
    /// Which pieces a part has.
    pub parts: Vec<(ModelPart, Range<usize>)>,
    /// What is always kept.
    pub fixed: Vec<Extent>,
    /// Which pieces are given up first.
    pub share: Share,
    /// Indices of `list`, by address.
    by_address: Vec<usize>,
}

impl Pieces {
    /// The pieces of the device at a place of the plan.
    pub fn new(weights: &Weights, plan: &Plan, place: usize) -> Self {
        let size = plan.devices[place].residency.piece().0 as usize;
        let (mut pieces, mut parts, mut fixed) = (Vec::new(), Vec::new(), Vec::new());
        let mut bytes = Vec::new();
        for visit in visits(plan, place) {
            let first = pieces.len();
            for part in visit {
                let start = pieces.len();
                for extent in weights.matrices_of(&part) {
                    cut(weights, extent, size, &mut pieces);
                }
                fixed.extend(weights.vectors_of(&part));
                parts.push((part, start..pieces.len()));
            }
            bytes.push(pieces[first..].iter().map(|piece| piece.pages).collect());
        }
        let mut by_address: Vec<usize> = (0..pieces.len()).collect();
        by_address.sort_unstable_by_key(|&piece| pieces[piece].addresses.start);
        Self { list: pieces, parts, fixed, share: Share::new(&bytes), by_address }
    }

    /// The piece at an address.
    pub fn at(&self, address: usize) -> Option<usize> {
        let after = self.by_address.partition_point(|&piece| self.list[piece].addresses.start <= address);
        let piece = *self.by_address.get(after.checked_sub(1)?)?;
        self.list[piece].addresses.contains(&address).then_some(piece)
    }
}

/// Cuts a matrix into pieces of about `size` bytes; a small rest goes to the last one.
fn cut(weights: &Weights, extent: Extent, size: usize, pieces: &mut Vec<Piece>) {
    let Some(bytes) = weights.bytes(extent) else { return };
    let page = page_bytes();
    let (begin, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
    let mut at = begin;
    while at < end {
        let next = (at + size) / page * page;
        let next = if next <= at || next + size / 2 >= end { end } else { next };
        let own =
            Extent { offset: extent.offset + (at - begin) as u64, length: (next - at) as u64, ..extent };
        let pages = next.next_multiple_of(page) - at / page * page;
        pieces.push(Piece { extent: own, addresses: at..next, pages: pages as u64 });
        at = next;
    }
}
