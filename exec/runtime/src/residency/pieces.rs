//! The pieces of managed residency: divides the matrices of a device into units that are read, awaited and evicted.
//!
//! A piece is a contiguous part of one matrix, cut at page boundaries. Pieces are in the order in which the computation
//! uses them: tensor by tensor, in ascending rows. A page that two tensors share is read with the first tensor, and not
//! evicted with either. Norms and biases, a few KiB per layer, do not belong to pieces: they are always kept in memory.
//! The matrices of experts are not divided: an expert is read and evicted as a whole (`super::experts`).

use std::ops::Range;

use hearth_core::residency::PieceId;
use hearth_core::schedule::{ModelPart, parts_by_busy_period};
use hearth_profiles::measure::mapping::page_bytes;
use hearth_schema::Plan;

use crate::weights::{Extent, Weights};

/// A contiguous part of one matrix, which is read and evicted as a unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    pub extent: Extent,
    /// The memory addresses of the piece in this process.
    pub addresses: Range<usize>,
    /// Total size of the pages that contain bytes of the piece.
    pub touched_page_bytes: u64,
}

/// The pieces of the matrices of a device, except those of experts.
#[derive(Debug)]
pub struct PieceTable {
    /// The pieces in the order of use.
    pub pieces_in_order_of_use: Vec<Piece>,
    /// The parts of the model that the device computes, each with the range of its pieces.
    pub pieces_by_part: Vec<(ModelPart, Range<PieceId>)>,
    /// The extents of the norms and biases, which are always kept in memory.
    pub vector_extents: Vec<Extent>,
    /// The pieces of each busy period, in which the device computes several parts without waiting for other devices.
    pub busy_periods: Vec<Vec<PieceId>>,
    /// The indices of the pieces in `pieces_in_order_of_use`, sorted by address.
    by_address: Vec<PieceId>,
}

impl PieceTable {
    /// Creates the pieces of the device with the index `device` in the plan.
    pub fn new(weights: &Weights, plan: &Plan, device: usize) -> Self {
        let size = plan.devices[device].residency.piece_bytes().0 as usize;
        let (mut pieces, mut pieces_by_part) = (Vec::new(), Vec::new());
        let (mut vector_extents, mut busy_periods) = (Vec::new(), Vec::new());
        for parts in parts_by_busy_period(plan, device) {
            let first = pieces.len();
            for part in parts {
                let start = pieces.len();
                for extent in weights.shared_matrix_extents(&part) {
                    cut(weights, extent, size, &mut pieces);
                }
                vector_extents.extend(weights.vector_extents(&part));
                pieces_by_part.push((part, start as PieceId..pieces.len() as PieceId));
            }
            busy_periods.push((first as PieceId..pieces.len() as PieceId).collect());
        }
        let mut by_address: Vec<PieceId> = (0..pieces.len() as PieceId).collect();
        by_address.sort_unstable_by_key(|&piece| pieces[piece as usize].addresses.start);
        Self { pieces_in_order_of_use: pieces, pieces_by_part, vector_extents, busy_periods, by_address }
    }

    /// Returns the piece that contains a memory address, or `None` if the address is outside all pieces.
    pub fn piece_at(&self, address: usize) -> Option<PieceId> {
        let addresses = |piece: PieceId| &self.pieces_in_order_of_use[piece as usize].addresses;
        let after = self.by_address.partition_point(|&piece| addresses(piece).start <= address);
        let piece = *self.by_address.get(after.checked_sub(1)?)?;
        addresses(piece).contains(&address).then_some(piece)
    }
}

/// Cuts the matrix at `extent` into pieces of about `size` bytes and appends them to `pieces`. A small remainder is
/// added to the last piece.
fn cut(weights: &Weights, extent: Extent, size: usize, pieces: &mut Vec<Piece>) {
    let Some(bytes) = weights.mapped_bytes(extent) else { return };
    let page = page_bytes();
    let (begin, end) = (bytes.as_ptr() as usize, bytes.as_ptr() as usize + bytes.len());
    let mut at = begin;
    while at < end {
        let next = (at + size) / page * page;
        let next = if next <= at || next + size / 2 >= end { end } else { next };
        let own =
            Extent { offset: extent.offset + (at - begin) as u64, length: (next - at) as u64, ..extent };
        let pages = next.next_multiple_of(page) - at / page * page;
        pieces.push(Piece { extent: own, addresses: at..next, touched_page_bytes: pages as u64 });
        at = next;
    }
}
