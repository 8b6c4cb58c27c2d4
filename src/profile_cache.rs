//! The profile cache: keeps the measured profile of this machine, so that no command measures it twice.
//!
//! A cached profile is valid for the same processor, number of CPUs, CPU quota, memory size, kernel, disk, build of
//! hearth, number of threads and duration of the measurement. The available memory is not cached. The user measures
//! again by deleting the file.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use hearth_halda::lint;
use hearth_profiles::measure::{memory, processor};
use hearth_profiles::{DeviceProfile, Document};
use hearth_runtime::profile::{ProfileOptions, os_and_kernel};
use hearth_schema::digest::digest_text;
use hearth_workflow::documents::read_document;
use hearth_workflow::files::write;

use crate::machine::cache_folder;

/// Maximum number of profiles of other builds, disks and thread counts. source: assumed
const MAX_OTHER_PROFILES: usize = 9;

/// The cached profile of this machine for one set of measurement options.
#[derive(Debug)]
pub struct ProfileCache {
    path: PathBuf,
    /// The name of the device in the scenario.
    name: String,
}

impl ProfileCache {
    /// Returns the cache for a measurement with these options; `None` if the user has no cache folder.
    pub fn new(options: &ProfileOptions) -> Option<ProfileCache> {
        let ProfileOptions { name: device, model, threads, measurement, max_pass_tokens } = options;
        let program = std::env::current_exe().and_then(std::fs::metadata).ok()?;
        let disk = std::fs::metadata(model.clone().unwrap_or_else(|| ".".into())).ok()?.dev();
        let key = format!(
            "{} {:?} {:?} {} {} {disk} {} {}.{} {threads} {max_pass_tokens} {measurement:?} {model:?}",
            processor::cpu_name(),
            processor::allowed_cpus(),
            processor::cpu_quota_description(),
            memory::total_memory(),
            os_and_kernel(),
            program.len(),
            program.mtime(),
            program.mtime_nsec(),
        );
        let digest = digest_text(&key);
        let name = digest.strip_prefix("sha256:").unwrap_or(&digest);
        let path = cache_folder()?.join("profiles").join(format!("{name}.yaml"));
        Some(ProfileCache { path, name: device.clone() })
    }

    /// Returns the cached profile with the memory that is available now; `None` if there is no valid profile.
    pub fn read(&self) -> Option<DeviceProfile> {
        let mut device: DeviceProfile = read_document(&self.path).ok()?;
        device.memory = memory::measure_memory();
        device.name.clone_from(&self.name);
        device.validate().ok()?;
        let path = self.path.display();
        let uncertain = lint::uncertain_rates(&device, |_| true).len();
        let doubt =
            if uncertain == 0 { String::new() } else { format!("; {uncertain} of its rates are uncertain") };
        tracing::info!("using the measurement of this machine in {path} (delete it to measure again{doubt})");
        Some(device)
    }

    /// Removes the profiles of old builds, except the newest ones.
    fn remove_old(&self) {
        let folder = self.path.parent().and_then(|folder| std::fs::read_dir(folder).ok());
        let entries = folder.into_iter().flatten().flatten();
        let mut profiles: Vec<_> =
            entries.filter_map(|entry| Some((entry.metadata().ok()?.mtime(), entry.path()))).collect();
        profiles.sort();
        for (_, path) in profiles.iter().rev().skip(MAX_OTHER_PROFILES) {
            let _ = std::fs::remove_file(path);
        }
    }

    /// Keeps a measured profile. If it cannot be kept, the next command measures again.
    pub fn write(&self, device: &DeviceProfile) {
        // If the folder cannot be created, `write` says why.
        let _ = self.path.parent().map(std::fs::create_dir_all);
        self.remove_old();
        if let Err(error) = write(&self.path, device.to_yaml().as_bytes()) {
            tracing::debug!("the measurement is not kept: {}", error.one_line_message());
        }
    }
}
