//! Names and definitions of the terms of the time per token, in the order of
//! [`hearth_core::metrics::Terms::named_terms`].

#[derive(Debug, Clone, Copy)]
pub struct Term {
    /// The key of the term in metrics and in CSV files.
    pub key: &'static str,
    pub label: &'static str,
    /// What the time is spent on, as a part of a sentence, such as `computing on CPUs`.
    pub phrase: &'static str,
    pub meaning: &'static str,
}

/// The terms that sum to the time per token.
pub const SUMMED_TERMS: [Term; 7] = [
    Term {
        key: "cpu",
        label: "CPU",
        phrase: "computing on CPUs",
        meaning: "CPU time of the computing threads.",
    },
    Term { key: "gpu", label: "GPU", phrase: "computing on GPUs", meaning: "Wall time of GPU steps." },
    Term {
        key: "memory",
        label: "Memory",
        phrase: "copying in memory",
        meaning: "Explicit copies, to and from a GPU or within a device.",
    },
    Term {
        key: "demand_disk",
        label: "Demand disk",
        phrase: "waiting for disks",
        meaning: "Waiting inside computing steps until weights are read from disk.",
    },
    Term {
        key: "network",
        label: "Network",
        phrase: "network messages",
        meaning: "Messages between devices: the head's time less the time that the others report.",
    },
    Term {
        key: "queue",
        label: "Queue",
        phrase: "waiting for a processor",
        meaning: "Ready to run, but waiting for a processor.",
    },
    Term {
        key: "bubble",
        label: "Bubble",
        phrase: "waiting for the ring",
        meaning: "The remainder: waiting for the ring. Zero for one sequence, unless the ring lost a device.",
    },
];

/// The time of disk reads that do not lengthen the time per token. It is not part of the sum of the terms.
pub const HIDDEN_DISK_TIME: Term = Term {
    key: "hidden_disk",
    label: "Hidden disk",
    phrase: "reading ahead",
    meaning: "Reading ahead while the device computed nothing. It adds no time, so it is not part of the sum.",
};
