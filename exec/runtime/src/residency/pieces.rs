//! Pieces of a managed share: cuts the matrices of a device into what is read, awaited and evicted as one.
//!
//! A piece is a run of one matrix, cut where pages begin, in the order in which the computation uses it:
//! tensor by tensor, rows upward. Two tensors may share a page; it comes with whichever is read first, and is not
//! evicted with either. The norms, some KiB a layer,
//! are no pieces: they are always kept.

use std::ops::Range;

use hearth_core::residency::PieceId;
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

#[derive(Debug)]
pub struct Pieces {
    /// In the order of use.
    pub list: Vec<Piece>,
    /// The parts of the share, with their pieces.
    pub parts: Vec<(ModelPart, Range<PieceId>)>,
    /// The pieces that are always kept.
    pub fixed: Vec<Extent>,
    /// The pieces of each visit: those that are used without a pause.
    pub visits: Vec<Vec<PieceId>>,
    /// Indices of `list`, by address.
    by_address: Vec<PieceId>,
}

impl Pieces {
    /// The pieces of the device at a place of the plan.
    pub fn new(weights: &Weights, plan: &Plan, place: usize) -> Self {
        let size = plan.devices[place].residency.piece().0 as usize;
        let (mut pieces, mut parts, mut fixed) = (Vec::new(), Vec::new(), Vec::new());
        let mut visited = Vec::new();
        for visit in visits(plan, place) {
            let first = pieces.len();
            for part in visit {
                let start = pieces.len();
                for extent in weights.matrices_of(&part) {
                    cut(weights, extent, size, &mut pieces);
                }
                fixed.extend(weights.vectors_of(&part));
                parts.push((part, start as PieceId..pieces.len() as PieceId));
            }
            visited.push((first as PieceId..pieces.len() as PieceId).collect());
        }
        let mut by_address: Vec<PieceId> = (0..pieces.len() as PieceId).collect();
        by_address.sort_unstable_by_key(|&piece| pieces[piece as usize].addresses.start);
        Self { list: pieces, parts, fixed, visits: visited, by_address }
    }

    /// The piece at an address.
    pub fn at(&self, address: usize) -> Option<PieceId> {
        let addresses = |piece: PieceId| &self.list[piece as usize].addresses;
        let after = self.by_address.partition_point(|&piece| addresses(piece).start <= address);
        let piece = *self.by_address.get(after.checked_sub(1)?)?;
        addresses(piece).contains(&address).then_some(piece)
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
