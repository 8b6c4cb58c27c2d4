//! Arrivals: when the requests of a workload arrive, and how many tokens they have.
//!
//! The random times of a Poisson process depend only on the seed, so that the simulator and the executor have the same
//! requests. The interval between two requests is exponentially distributed.

use std::sync::Arc;

use hearth_profiles::PerSecond;
use hearth_schema::request_trace::Arrival;
use hearth_schema::workload::Workload;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use rand_distr::{Distribution, Exp1};

use crate::cluster::Cluster;

/// The stream of random numbers for arrivals. Streams of the simulator have other numbers.
const STREAM: u64 = u64::MAX;

/// Returns the requests of a cluster's workload, in the order of arrival; `None` if all start when the run begins.
pub fn arrivals(cluster: &Cluster) -> Option<Arc<[Arrival]>> {
    let arrivals = cluster.workload.arrivals.as_ref()?;
    match (&cluster.recorded_arrivals, arrivals.rate.zip(arrivals.requests)) {
        (Some(recorded), _) => Some(recorded.clone()),
        (None, Some((rate, requests))) => {
            Some(random_arrivals(&cluster.workload, rate, requests, cluster.seed).collect())
        }
        (None, None) => None,
    }
}

fn random_arrivals(
    workload: &Workload,
    rate: PerSecond,
    requests: u32,
    seed: u64,
) -> impl Iterator<Item = Arrival> {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    random.set_stream(STREAM);
    let mut at = 0.0;
    let (prompt_tokens, generated_tokens) = (workload.prompt_tokens, workload.generated_tokens);
    (0..requests).map(move |_| {
        let interval: f64 = Exp1.sample(&mut random);
        at += interval / rate.0;
        Arrival { at_ns: (at * 1e9) as u64, prompt_tokens, generated_tokens }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_arrivals_have_the_rate_and_the_variance_of_a_poisson_process() {
        let drawn = |requests, seed| -> Vec<Arrival> {
            random_arrivals(&Workload::new(10, 7), PerSecond(0.5), requests, seed).collect()
        };
        let arrivals = drawn(20_000, 3);
        assert_eq!(drawn(100, 3), arrivals[..100]);
        assert_ne!(drawn(100, 4), arrivals[..100]);
        let times: Vec<f64> = arrivals.iter().map(|arrival| arrival.at_ns as f64 / 1e9).collect();
        let intervals: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = intervals.iter().sum::<f64>() / intervals.len() as f64;
        let variance =
            intervals.iter().map(|interval| (interval - mean).powi(2)).sum::<f64>() / intervals.len() as f64;
        // Their mean is 1 / rate, and so is their standard deviation. The errors of these estimates are 0.7 % and 1 %.
        assert!((mean / 2.0 - 1.0).abs() < 0.03, "{mean}");
        assert!((variance.sqrt() / 2.0 - 1.0).abs() < 0.04, "{variance}");
    }
}
