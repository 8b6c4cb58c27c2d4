//! How is each part of a token's time called, coloured and explained?
//!
//! The order is that of [`hearth_core::metrics::Terms::rows`].

/// What a reader needs to know of a term.
#[derive(Debug, Clone, Copy)]
pub struct Term {
    /// Its key in metrics and CSV files.
    pub key: &'static str,
    /// Its name in text.
    pub label: &'static str,
    /// Its name inside a sentence.
    pub phrase: &'static str,
    /// The CSS class that colours it.
    pub class: &'static str,
    /// What it holds.
    pub meaning: &'static str,
}

/// The terms that sum to the time of a token.
pub const SUMMED: [Term; 7] = [
    Term {
        key: "cpu",
        label: "CPU",
        phrase: "computing on CPUs",
        class: "cpu",
        meaning: "Thread CPU time in computing steps.",
    },
    Term {
        key: "gpu",
        label: "GPU",
        phrase: "computing on GPUs",
        class: "gpu",
        meaning: "Wall time of GPU steps.",
    },
    Term {
        key: "memory",
        label: "Memory",
        phrase: "copying in memory",
        class: "memory",
        meaning: "Explicit copies, to and from a GPU or within a device.",
    },
    Term {
        key: "demand_disk",
        label: "Demand disk",
        phrase: "waiting for disks",
        class: "demand",
        meaning: "Waiting for weights to be read, inside computing steps.",
    },
    Term {
        key: "air",
        label: "Air",
        phrase: "messages on their way",
        class: "air",
        meaning: "Messages between devices: the head's time less what the others say they took.",
    },
    Term {
        key: "queue",
        label: "Queue",
        phrase: "waiting for a processor",
        class: "queue",
        meaning: "Ready to run, but not running.",
    },
    Term {
        key: "bubble",
        label: "Bubble",
        phrase: "waiting for the ring",
        class: "bubble",
        meaning: "What is left: waiting for the ring. Zero for one sequence, unless the ring lost a device.",
    },
];

/// Disk time that cost nothing; never in the sum.
pub const HIDDEN: Term = Term {
    key: "hidden_disk",
    label: "Hidden disk",
    phrase: "reading ahead",
    class: "hidden",
    meaning: "Reading ahead while no computation of the same device ran. It costs no time, so it stands beside the sum.",
};
