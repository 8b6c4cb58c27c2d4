//! Published results of the prima.cpp paper for its testbeds.
//!
//! The times and ratios are as printed; each published system is assigned to the strategy of ours that plans in the
//! same way. No parameter of the devices in `scenarios/paper/devices` was inferred from these results. The shipped
//! profiles d1 to d4 state which of their parameters were inferred from Table 4.
//!
//! Not here: our results ([`crate::paper`]).

/// A row of Table 4 of the prima.cpp paper: milliseconds per output token on D1 to D4.
pub struct Table4Row {
    pub model_size: &'static str,
    /// Time with llama.cpp on D3.
    pub llama_cpp_ms: f64,
    /// Time with prima.cpp and the partitioning of exo.
    pub without_halda_ms: f64,
    /// Time with prima.cpp without prefetching.
    pub without_prefetch_ms: f64,
    pub prima_cpp_ms: f64,
}

/// The rows of Table 4. source: prima.cpp paper
pub const TABLE_4: [Table4Row; 7] = [
    row("8b", [15.0, 78.0, 15.0, 15.0]),
    row("14b", [20.0, 131.0, 20.0, 20.0]),
    row("30b", [202.0, 258.0, 79.0, 72.0]),
    row("45b", [328.0, 409.0, 263.0, 233.0]),
    row("60b", [7965.0, 7053.0, 532.0, 468.0]),
    row("65b", [8807.0, 12253.0, 688.0, 569.0]),
    row("70b", [10120.0, 20848.0, 755.0, 674.0]),
];

const fn row(model_size: &'static str, times_ms: [f64; 4]) -> Table4Row {
    let [llama_cpp_ms, without_halda_ms, without_prefetch_ms, prima_cpp_ms] = times_ms;
    Table4Row { model_size, llama_cpp_ms, without_halda_ms, without_prefetch_ms, prima_cpp_ms }
}

impl Table4Row {
    /// Returns the published system that plans like our `strategy`, and the time per token in milliseconds.
    pub fn published_tpot_ms(&self, strategy: &str) -> Option<(&'static str, f64)> {
        match strategy {
            "single" => Some(("llama.cpp", self.llama_cpp_ms)),
            "mem" => Some(("w/o halda", self.without_halda_ms)),
            "exact" | "halda" | "overlap" => Some(("prima.cpp", self.prima_cpp_ms)),
            _ => None,
        }
    }
}

/// Returns the published range of the time per token with MemSched (`mem`) or PerfSched (`perf`), relative to Halda.
/// The sizes 8B to 45B have one range, and so do 60B and 65B. source: prima.cpp paper, appendix A.10, Fig. 10
pub fn heuristic_slowdown_range(heuristic: &str, size: &str) -> [f64; 2] {
    let (mem, perf) = match size {
        "70b" => ([3.3, 3.3], [1.6, 1.6]),
        "60b" | "65b" => ([1.9, 3.3], [1.6, 1.8]),
        _ => ([4.5, 8.8], [1.1, 1.5]),
    };
    if heuristic == "mem" { mem } else { perf }
}

/// Maximum relative distance from a published range at which a ratio counts as matching. source: assumed
pub const RANGE_TOLERANCE: f64 = 0.25;

pub fn is_within_tolerance(ratio: f64, [from, to]: [f64; 2]) -> bool {
    (from * (1.0 - RANGE_TOLERANCE)..=to * (1.0 + RANGE_TOLERANCE)).contains(&ratio)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_extended_by_a_quarter() {
        // 4.5 - 25 % = 3.375, 8.8 + 25 % = 11.
        let range = heuristic_slowdown_range("mem", "8b");
        assert!(is_within_tolerance(3.4, range) && is_within_tolerance(10.9, range));
        assert!(!is_within_tolerance(3.3, range) && !is_within_tolerance(11.1, range));
    }
}
