//! The model files that a command line names.

use std::path::PathBuf;

use super::Verb;
use super::ring::PlanOrModel;

impl Verb {
    /// Returns the paths of all model files, each of which may be the name of a model on a hub.
    pub fn model_paths_mut(&mut self) -> Vec<&mut PathBuf> {
        // Without a wildcard, so that a new command cannot be forgotten.
        match self {
            Verb::Plan(args) => args.planning.model.iter_mut().collect(),
            Verb::Simulate(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Sweep(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Lint(args) => args.source.planning.model.iter_mut().collect(),
            Verb::Whatif(args) => args.planning.model.iter_mut().collect(),
            Verb::Lab(args) => args.planning.model.iter_mut().collect(),
            Verb::Execute(args) => args.source.model_paths_mut().chain(&mut args.ring.draft_model).collect(),
            Verb::Serve(args) => args.source.model_paths_mut().chain(&mut args.ring.draft_model).collect(),
            Verb::Worker(args) => args.model.iter_mut().collect(),
            Verb::Profile(args) => args.model.iter_mut().collect(),
            Verb::Run(args) => vec![&mut args.model],
            Verb::Pack(args) => vec![&mut args.model],
            Verb::Bench(args) => vec![&mut args.model],
            Verb::Tokenize(args) => vec![&mut args.model],
            Verb::Gpu(_)
            | Verb::Pull(_)
            | Verb::Key(_)
            | Verb::Report(_)
            | Verb::Reproduce(_)
            | Verb::Synth(_)
            | Verb::Init(_)
            | Verb::Device(_)
            | Verb::Model(_)
            | Verb::Experts(_)
            | Verb::Advise(_)
            | Verb::Completions(_)
            | Verb::Schema(_)
            | Verb::Man(_) => Vec::new(),
        }
    }
}

impl PlanOrModel {
    /// Returns the two paths. Only a model can be named by a hub, so that a plan stays as it is.
    fn model_paths_mut(&mut self) -> impl Iterator<Item = &mut PathBuf> {
        [&mut self.plan].into_iter().chain(&mut self.model)
    }
}
