//! The cache of a layer: the keys and values of attention, or the state of a gated delta net.
//!
//! Keys and values are stored as `[kv_heads, context, head length]` each, so that the rows of a head are contiguous.
//! The default format, f16, needs half the memory of f32; the golden texts of the tests were generated with f32. The
//! formats `Q8_0` and `Q4_0` need about a half and a quarter of the memory of f16; their blocks are parts of a row.
//!
//! The arrays have room for the whole context, but the system provides memory only where something was written. So many
//! sequences can have a long context, while few use it. `LayerCache::release` gives memory back.
//!
//! A pass writes each of its positions once; this pass and later passes read them. Truncation to fewer positions needs
//! no work here, because the rows after the new end are overwritten before they are read. A state can only be cleared,
//! which happens in a pass that begins at position 0.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;
use hearth_kernels::attention::CachedRows;
use hearth_kernels::quantise_row;
use hearth_profiles::Format;
use hearth_profiles::measure::mapping::{keep_small_pages, release_pages};
use hearth_profiles::model::{AttentionShape, DeltaNetShape, ModelShape, TokenMixer};
use hearth_schema::scenario::KvFormat;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheOptions {
    /// Maximum number of positions of a sequence.
    pub context: u32,
    pub format: KvFormat,
    /// Number of sequences, each of which has a KV cache of `context` positions; at least 1.
    pub sequences: u32,
}

/// The cached keys, or the cached values, of one layer and sequence.
#[derive(Debug, Clone)]
pub(crate) struct HeadRows {
    store: Store, // [kv_heads, context, head_length]
    heads: usize,
    context: usize,
    pub(crate) head_length: usize,
}

#[derive(Debug, Clone)]
enum Store {
    F16(Vec<f16>),
    F32(Vec<f32>),
    Blocks(Format, Vec<u8>),
}

/// What a layer keeps of the earlier tokens of a sequence.
#[derive(Debug, Clone)]
pub(crate) enum LayerCache {
    Attention(KvCache),
    DeltaNet(DeltaNetState),
}

impl LayerCache {
    /// Gives the memory of the keys and values back to the system. Their contents are undefined then. A state stays: a
    /// sequence that begins clears it.
    pub(crate) fn release(&mut self) {
        if let LayerCache::Attention(cache) = self {
            cache.keys.release();
            cache.values.release();
        }
    }

    /// Copies the first `count` positions from the cache of the same layer of another sequence. Returns false if this is
    /// not possible, because the layer has a state.
    pub(crate) fn copy_positions(&mut self, from: &LayerCache, count: usize) -> bool {
        let (LayerCache::Attention(to), LayerCache::Attention(from)) = (self, from) else { return false };
        to.keys.copy_positions(&from.keys, count);
        to.values.copy_positions(&from.values, count);
        true
    }

    pub(crate) fn bytes(&self) -> u64 {
        match self {
            LayerCache::Attention(cache) => cache.keys.bytes() + cache.values.bytes(),
            LayerCache::DeltaNet(state) => state.bytes(),
        }
    }
}

/// The state of a gated delta net. It cannot be truncated to fewer tokens, only cleared.
#[derive(Debug, Clone)]
pub(crate) struct DeltaNetState {
    /// The matrices of the value heads, `[value heads, values, keys]`.
    pub(crate) matrices: Vec<f32>,
    /// The last queries, keys and values before the convolution, `[convolution length - 1, width]` each.
    pub(crate) history: [Vec<f32>; 3],
}

impl DeltaNetState {
    fn new(shape: &DeltaNetShape) -> DeltaNetState {
        let earlier = shape.convolution_length as usize - 1;
        let widths = [shape.key_width(), shape.key_width(), shape.value_width()];
        DeltaNetState {
            matrices: vec![0.0; shape.state_elements() as usize],
            history: widths.map(|width| vec![0.0; earlier * width as usize]),
        }
    }

    /// Clears the state, so that a sequence can begin.
    pub(crate) fn clear(&mut self) {
        self.matrices.fill(0.0);
        self.history.iter_mut().for_each(|rows| rows.fill(0.0));
    }

    fn bytes(&self) -> u64 {
        let elements = self.matrices.len() + self.history.iter().map(Vec::len).sum::<usize>();
        (elements * size_of::<f32>()) as u64
    }
}

/// The KV cache of one layer and sequence.
#[derive(Debug, Clone)]
pub(crate) struct KvCache {
    pub(crate) keys: HeadRows,
    pub(crate) values: HeadRows,
}

impl KvCache {
    fn new(shape: &AttentionShape, options: KvCacheOptions) -> KvCache {
        let (heads, context) = (shape.kv_heads as usize, options.context as usize);
        let rows = |length| HeadRows::new(options.format, heads, context, length as usize);
        KvCache { keys: rows(shape.key_length), values: rows(shape.value_length) }
    }

    /// Writes the keys `[kv_heads, key_length]` and values `[kv_heads, value_length]` of the token at `position`.
    pub(crate) fn write(&mut self, position: usize, keys: &[f32], values: &[f32]) {
        for (rows, heads) in [(&mut self.keys, keys), (&mut self.values, values)] {
            for (head, row) in heads.chunks_exact(rows.head_length).enumerate() {
                rows.write(head, position, row);
            }
        }
    }
}

/// Creates the caches that the layers `layers` of a model need, keyed by sequence and layer. Also returns the other
/// layers whose keys and values they use, which have caches too.
pub(crate) fn create_kv_caches(
    layers: impl IntoIterator<Item = u32>,
    options: KvCacheOptions,
    model: &ModelShape,
) -> (BTreeMap<(u32, u32), LayerCache>, Vec<u32>) {
    let own: BTreeSet<u32> = layers.into_iter().collect();
    // Layers that use keys and values of others have no cache of their own.
    let stored: BTreeSet<u32> = own.iter().map(|&layer| model.kv_layer(layer)).collect();
    let copied = stored.difference(&own).copied().collect();
    let cache = |layer| match model.mixer(layer) {
        TokenMixer::Attention(shape) => LayerCache::Attention(KvCache::new(&shape, options)),
        TokenMixer::DeltaNet(shape) => LayerCache::DeltaNet(DeltaNetState::new(&shape)),
    };
    let of_layer = |layer| (0..options.sequences).map(move |sequence| (sequence, layer));
    (stored.into_iter().flat_map(of_layer).map(|key| (key, cache(key.1))).collect(), copied)
}

impl HeadRows {
    pub(crate) fn new(format: KvFormat, heads: usize, context: usize, head_length: usize) -> HeadRows {
        let count = heads * context * head_length;
        // The zeroes come from the system, and take no memory.
        let store = match format {
            KvFormat::F16 => Store::F16(bytemuck::zeroed_vec(count)),
            KvFormat::F32 => Store::F32(bytemuck::zeroed_vec(count)),
            KvFormat::Q8_0 | KvFormat::Q4_0 => {
                let format = format.format();
                Store::Blocks(format, bytemuck::zeroed_vec(heads * context * row_bytes(format, head_length)))
            }
        };
        let rows = HeadRows { store, heads, context, head_length };
        // A huge page would provide memory for hundreds of positions at a time, and for several heads.
        keep_small_pages(rows.as_bytes());
        rows
    }

    fn as_bytes(&self) -> &[u8] {
        match &self.store {
            Store::F16(store) => bytemuck::cast_slice(store),
            Store::F32(store) => bytemuck::cast_slice(store),
            Store::Blocks(_, store) => store,
        }
    }

    fn as_bytes_mut(&mut self) -> &mut [u8] {
        match &mut self.store {
            Store::F16(store) => bytemuck::cast_slice_mut(store),
            Store::F32(store) => bytemuck::cast_slice_mut(store),
            Store::Blocks(_, store) => store,
        }
    }

    fn release(&mut self) {
        release_pages(self.as_bytes_mut());
    }

    /// Copies the first `count` positions of each head.
    fn copy_positions(&mut self, from: &HeadRows, count: usize) {
        let of_head = from.as_bytes().len() / from.heads.max(1);
        let copied = of_head / self.context.max(1) * count.min(self.context);
        let (to, from) = (self.as_bytes_mut(), from.as_bytes());
        for (to, from) in to.chunks_exact_mut(of_head.max(1)).zip(from.chunks_exact(of_head.max(1))) {
            to[..copied].copy_from_slice(&from[..copied]);
        }
    }

    /// Writes the key or value `row`, `[head_length]`, of one head and position.
    pub(crate) fn write(&mut self, head: usize, position: usize, row: &[f32]) {
        let at = (head * self.context + position) * self.head_length;
        match &mut self.store {
            Store::F16(store) => store[at..][..self.head_length].convert_from_f32_slice(row),
            Store::F32(store) => store[at..][..self.head_length].copy_from_slice(row),
            Store::Blocks(format, store) => {
                let bytes = row_bytes(*format, self.head_length);
                let at = (head * self.context + position) * bytes;
                quantise_row(*format, row, &mut store[at..][..bytes]);
            }
        }
    }

    pub(crate) fn rows(&self, head: usize, positions: Range<usize>) -> CachedRows<'_> {
        let at = (head * self.context + positions.start) * self.head_length;
        let count = positions.len() * self.head_length;
        match &self.store {
            Store::F16(store) => CachedRows::F16(&store[at..][..count]),
            Store::F32(store) => CachedRows::F32(&store[at..][..count]),
            Store::Blocks(format, store) => {
                let bytes = row_bytes(*format, self.head_length);
                let at = (head * self.context + positions.start) * bytes;
                CachedRows::Blocks(*format, &store[at..][..positions.len() * bytes])
            }
        }
    }

    /// Returns the maximum number of positions.
    pub(crate) fn capacity(&self) -> usize {
        self.context
    }

    fn bytes(&self) -> u64 {
        self.as_bytes().len() as u64
    }
}

/// Returns the number of bytes of a row in blocks. The length of a head was checked with the plan.
fn row_bytes(format: Format, head_length: usize) -> usize {
    let bytes = format.row_bytes(head_length as u64).expect("a head must be whole blocks");
    bytes.0 as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_the_rows_it_wrote() {
        let mut keys = HeadRows::new(KvFormat::F16, 2, 3, 2);
        keys.write(1, 0, &[1.0, 2.0]);
        keys.write(1, 1, &[3.0, 0.1]);
        let CachedRows::F16(rows) = keys.rows(1, 0..2) else { panic!("stored as f16") };
        assert_eq!(rows, [1.0, 2.0, 3.0, 0.1].map(f16::from_f32));
        let CachedRows::F16(rows) = keys.rows(1, 1..2) else { panic!("stored as f16") };
        assert_eq!(rows, [3.0, 0.1].map(f16::from_f32));
        let mut small = HeadRows::new(KvFormat::Q4_0, 2, 3, 64);
        small.write(1, 1, &[1.0; 64]);
        let CachedRows::Blocks(Format::Q4_0, blocks) = small.rows(1, 1..3) else {
            panic!("stored in blocks")
        };
        // Two rows of two blocks of 18 bytes; only the first row has been written.
        assert!(blocks.len() == 72 && blocks[..36].iter().any(|byte| *byte != 0));
        assert_eq!((&blocks[36..], small.bytes()), (&[0; 36][..], 2 * 3 * 36));
        // 2 heads * 3 positions * 2 dimensions * 2 bytes, for keys and for values.
        let cache = LayerCache::Attention(KvCache { keys: keys.clone(), values: keys });
        assert_eq!(cache.bytes(), 48);
    }

    #[test]
    fn positions_are_copied_and_released() {
        for format in [KvFormat::F16, KvFormat::F32, KvFormat::Q8_0] {
            let mut first = HeadRows::new(format, 2, 5000, 64);
            for position in 0..5000 {
                (0..2).for_each(|head| first.write(head, position, &[(position + head) as f32 / 5000.0; 64]));
            }
            let mut second = HeadRows::new(format, 2, 5000, 64);
            second.copy_positions(&first, 4000);
            for head in 0..2 {
                let same =
                    format!("{:?}", first.rows(head, 0..4000)) == format!("{:?}", second.rows(head, 0..4000));
                assert!(
                    same && format!("{:?}", second.rows(head, 4000..4001))
                        != format!("{:?}", first.rows(head, 4000..4001))
                );
            }
            let resident = |rows: &HeadRows| {
                let pages =
                    hearth_profiles::measure::mapping::page_residency(rows.as_bytes()).expect("Linux");
                pages.iter().filter(|&&is_resident| is_resident).count()
            };
            let before = resident(&second);
            second.release();
            assert!(before > 50 && resident(&second) <= 2, "{before} {}", resident(&second));
            second.write(1, 3, &[1.0; 64]);
        }
    }
}
