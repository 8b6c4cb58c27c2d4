//! The integer program for fixed memory cases and a fixed number of rounds.
//!
//! prima.cpp paper, Eq. 6-10, for one k. With the cases M1 to M4 given, the objective is linear:
//!
//! ```text
//! min  sum_m (a_m w_m + b_m n_m)
//! s.t. sum_m w_m = W
//!      w_m between its bounds (Eq. 22, and Eq. 27, 28, 30, 31 on macOS)
//!      w_m - n_m between its bounds (n_m <= w_m, and Eq. 29, 32 on Linux and Android)
//!      0 <= n_m <= its bound (Eq. 34-36)                                      all integers
//! ```
//!
//! HiGHS solves it, as in the paper. With c = w - n for n, every row bounds a sum over one device or over all of
//! them; such nested rows make the matrix totally unimodular, so the linear relaxation has whole corners and
//! HiGHS has nothing to branch on. The windows that a device may have are an interval, so a program is
//! feasible exactly if W lies between the sums of the ends. That is checked first, and says which limit it is.
//!
//! HiGHS works in floating point with tolerances. What it returns is rounded and checked against the constraints
//! on integers, and what it cannot finish is a reason, not a plan.
//!
//! Not here: where costs and bounds come from ([`super::linear_costs`]), and which cases to try
//! ([`super::iteration`]).

use crate::solvers::linear_program::LinearProgram;

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct DeviceColumns {
    /// a: the cost of a layer of the window.
    pub window_cost: f64,
    /// b: the additional cost of a GPU layer.
    pub gpu_cost: f64,
    /// Minimum and maximum of w, inclusive.
    pub windows: (i64, i64),
    /// Minimum and maximum of w - n, inclusive.
    pub cpu_layers: (i64, i64),
    /// Maximum of n.
    pub max_gpu_layers: i64,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IntegerProgram {
    pub ring_layers: i64,
    pub devices: Vec<DeviceColumns>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Optimum {
    pub windows: Vec<u32>,
    pub gpu_layers: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NoOptimum {
    /// The device at this index has no allowed window.
    NoWindow(usize),
    /// The sum of the smallest windows, which exceeds W.
    AtLeast(i64),
    /// The sum of the largest windows, which is less than W.
    AtMost(i64),
    Solver(String),
}

impl DeviceColumns {
    /// Returns the smallest and largest w with an allowed n; (1, 0) or a reversed range if there is none.
    fn window_range(&self) -> (i64, i64) {
        let (least_cpu, most_cpu) = self.cpu_layers;
        if least_cpu.max(0) > most_cpu || self.max_gpu_layers < 0 {
            return (1, 0);
        }
        let least = self.windows.0.max(least_cpu).max(0);
        (least, self.windows.1.min(most_cpu + self.max_gpu_layers))
    }

    fn allows(&self, window: i64, gpu_layers: i64) -> bool {
        let within = |value: i64, (least, most): (i64, i64)| least <= value && value <= most;
        within(window, self.windows)
            && within(window - gpu_layers, self.cpu_layers)
            && within(gpu_layers, (0, self.max_gpu_layers.min(window)))
    }
}

impl IntegerProgram {
    /// Checks for a solution without solving the program.
    pub(crate) fn check(&self) -> Result<(), NoOptimum> {
        let (mut least, mut most) = (0, 0);
        for (device, columns) in self.devices.iter().enumerate() {
            let (from, to) = columns.window_range();
            if from > to {
                return Err(NoOptimum::NoWindow(device));
            }
            least += from;
            most += to;
        }
        if least > self.ring_layers {
            return Err(NoOptimum::AtLeast(least));
        }
        if most < self.ring_layers {
            return Err(NoOptimum::AtMost(most));
        }
        Ok(())
    }

    pub(crate) fn optimum(&self) -> Result<Optimum, NoOptimum> {
        self.check()?;
        let costs = self.scaled_costs()?;
        let found = self.solved(&costs)?;
        self.rounded(&found)
    }

    /// Returns the costs scaled for HiGHS, which treats a cost of 1e20 as infinite, compares with absolute
    /// tolerances, and calls a problem with a NaN cost optimal. So costs must be finite; the smallest a is subtracted
    /// from every a (which changes the objective by a constant, as sum w is fixed); and the largest becomes 1.
    fn scaled_costs(&self) -> Result<Vec<(f64, f64)>, NoOptimum> {
        let least = self.devices.iter().map(|device| device.window_cost).fold(f64::INFINITY, f64::min);
        let shifted = self.devices.iter().map(|device| (device.window_cost - least, device.gpu_cost));
        let costs: Vec<(f64, f64)> = shifted.collect();
        let all = || costs.iter().flat_map(|(window, gpu)| [*window, *gpu]);
        if !all().all(f64::is_finite) {
            return Err(NoOptimum::Solver("a cost is not a finite number".to_owned()));
        }
        let largest = all().map(f64::abs).fold(0.0, f64::max);
        if largest == 0.0 {
            return Ok(costs);
        }
        Ok(costs.into_iter().map(|(window, gpu)| (window / largest, gpu / largest)).collect())
    }

    /// Returns w and n of each device as HiGHS leaves them.
    fn solved(&self, costs: &[(f64, f64)]) -> Result<Vec<(f64, f64)>, NoOptimum> {
        let mut problem = LinearProgram::default();
        let mut columns: Vec<(usize, Option<usize>)> = Vec::with_capacity(self.devices.len());
        for (device, (window_cost, gpu_cost)) in self.devices.iter().zip(costs) {
            let (least, most) = device.window_range();
            let window = problem.add_integer_column(*window_cost, least as f64..=most as f64);
            // Without GPU layers w - n is w, whose range has taken the bounds of w - n in.
            let gpu = (device.max_gpu_layers > 0).then(|| {
                let gpu = problem.add_integer_column(*gpu_cost, 0.0..=device.max_gpu_layers as f64);
                let (least, most) = device.cpu_layers;
                problem.add_row(least.max(0) as f64..=most as f64, [(window, 1.0), (gpu, -1.0)]);
                gpu
            });
            columns.push((window, gpu));
        }
        let ring_layers = self.ring_layers as f64;
        problem.add_row(ring_layers..=ring_layers, columns.iter().map(|(window, _)| (*window, 1.0)));
        let values = problem.minimise().map_err(NoOptimum::Solver)?;
        Ok(columns
            .iter()
            .map(|(window, gpu)| (values[*window], gpu.map_or(0.0, |gpu| values[gpu])))
            .collect())
    }

    /// Rounds to the nearest integers and checks every constraint.
    fn rounded(&self, found: &[(f64, f64)]) -> Result<Optimum, NoOptimum> {
        let mut optimum = Optimum { windows: Vec::new(), gpu_layers: Vec::new() };
        let mut placed = 0;
        for (device, (window, gpu)) in self.devices.iter().zip(found) {
            // A cast turns NaN into 0, which the constraints then check.
            let (window, gpu) = (window.round() as i64, gpu.round() as i64);
            if !device.allows(window, gpu) {
                return Err(NoOptimum::Solver("its solution breaks a bound".to_owned()));
            }
            placed += window;
            optimum.windows.push(window as u32);
            optimum.gpu_layers.push(gpu as u32);
        }
        if placed != self.ring_layers {
            return Err(NoOptimum::Solver("its windows do not add up to a turn".to_owned()));
        }
        Ok(optimum)
    }
}

#[cfg(all(test, feature = "highs"))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// sum (a w + b n).
    fn value(program: &IntegerProgram, optimum: &Optimum) -> f64 {
        let layers = optimum.windows.iter().zip(&optimum.gpu_layers);
        program
            .devices
            .iter()
            .zip(layers)
            .map(|(device, (window, gpu))| {
                device.window_cost * f64::from(*window) + device.gpu_cost * f64::from(*gpu)
            })
            .sum()
    }

    /// The minimum by trying every (w, n) of each device and adding devices one by one.
    fn least_value(program: &IntegerProgram) -> Option<f64> {
        let ring_layers = program.ring_layers as usize;
        let mut least = vec![f64::INFINITY; ring_layers + 1];
        least[0] = 0.0;
        for device in &program.devices {
            let mut next = vec![f64::INFINITY; ring_layers + 1];
            for (placed, before) in least.iter().enumerate() {
                for window in 0..=ring_layers - placed {
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
        Some(least[ring_layers]).filter(|value| value.is_finite())
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
            DeviceColumns {
                window_cost,
                gpu_cost,
                windows: (least, least + width),
                cpu_layers: (cpu.0, cpu.0 + cpu.1),
                max_gpu_layers,
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn highs_equals_a_dynamic_program(
            ring_layers in 1..40_i64,
            devices in prop::collection::vec(columns(), 1..6),
        ) {
            let program = IntegerProgram { ring_layers, devices };
            match (program.optimum(), least_value(&program)) {
                (Ok(optimum), Some(least)) => {
                    let found = value(&program, &optimum);
                    prop_assert!((found - least).abs() <= 1e-9 * ring_layers as f64, "{} is not {}", found, least);
                }
                (Err(NoOptimum::Solver(reason)), _) => return Err(TestCaseError::fail(reason)),
                (Err(_), None) => {}
                (found, least) => return Err(TestCaseError::fail(format!("{found:?} but {least:?}"))),
            }
        }
    }

    fn two(window_cost: f64) -> IntegerProgram {
        let device = DeviceColumns {
            window_cost: 1.0,
            gpu_cost: -0.5,
            windows: (1, 8),
            cpu_layers: (0, 8),
            max_gpu_layers: 2,
        };
        IntegerProgram { ring_layers: 8, devices: vec![device, DeviceColumns { window_cost, ..device }] }
    }

    #[test]
    fn by_hand() {
        // The second device's layers cost 0.7. On a GPU a layer costs 0.5 or 0.2. So both GPUs are filled with 2
        // layers, if the first device has 2: its second layer adds 0.5, one more CPU layer of the second 0.7.
        let optimum = two(0.7).optimum().unwrap();
        assert_eq!(optimum, Optimum { windows: vec![2, 6], gpu_layers: vec![2, 2] });
    }

    #[test]
    fn non_finite_cost_is_an_error() {
        for cost in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(matches!(two(cost).optimum(), Err(NoOptimum::Solver(_))), "{cost}");
        }
    }

    #[test]
    fn infeasible_program_names_the_bound() {
        let with = |windows, cpu_layers| {
            let mut program = two(1.0);
            program.devices[1].windows = windows;
            program.devices[1].cpu_layers = cpu_layers;
            program.optimum()
        };
        assert_eq!(with((1, 8), (0, -1)), Err(NoOptimum::NoWindow(1)));
        assert_eq!(with((8, 8), (0, 8)), Err(NoOptimum::AtLeast(9)));
        assert!(with((1, 8), (0, 0)).is_ok());
        let mut program = two(1.0);
        program.ring_layers = 17;
        assert_eq!(program.optimum(), Err(NoOptimum::AtMost(16)));
    }
}
