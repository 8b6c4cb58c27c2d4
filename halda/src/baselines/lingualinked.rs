//! The strategy `lingualinked`: a linear program that balances the times of the devices.
//!
//! LinguaLinked (Zhao et al., 2023) assigns the modules of a model to phones with a linear program over computing,
//! communication and memory. Here all layers are equal. Device m has `c_m` layers on its CPU and `g_m` on its GPU, and
//! z is the longest time of a device:
//!
//! ```text
//! minimise z                                    over c, g, z >= 0
//!   alpha c_m + (alpha + beta) g_m + xi + [head] kappa <= z       for every device with capacity
//!   sum (c_m + g_m) = L                         c_m + g_m >= 1 for the head
//!   c_m <= CPU capacity,  g_m <= GPU capacity           nothing is read from disk (crate::capacity)
//! ```
//!
//! where kappa = Fo + (`b_i/V` + `b_o`)/`T_cpu` is the head's work besides layers (symbols:
//! [`crate::latency::coefficients`]). Deviation: this is a variant of the published program. Its objective is the
//! longest time of a device; the sum of the times would give the continuous form of [`crate::baselines::edgeshard`].
//! Window and hop costs count even for devices without layers, because the program is linear.
//!
//! If the fixed costs of one device alone determine z, many solutions are optimal. So a second program fixes z and
//! minimises the sum of the times. The shares are rounded by cumulative rounding
//! (`crate::baselines::proportional_shares`), which keeps integer limits.

use crate::baselines::proportional_shares::cumulative_rounding;
use crate::capacity::{LayerCapacity, layer_capacities, one_round_proposal};
use crate::latency::coefficients::DeviceCosts;
use crate::solvers::linear_program::{self, LinearProgram};
use crate::{LatencyModel, Proposal, Strategy, StrategyError};

/// The maximum of a time in the linear program, relative to the time of the fastest layer. HiGHS rejects or ignores
/// coefficients of very different size (its `small_matrix_value` is 1e-9, its tolerances are 1e-7). source: assumed
const MAX_RELATIVE_TIME: f64 = 1e6;

/// The relative amount by which z may exceed its minimum when the sum of times is minimised. source: assumed, above the
/// solver's tolerance of 1e-7
const SLACK: f64 = 1e-6;

/// The number of parts per layer to which fractional layers are rounded. source: assumed, finer than HiGHS's tolerance
const PARTS_PER_LAYER: u64 = 1 << 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinguaLinked;

impl Strategy for LinguaLinked {
    fn name(&self) -> &'static str {
        "lingualinked"
    }

    fn propose(&self, model: &LatencyModel) -> Result<Proposal, StrategyError> {
        if !linear_program::IS_SOLVER_AVAILABLE {
            return Err(StrategyError::NoSolver { strategy: self.name() });
        }
        let capacities = layer_capacities(model, self.name())?;
        let layers = model.model_layers();
        let unsolved = |reason| StrategyError::LinearProgramFailed { strategy: self.name(), reason };
        let shares = balanced(&loads(model, &capacities), layers).map_err(unsolved)?;
        let parts = whole_parts(&shares, &capacities, layers);
        Ok(one_round_proposal(cumulative_rounding(&parts, layers).unwrap_or_default(), &capacities))
    }
}

/// The times and limits of one device in the linear program. The unit of time is that of the fastest layer.
#[derive(Debug, Clone, Copy)]
struct Load {
    capacity: LayerCapacity,
    cpu_layer: f64,
    gpu_layer: f64,
    /// The time that does not depend on the number of layers: xi, and on the head also kappa.
    fixed: f64,
}

fn loads(model: &LatencyModel, capacities: &[LayerCapacity]) -> Vec<Load> {
    let fastest = |(costs, capacity): (&DeviceCosts, &LayerCapacity)| {
        let cpu = if capacity.max_cpu_layers > 0 { costs.cpu_layer_seconds() } else { f64::INFINITY };
        let gpu = if capacity.max_gpu_layers > 0 { costs.gpu_layer_seconds() } else { f64::INFINITY };
        cpu.min(gpu)
    };
    let unit = model.device_costs.iter().zip(capacities).map(fastest).fold(f64::INFINITY, f64::min);
    let scaled = |seconds: f64| (seconds / unit).min(MAX_RELATIVE_TIME);
    let load = |(device, (costs, capacity)): (usize, (&DeviceCosts, &LayerCapacity))| {
        let head = if device == 0 { costs.output_compute_seconds + costs.head_memory_seconds } else { 0.0 };
        Load {
            capacity: *capacity,
            cpu_layer: scaled(costs.cpu_layer_seconds()),
            gpu_layer: scaled(costs.gpu_layer_seconds()),
            fixed: scaled(costs.window_copy_seconds + costs.hop_seconds + head),
        }
    };
    model.device_costs.iter().zip(capacities).enumerate().map(load).collect()
}

/// Solves both linear programs and returns the fractional number of layers of each device.
fn balanced(loads: &[Load], layers: u32) -> Result<Vec<f64>, String> {
    let (_, longest) = solve(loads, layers, None)?;
    Ok(solve(loads, layers, Some(longest * (1.0 + SLACK)))?.0)
}

/// Minimises the longest time z, or with `longest` the sum of the times for z up to `longest`. Returns the number of
/// layers of each device, and z.
fn solve(loads: &[Load], layers: u32, longest: Option<f64>) -> Result<(Vec<f64>, f64), String> {
    let mut problem = LinearProgram::default();
    let z =
        problem.add_column(f64::from(u8::from(longest.is_none())), 0.0..=longest.unwrap_or(f64::INFINITY));
    let mut columns: Vec<[usize; 2]> = Vec::with_capacity(loads.len());
    for load in loads {
        let cost = |seconds: f64| if longest.is_some() { seconds } else { 0.0 };
        let cpu = problem.add_column(cost(load.cpu_layer), 0.0..=f64::from(load.capacity.max_cpu_layers));
        let gpu = problem.add_column(cost(load.gpu_layer), 0.0..=f64::from(load.capacity.max_gpu_layers));
        columns.push([cpu, gpu]);
        if load.capacity.max_layers() > 0 {
            let row = [(cpu, load.cpu_layer), (gpu, load.gpu_layer), (z, -1.0)];
            problem.add_row(f64::NEG_INFINITY..=-load.fixed, row);
        }
    }
    let layers = f64::from(layers);
    problem.add_row(layers..=layers, columns.iter().flatten().map(|column| (*column, 1.0)));
    problem.add_row(1.0..=f64::INFINITY, columns[0].map(|column| (column, 1.0)));
    let found = problem.minimise()?;
    let shares = columns.iter().map(|[cpu, gpu]| found[*cpu] + found[*gpu]).collect();
    Ok((shares, found[z]))
}

/// Converts fractional numbers of layers to integers in units of 1 / [`PARTS_PER_LAYER`] layers. The result satisfies
/// the limits and sums to exactly `layers`, although the solver is exact only within its tolerance.
fn whole_parts(shares: &[f64], capacities: &[LayerCapacity], layers: u32) -> Vec<u64> {
    let most: Vec<u64> =
        capacities.iter().map(|capacity| u64::from(capacity.max_layers()) * PARTS_PER_LAYER).collect();
    let least = |device: usize| if device == 0 { PARTS_PER_LAYER } else { 0 };
    let part = |(device, share): (usize, &f64)| {
        ((share * PARTS_PER_LAYER as f64).round() as u64).clamp(least(device), most[device])
    };
    let mut parts: Vec<u64> = shares.iter().enumerate().map(part).collect();
    let whole = u64::from(layers) * PARTS_PER_LAYER;
    let mut missing = whole.saturating_sub(parts.iter().sum());
    let mut excess = parts.iter().sum::<u64>().saturating_sub(whole);
    for (device, part) in parts.iter_mut().enumerate() {
        let more = missing.min(most[device] - *part);
        let less = excess.min(*part - least(device));
        *part = *part + more - less;
        missing -= more;
        excess -= less;
    }
    parts
}

#[cfg(all(test, feature = "highs"))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn capacity(layers: u32) -> LayerCapacity {
        LayerCapacity { max_gpu_layers: 0, max_cpu_layers: layers, fills_gpu_first: false }
    }

    #[test]
    fn parts_sum_to_the_model_within_the_limits() {
        // The solver is inexact: within the limits its shares sum to 7.4 layers of 8, and the head has less than one.
        let capacities = [capacity(3), capacity(2), capacity(5)];
        let parts = whole_parts(&[0.9, 2.5, 4.5], &capacities, 8);
        let half = PARTS_PER_LAYER / 2;
        assert_eq!(parts, [PARTS_PER_LAYER + half, 2 * PARTS_PER_LAYER, 4 * PARTS_PER_LAYER + half]);
        let parts = whole_parts(&[2.0, 2.0, 5.0], &capacities, 8);
        assert_eq!(parts, [PARTS_PER_LAYER, 2 * PARTS_PER_LAYER, 5 * PARTS_PER_LAYER]);
    }

    fn layers_within(load: &Load, longest: f64) -> f64 {
        let mut processors =
            [(load.cpu_layer, load.capacity.max_cpu_layers), (load.gpu_layer, load.capacity.max_gpu_layers)];
        processors.sort_by(|left, right| left.0.total_cmp(&right.0));
        let [(fast, first), (slow, second)] =
            processors.map(|(seconds, layers)| (seconds, f64::from(layers)));
        let left = (longest - load.fixed).max(0.0);
        (left / fast).min(first) + ((left - first * fast).max(0.0) / slow).min(second)
    }

    /// Returns the minimum of the longest time of a device (z) by bisection. The head has at least one layer.
    fn max_time_by_bisection(loads: &[Load], layers: u32) -> f64 {
        let enough = |longest: f64| {
            let fixed = |load: &Load| load.capacity.max_layers() == 0 || load.fixed <= longest;
            let together: f64 = loads.iter().map(|load| layers_within(load, longest)).sum();
            together >= f64::from(layers)
                && layers_within(&loads[0], longest) >= 1.0
                && loads.iter().all(fixed)
        };
        let (mut below, mut above) = (0.0, 1e9);
        for _ in 0..200 {
            let middle = f64::midpoint(below, above);
            if enough(middle) { above = middle } else { below = middle }
        }
        above
    }

    prop_compose! {
        fn load()(
            [cpu_layer, gpu_layer] in prop::array::uniform2(1.0..1000.0_f64),
            fixed in prop_oneof![Just(0.0), 0.0..1000.0_f64],
            [cpu, gpu] in prop::array::uniform2(0..20_u32),
        ) -> Load {
            Load { capacity: LayerCapacity { max_gpu_layers: gpu, max_cpu_layers: cpu, fills_gpu_first: gpu_layer <= cpu_layer }, cpu_layer, gpu_layer, fixed }
        }
    }

    proptest! {
        #[test]
        fn max_time_equals_bisection(
            loads in prop::collection::vec(load(), 1..7),
            fraction in 0.0..1.0_f64,
        ) {
            let capacity: u32 = loads.iter().map(|load| load.capacity.max_layers()).sum();
            let layers = (f64::from(capacity) * fraction) as u32 + 1;
            if loads[0].capacity.max_layers() == 0 || layers > capacity {
                prop_assert!(balanced(&loads, layers).is_err());
                return Ok(());
            }
            let shares = balanced(&loads, layers).unwrap();
            prop_assert!((shares.iter().sum::<f64>() - f64::from(layers)).abs() < 1e-6);
            let longest = max_time_by_bisection(&loads, layers) * (1.0 + 1e-5);
            for (load, share) in loads.iter().zip(&shares) {
                prop_assert!(*share <= layers_within(load, longest) + 1e-6, "{:?} in {:?}", shares, loads);
            }
            prop_assert!(shares[0] > 1.0 - 1e-6);
        }
    }

    #[test]
    fn unsolvable_program_is_an_error() {
        let slow = Load { capacity: capacity(2), cpu_layer: 1.0, gpu_layer: 1.0, fixed: 0.0 };
        assert_eq!(balanced(&[slow], 3).unwrap_err(), "the solver returned the status `Infeasible`");
    }
}
