//! The integer program for fixed memory cases and a fixed number of rounds.
//!
//! prima.cpp paper, Eq. 6-10, for one k (symbols: `DeviceColumns`). With fixed memory cases the objective is linear:
//!
//! ```text
//! min  sum_m (a_m w_m + b_m n_m)
//! s.t. sum_m w_m = W
//!      w_m between its bounds (Eq. 22, and Eq. 27, 28, 30, 31 on macOS)
//!      w_m - n_m between its bounds (n_m <= w_m, and Eq. 29, 32 on Linux and Android)
//!      0 <= n_m <= its bound (Eq. 34-36)                                      all integers
//! ```
//!
//! HiGHS solves it, as in the paper. With c = w - n in place of n, each row bounds a sum over one device or over all
//! devices. Such nested rows make the matrix totally unimodular, so the vertices of the linear relaxation are
//! integers and HiGHS does not need to branch. A program is feasible exactly if W is between the sums of the minimum
//! and of the maximum windows. This is checked first, so that an error can name the limit.
//!
//! HiGHS has tolerances, so its solution is rounded and checked against the constraints on integers.

use crate::solvers::linear_program::LinearProgram;
use crate::strategy::InfeasibleReason;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DeviceColumns {
    /// a: the seconds that a layer of the window adds to a round.
    pub window_cost: f64,
    /// b: the additional seconds of a layer of the window if it is on the GPU; usually negative.
    pub gpu_cost: f64,
    /// The minimum and maximum of w, the layers of the window, inclusive.
    pub window_bounds: (i64, i64),
    /// The minimum and maximum of w - n, the CPU layers of the window, inclusive.
    pub cpu_layer_bounds: (i64, i64),
    /// The maximum of n, the GPU layers of the window.
    pub max_gpu_layers: i64,
}

pub(crate) struct IntegerProgram {
    pub layers_per_round: i64,
    pub devices: Vec<DeviceColumns>,
}

/// The number of layers in a device's window (w), and how many of these layers are on its GPU (n).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SplitWindow {
    pub layers: u32,
    pub gpu_layers: u32,
}

impl DeviceColumns {
    /// Returns the minimum and maximum number of layers in the window for which a number of GPU layers is allowed. If
    /// no window is allowed, the minimum exceeds the maximum.
    fn window_range(&self) -> (i64, i64) {
        let (min_cpu, max_cpu) = self.cpu_layer_bounds;
        if min_cpu.max(0) > max_cpu || self.max_gpu_layers < 0 {
            return (1, 0);
        }
        let min = self.window_bounds.0.max(min_cpu).max(0);
        (min, self.window_bounds.1.min(max_cpu + self.max_gpu_layers))
    }

    fn allows(&self, window: i64, gpu_layers: i64) -> bool {
        let within = |value: i64, (least, most): (i64, i64)| least <= value && value <= most;
        within(window, self.window_bounds)
            && within(window - gpu_layers, self.cpu_layer_bounds)
            && within(gpu_layers, (0, self.max_gpu_layers.min(window)))
    }
}

impl IntegerProgram {
    /// Checks whether the program has a solution. `no_window` returns the reason for a device without an allowed
    /// window.
    pub fn check_feasibility(
        &self,
        no_window: impl Fn(usize) -> InfeasibleReason,
    ) -> Result<(), InfeasibleReason> {
        let layers_per_round = self.layers_per_round as u32;
        let (mut least, mut most) = (0, 0);
        for (device, columns) in self.devices.iter().enumerate() {
            let (from, to) = columns.window_range();
            if from > to {
                return Err(no_window(device));
            }
            least += from;
            most += to;
        }
        if least > self.layers_per_round {
            return Err(InfeasibleReason::CasesRequireMoreLayers { layers_per_round, least });
        }
        if most < self.layers_per_round {
            return Err(InfeasibleReason::CasesAllowTooFewLayers { layers_per_round, held: most });
        }
        Ok(())
    }

    /// Returns the optimal windows of a program that passes [`Self::check_feasibility`].
    pub(crate) fn optimal_windows(&self) -> Result<Vec<SplitWindow>, InfeasibleReason> {
        self.rounded(&self.solve(&self.scaled_costs()?)?)
    }

    /// Returns the costs a and b scaled for HiGHS. HiGHS treats a cost of 1e20 as infinite, compares with absolute
    /// tolerances, and reports a problem with a NaN cost as optimal. So costs must be finite; the minimum a is
    /// subtracted from every a, which changes the objective by a constant because sum w is fixed; and the largest
    /// cost becomes 1.
    fn scaled_costs(&self) -> Result<Vec<(f64, f64)>, InfeasibleReason> {
        let least = self.devices.iter().map(|device| device.window_cost).fold(f64::INFINITY, f64::min);
        let shifted = self.devices.iter().map(|device| (device.window_cost - least, device.gpu_cost));
        let costs: Vec<(f64, f64)> = shifted.collect();
        let all = || costs.iter().flat_map(|(window, gpu)| [*window, *gpu]);
        if !all().all(f64::is_finite) {
            return Err(unsolved("a cost is not a finite number"));
        }
        let largest = all().map(f64::abs).fold(0.0, f64::max);
        if largest == 0.0 {
            return Ok(costs);
        }
        Ok(costs.into_iter().map(|(window, gpu)| (window / largest, gpu / largest)).collect())
    }

    fn solve(&self, costs: &[(f64, f64)]) -> Result<Vec<(f64, f64)>, InfeasibleReason> {
        let mut problem = LinearProgram::default();
        let mut columns: Vec<(usize, Option<usize>)> = Vec::with_capacity(self.devices.len());
        for (device, (window_cost, gpu_cost)) in self.devices.iter().zip(costs) {
            let (least, most) = device.window_range();
            let window = problem.add_integer_column(*window_cost, least as f64..=most as f64);
            // Without GPU layers w - n is w, and the range of w already includes the bounds of w - n.
            let gpu = (device.max_gpu_layers > 0).then(|| {
                let gpu = problem.add_integer_column(*gpu_cost, 0.0..=device.max_gpu_layers as f64);
                let (least, most) = device.cpu_layer_bounds;
                problem.add_row(least.max(0) as f64..=most as f64, [(window, 1.0), (gpu, -1.0)]);
                gpu
            });
            columns.push((window, gpu));
        }
        let layers_per_round = self.layers_per_round as f64;
        problem
            .add_row(layers_per_round..=layers_per_round, columns.iter().map(|(window, _)| (*window, 1.0)));
        let values = problem.minimise().map_err(|reason| InfeasibleReason::SolverFailed { reason })?;
        let found =
            |(window, gpu): &(usize, Option<usize>)| (values[*window], gpu.map_or(0.0, |gpu| values[gpu]));
        Ok(columns.iter().map(found).collect())
    }

    fn rounded(&self, found: &[(f64, f64)]) -> Result<Vec<SplitWindow>, InfeasibleReason> {
        let round = |(device, (window, gpu)): (&DeviceColumns, &(f64, f64))| {
            // The cast converts NaN to 0, which is then checked against the constraints.
            let (window, gpu) = (window.round() as i64, gpu.round() as i64);
            let split = SplitWindow { layers: window as u32, gpu_layers: gpu as u32 };
            device.allows(window, gpu).then_some(split)
        };
        let windows: Option<Vec<SplitWindow>> = self.devices.iter().zip(found).map(round).collect();
        let windows = windows.ok_or_else(|| unsolved("its solution violates a bound"))?;
        if windows.iter().map(|window| i64::from(window.layers)).sum::<i64>() != self.layers_per_round {
            return Err(unsolved("its windows do not sum to the layers of a round"));
        }
        Ok(windows)
    }
}

fn unsolved(reason: &str) -> InfeasibleReason {
    InfeasibleReason::SolverFailed { reason: reason.to_owned() }
}

#[cfg(all(test, feature = "highs"))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::latency::coefficients::MemoryCase;
    use crate::solvers::lower_bound::base_case_seconds;

    fn no_window(device: usize) -> InfeasibleReason {
        InfeasibleReason::NoWindowInCase { device: device.to_string(), case: MemoryCase::NoReload }
    }

    fn solved(program: &IntegerProgram) -> Result<Vec<SplitWindow>, InfeasibleReason> {
        program.check_feasibility(no_window)?;
        program.optimal_windows()
    }

    fn value(program: &IntegerProgram, windows: &[SplitWindow]) -> f64 {
        let cost = |(device, window): (&DeviceColumns, &SplitWindow)| {
            device.window_cost * f64::from(window.layers) + device.gpu_cost * f64::from(window.gpu_layers)
        };
        program.devices.iter().zip(windows).map(cost).sum()
    }

    /// Returns the minimum of the objective by a dynamic program over the devices, which tries every (w, n).
    fn least_value(program: &IntegerProgram) -> Option<f64> {
        let layers_per_round = program.layers_per_round as usize;
        let mut least = base_case_seconds(layers_per_round as u32);
        for device in &program.devices {
            let mut next = vec![f64::INFINITY; layers_per_round + 1];
            for (placed, before) in least.iter().enumerate() {
                for window in 0..=layers_per_round - placed {
                    for gpu in 0..=window {
                        if device.allows(window as i64, gpu as i64) {
                            let cost = device.window_cost * window as f64 + device.gpu_cost * gpu as f64;
                            next[placed + window] = next[placed + window].min(before + cost);
                        }
                    }
                }
            }
            least = next;
        }
        Some(least[layers_per_round]).filter(|value| value.is_finite())
    }

    prop_compose! {
        fn columns()(
            window_cost in prop_oneof![Just(0.01), 1e-3..1.0_f64],
            gpu_cost in prop_oneof![Just(0.0), -0.5..0.5_f64],
            least in 0..4_i64,
            width in -1..30_i64,
            cpu in (-2..6_i64, -1..30_i64),
            max_gpu_layers in prop_oneof![Just(0), 0..12_i64],
        ) -> DeviceColumns {
            let (window_bounds, cpu_layer_bounds) = ((least, least + width), (cpu.0, cpu.0 + cpu.1));
            DeviceColumns { window_cost, gpu_cost, window_bounds, cpu_layer_bounds, max_gpu_layers }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn highs_equals_a_dynamic_program(
            layers_per_round in 1..40_i64,
            devices in prop::collection::vec(columns(), 1..6),
        ) {
            let program = IntegerProgram { layers_per_round, devices };
            match (solved(&program), least_value(&program)) {
                (Ok(optimum), Some(least)) => {
                    let found = value(&program, &optimum);
                    prop_assert!((found - least).abs() <= 1e-9 * layers_per_round as f64, "{} is not {}", found, least);
                }
                (Err(InfeasibleReason::SolverFailed { reason }), _) => return Err(TestCaseError::fail(reason)),
                (Err(_), None) => {}
                (found, least) => return Err(TestCaseError::fail(format!("found {found:?}; the minimum is {least:?}"))),
            }
        }
    }

    fn two(window_cost: f64) -> IntegerProgram {
        let device = DeviceColumns {
            window_cost: 1.0,
            gpu_cost: -0.5,
            window_bounds: (1, 8),
            cpu_layer_bounds: (0, 8),
            max_gpu_layers: 2,
        };
        IntegerProgram { layers_per_round: 8, devices: vec![device, DeviceColumns { window_cost, ..device }] }
    }

    #[test]
    fn two_devices_fill_their_gpus() {
        // A layer on the CPU costs 1 or 0.7, on the GPU 0.5 or 0.2. So both GPUs get 2 layers, which needs a window
        // of 2 on the first device: its second layer adds 0.5, less than the 0.7 of one more CPU layer on the second
        // device.
        let optimum = solved(&two(0.7)).unwrap();
        assert_eq!(optimum, [2, 6].map(|layers| SplitWindow { layers, gpu_layers: 2 }));
    }

    #[test]
    fn non_finite_cost_is_an_error() {
        for cost in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(matches!(solved(&two(cost)), Err(InfeasibleReason::SolverFailed { .. })), "{cost}");
        }
    }

    #[test]
    fn infeasible_program_names_the_bound() {
        let with = |windows, cpu_layers| {
            let mut program = two(1.0);
            program.devices[1].window_bounds = windows;
            program.devices[1].cpu_layer_bounds = cpu_layers;
            solved(&program)
        };
        assert_eq!(with((1, 8), (0, -1)), Err(no_window(1)));
        let too_many = InfeasibleReason::CasesRequireMoreLayers { layers_per_round: 8, least: 9 };
        assert_eq!(with((8, 8), (0, 8)), Err(too_many));
        assert!(with((1, 8), (0, 0)).is_ok());
        let mut program = two(1.0);
        program.layers_per_round = 17;
        let too_few = InfeasibleReason::CasesAllowTooFewLayers { layers_per_round: 17, held: 16 };
        assert_eq!(solved(&program), Err(too_few));
    }
}
