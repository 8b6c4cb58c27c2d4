//! Integration tests of the simulator, against closed forms, measurements and another simulator.
//!
//! Property tests run some of their random cases by default, and all cases with `HEARTH_SLOW=1`.

mod arrivals;
mod cyclic_rows;
mod events;
mod events_property;
mod linux_device;
mod linux_reader;
mod linux_rows;
mod network;
mod policies;
mod queue_twin;
mod residency;
mod ring;
mod small_rings;
mod soc;
mod tensor;
mod workloads;

use proptest::prelude::ProptestConfig;

/// Maximum number of random cases of a property test that run by default.
const QUICK_CASES: u32 = 16;

/// Returns the configuration of a property test with `all` random cases, of which [`QUICK_CASES`] run by default.
fn cases(all: u32) -> ProptestConfig {
    let slow = std::env::var("HEARTH_SLOW").is_ok_and(|value| value == "1");
    ProptestConfig::with_cases(if slow { all } else { all.min(QUICK_CASES) })
}
