//! Models on a hub: resolves the names in flags and scenarios to paths, and shows the progress of downloads.

use std::path::PathBuf;
use std::sync::OnceLock;

use hearth_hub::{Activity, Hub, HubConfig, HubError, HubErrorKind, Monitor, Progress, Pull};
use hearth_schema::hub_model::{HubModelName, NAME_HINT, is_hub_model_name};
use hearth_workflow::Error;
use indicatif::ProgressBar;

use crate::diagnostics::Failure;
use crate::interruption::{CancellationGuard, EXIT_INTERRUPTED};
use crate::output::say_stderr;
use crate::progress;

/// Parses the name of a model on a hub.
pub fn parse_name(text: &str) -> Result<HubModelName, Failure> {
    text.parse().map_err(|error| Failure::invalid(error).with_hint(NAME_HINT))
}

/// Replaces each path that is the name of a model on a hub by the path of its file, which is downloaded if it is
/// missing.
pub fn locate_models(paths: Vec<&mut PathBuf>) -> Result<(), Failure> {
    for path in paths {
        if let Some(name) = path.to_str().filter(|name| is_hub_model_name(name)) {
            *path = locate(&parse_name(name)?)?;
        }
    }
    Ok(())
}

/// Returns the path of a model, which is downloaded if it is missing.
pub fn locate(name: &HubModelName) -> Result<PathBuf, Failure> {
    let path = with_progress(|hub, monitor| hub.locate(name, monitor))?;
    if name.selector.is_none() {
        tracing::info!("{name} is {}", path.display());
    }
    Ok(path)
}

/// Returns the path of a model that a document names, like [`locate`]. Errors of documents have no exit code, so that
/// the program exits here if Ctrl-C stopped the download.
pub fn locate_for_document(name: &HubModelName) -> Result<PathBuf, Error> {
    locate(name).map_err(|failure| {
        if failure.exit_code == EXIT_INTERRUPTED.0 {
            say_stderr!("{}", failure.to_string().trim_end());
            EXIT_INTERRUPTED.exit();
        }
        failure.into_error()
    })
}

/// Downloads the latest version of a model, or lists the models of a repository.
pub fn pull(name: &HubModelName) -> Result<Pull, Failure> {
    with_progress(|hub, monitor| hub.pull(name, monitor))
}

/// Calls a function with the hub of the environment. Ctrl-C cancels it.
fn with_progress<T>(work: impl FnOnce(&Hub, &Monitor) -> Result<T, HubError>) -> Result<T, Failure> {
    let hub = Hub::new(HubConfig::from_env()?);
    let _guard = CancellationGuard::begin();
    let bar = OnceLock::new();
    let monitor = Monitor {
        on_progress: &|progress| show(&bar, progress),
        is_cancelled: &CancellationGuard::is_cancelled,
    };
    let result = work(&hub, &monitor);
    if let Some(bar) = bar.get() {
        bar.finish_and_clear();
    }
    Ok(result?)
}

/// Shows progress in a bar, which the first call creates.
fn show(bar: &OnceLock<ProgressBar>, Progress { activity, done, total }: Progress) {
    let bar = bar.get_or_init(|| progress::progress_bar("", total, progress::BYTES_TEMPLATE));
    if bar.is_hidden() {
        return;
    }
    bar.set_message(match activity {
        Activity::Waiting => "waiting",
        Activity::Verifying => "verifying",
        Activity::Downloading => "downloading",
    });
    bar.set_position(done);
}

impl From<HubError> for Failure {
    fn from(error: HubError) -> Self {
        let failure = match error.kind() {
            HubErrorKind::Invalid => Failure::invalid(&error),
            HubErrorKind::Unreachable | HubErrorKind::Failed => Failure::failed(&error),
            HubErrorKind::Cancelled => Failure::interrupted(&error),
        };
        let failure = error.location().into_iter().fold(failure, Failure::with_location);
        error.hint().into_iter().fold(failure, Failure::with_hint)
    }
}
