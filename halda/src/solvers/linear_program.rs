//! Linear and integer programs, solved by HiGHS if the feature `highs` is on.
//!
//! Without the feature, [`IS_SOLVER_AVAILABLE`] is false, and strategies that need a solver fail.

use std::ops::RangeInclusive;

/// Whether this build has a solver for linear programs.
pub(crate) const IS_SOLVER_AVAILABLE: bool = cfg!(feature = "highs");

#[derive(Default)]
pub(crate) struct LinearProgram {
    columns: Vec<Column>,
    rows: Vec<Row>,
}

#[cfg_attr(not(feature = "highs"), expect(dead_code, reason = "only a solver reads it"))]
struct Column {
    cost: f64,
    bounds: RangeInclusive<f64>,
    integer: bool,
}

#[cfg_attr(not(feature = "highs"), expect(dead_code, reason = "only a solver reads it"))]
struct Row {
    bounds: RangeInclusive<f64>,
    terms: Vec<(usize, f64)>,
}

impl LinearProgram {
    /// Adds a real variable with its cost in the objective, and returns its index.
    pub(crate) fn add_column(&mut self, cost: f64, bounds: RangeInclusive<f64>) -> usize {
        self.columns.push(Column { cost, bounds, integer: false });
        self.columns.len() - 1
    }

    pub(crate) fn add_integer_column(&mut self, cost: f64, bounds: RangeInclusive<f64>) -> usize {
        self.columns.push(Column { cost, bounds, integer: true });
        self.columns.len() - 1
    }

    /// Adds bounds, which may be infinite, on a weighted sum of variables. `terms` has (index of the variable, weight).
    pub fn add_row(&mut self, bounds: RangeInclusive<f64>, terms: impl IntoIterator<Item = (usize, f64)>) {
        self.rows.push(Row { bounds, terms: terms.into_iter().collect() });
    }

    /// Returns the value of each variable at an optimum. Integer variables are whole within the solver's tolerance. If
    /// there is no optimum, the error is the solver's message.
    #[cfg(feature = "highs")]
    pub(crate) fn minimise(&self) -> Result<Vec<f64>, String> {
        highs::minimise(self)
    }

    #[cfg(not(feature = "highs"))]
    #[expect(clippy::unused_self, reason = "the same signature as with a solver")]
    pub(crate) fn minimise(&self) -> Result<Vec<f64>, String> {
        Err("this build has no solver: the feature `highs` is off".to_owned())
    }
}

#[cfg(feature = "highs")]
mod highs {
    use highs::{HighsModelStatus, HighsStatus, Model, RowProblem, Sense, TrySetOptionError};

    use super::LinearProgram;

    /// The time limit of HiGHS for one program in seconds. source: assumed; programs of 32 devices take about a
    /// millisecond, those of a hundred devices take milliseconds, and a planner must not hang
    const TIME_LIMIT_SECONDS: f64 = 10.0;

    pub(super) fn minimise(program: &LinearProgram) -> Result<Vec<f64>, String> {
        let mut problem = RowProblem::default();
        let mut columns = Vec::with_capacity(program.columns.len());
        for column in &program.columns {
            let bounds = column.bounds.clone();
            columns.push(if column.integer {
                problem.add_integer_column(column.cost, bounds)
            } else {
                problem.add_column(column.cost, bounds)
            });
        }
        for row in &program.rows {
            let terms = row.terms.iter().map(|(column, factor)| (columns[*column], *factor));
            problem.add_row(row.bounds.clone(), terms);
        }
        let rejected =
            |status: HighsStatus| format!("the solver rejected the program with the status `{status:?}`");
        let mut model = problem.try_optimise(Sense::Minimise).map_err(rejected)?;
        model.make_quiet();
        let integer = program.columns.iter().any(|column| column.integer);
        configure(&mut model, integer).map_err(|error| error.to_string())?;
        let solved = model.try_solve().map_err(rejected)?;
        match solved.status() {
            HighsModelStatus::Optimal => {}
            status => return Err(format!("the solver returned the status `{status:?}`")),
        }
        let values = solved.get_solution().columns().to_vec();
        if values.len() == columns.len() && values.iter().all(|value| value.is_finite()) {
            Ok(values)
        } else {
            Err("the solver returned values that are not finite".to_owned())
        }
    }

    /// Sets the options of HiGHS. One thread makes the solution of a program the same everywhere. Integer programs
    /// also get a MIP gap of 0, as the default of 1e-4 would return the first nearly optimal plan; the tightest
    /// tolerance on reduced costs; and no feasibility heuristic, which takes six times as long as the relaxation.
    fn configure(model: &mut Model, integer: bool) -> Result<(), TrySetOptionError> {
        model.try_set_option("threads", 1)?;
        model.try_set_option("parallel", "off")?;
        model.try_set_option("random_seed", 0)?;
        model.try_set_option("time_limit", TIME_LIMIT_SECONDS)?;
        if integer {
            model.try_set_option("mip_rel_gap", 0.0)?;
            model.try_set_option("mip_abs_gap", 0.0)?;
            model.try_set_option("mip_heuristic_run_feasibility_jump", false)?;
            model.try_set_option("dual_feasibility_tolerance", 1e-10)?;
        }
        Ok(())
    }
}
