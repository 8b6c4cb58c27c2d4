//! The KV cache of a layer.
//!
//! Keys and values are stored as `[kv_heads, context, head length]` each, so that the rows of a head are contiguous.
//! The default format, f16, needs half the memory of f32; the golden texts of the tests were generated with f32.
//!
//! A pass writes each of its positions once; this pass and later passes read them. Truncation to fewer positions needs
//! no work here, because the rows after the new end are overwritten before they are read.

use std::collections::BTreeMap;
use std::ops::Range;

use half::f16;
use hearth_kernels::attention::CachedRows;
use hearth_profiles::model::ModelShape;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvCacheOptions {
    /// Maximum number of positions of a sequence.
    pub context: u32,
    pub format: KvCacheFormat,
    /// Number of sequences, each of which has a KV cache of `context` positions; at least 1.
    pub sequences: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum KvCacheFormat {
    #[default]
    F16,
    F32,
}

/// The cached keys, or the cached values, of one layer and sequence.
#[derive(Debug, Clone)]
pub(crate) struct HeadRows {
    store: Store, // [kv_heads, context, head_length]
    context: usize,
    pub(crate) head_length: usize,
}

#[derive(Debug, Clone)]
enum Store {
    F16(Vec<f16>),
    F32(Vec<f32>),
}

/// The KV cache of one layer and sequence.
#[derive(Debug, Clone)]
pub(crate) struct LayerCache {
    pub(crate) keys: HeadRows,
    pub(crate) values: HeadRows,
}

impl LayerCache {
    /// Writes the keys `[kv_heads, key_length]` and values `[kv_heads, value_length]` of the token at `position`.
    pub(crate) fn write(&mut self, position: usize, keys: &[f32], values: &[f32]) {
        for (rows, heads) in [(&mut self.keys, keys), (&mut self.values, values)] {
            for (head, row) in heads.chunks_exact(rows.head_length).enumerate() {
                rows.write(head, position, row);
            }
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.keys.bytes() + self.values.bytes()
    }
}

/// Creates the KV caches of the layers `layers` of a model, keyed by sequence and layer.
pub(crate) fn create_kv_caches(
    layers: impl IntoIterator<Item = u32>,
    options: KvCacheOptions,
    model: &ModelShape,
) -> BTreeMap<(u32, u32), LayerCache> {
    let (heads, context) = (model.kv_heads as usize, options.context as usize);
    let rows = |length| HeadRows::new(options.format, heads, context, length as usize);
    let cache = || LayerCache { keys: rows(model.key_length), values: rows(model.value_length) };
    let of_layer = |layer| (0..options.sequences).map(move |sequence| (sequence, layer));
    layers.into_iter().flat_map(of_layer).map(|key| (key, cache())).collect()
}

impl HeadRows {
    pub(crate) fn new(format: KvCacheFormat, heads: usize, context: usize, head_length: usize) -> HeadRows {
        let count = heads * context * head_length;
        let store = match format {
            KvCacheFormat::F16 => Store::F16(vec![f16::ZERO; count]),
            KvCacheFormat::F32 => Store::F32(vec![0.0; count]),
        };
        HeadRows { store, context, head_length }
    }

    /// Writes the key or value `row`, `[head_length]`, of one head and position.
    pub(crate) fn write(&mut self, head: usize, position: usize, row: &[f32]) {
        let at = (head * self.context + position) * self.head_length;
        match &mut self.store {
            Store::F16(store) => {
                for (to, &from) in store[at..][..self.head_length].iter_mut().zip(row) {
                    *to = f16::from_f32(from);
                }
            }
            Store::F32(store) => store[at..][..self.head_length].copy_from_slice(row),
        }
    }

    pub(crate) fn rows(&self, head: usize, positions: Range<usize>) -> CachedRows<'_> {
        let at = (head * self.context + positions.start) * self.head_length;
        let count = positions.len() * self.head_length;
        match &self.store {
            Store::F16(store) => CachedRows::F16(&store[at..][..count]),
            Store::F32(store) => CachedRows::F32(&store[at..][..count]),
        }
    }

    /// Returns the maximum number of positions.
    pub(crate) fn capacity(&self) -> usize {
        self.context
    }

    fn bytes(&self) -> u64 {
        match &self.store {
            Store::F16(store) => size_of_val(&store[..]) as u64,
            Store::F32(store) => size_of_val(&store[..]) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_reads_the_rows_it_wrote() {
        let mut keys = HeadRows::new(KvCacheFormat::F16, 2, 3, 2);
        keys.write(1, 0, &[1.0, 2.0]);
        keys.write(1, 1, &[3.0, 0.1]);
        let CachedRows::F16(rows) = keys.rows(1, 0..2) else { panic!("stored as f16") };
        assert_eq!(rows, [1.0, 2.0, 3.0, 0.1].map(f16::from_f32));
        let CachedRows::F16(rows) = keys.rows(1, 1..2) else { panic!("stored as f16") };
        assert_eq!(rows, [3.0, 0.1].map(f16::from_f32));
        // 2 heads * 3 positions * 2 dimensions * 2 bytes, for keys and for values.
        let cache = LayerCache { keys: keys.clone(), values: keys };
        assert_eq!(cache.bytes(), 48);
    }
}
