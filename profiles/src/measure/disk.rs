//! Measures the disk rates of this machine.
//!
//! Five kinds of reads are measured with a cold page cache: sequential read calls, page faults of the compute threads
//! on a mapping, populating a mapping ahead of use, and reads of pieces and of single pages at random positions. The CPU time of a
//! thread that streams weights (requests, populates and discards pages) is also measured, because this time limits
//! streaming from any disk. The model file is read if there is one, because file systems and file layouts differ. A
//! scratch file in the same folder is read if there is no model file, or if other processes keep the pages of the model
//! file in memory.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use super::MeasurementError;
use super::file_reading::{ColdFile, read_by_faults, read_by_populating, read_sequentially};
use super::sampling::{MeasurementOptions, Samples};
use super::scratch::ScratchFile;
use crate::device::Disk;
use crate::document_values::Sourced;
use crate::units::{Bytes, BytesPerSecond, RoundForDisplay, Seconds};

/// Minimum size of a model file for the measurement. In place of a smaller file, a scratch file is read.
const MIN_MODEL_BYTES: Bytes = Bytes::from_mib(8);

/// The file that is read in a disk measurement.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DiskTarget {
    /// An existing file. The measurement drops its pages from the page cache, but does not change the file.
    File(PathBuf),
    /// A scratch file in this folder, which is removed after the measurement.
    Folder(PathBuf),
}

impl DiskTarget {
    fn folder(&self) -> &Path {
        match self {
            DiskTarget::File(file) => {
                let parent = file.parent().filter(|parent| !parent.as_os_str().is_empty());
                parent.unwrap_or(Path::new("."))
            }
            DiskTarget::Folder(folder) => folder,
        }
    }

    /// Opens the file to read. Returns the file and a description for the sources of the rates.
    fn open(&self, options: &MeasurementOptions) -> Result<(ColdFile, String), MeasurementError> {
        if let DiskTarget::File(path) = self {
            let open = || File::open(path).map_err(MeasurementError::for_file("open", path));
            let files = [open()?, open()?];
            let size =
                files[0].metadata().map_err(MeasurementError::for_file("read the size of", path))?.len();
            let mut file = ColdFile::new(path, files, size, options.max_file_size.0);
            if size >= MIN_MODEL_BYTES.0.min(options.max_file_size.0) && file.can_drop_cache()? {
                return Ok((file, "the model's file".into()));
            }
        }
        let scratch = ScratchFile::create(self.folder(), options)?;
        let what = format!("a scratch file of {}", Bytes(scratch.length));
        Ok((ColdFile::new(&scratch.path, scratch.files, scratch.length, options.max_file_size.0), what))
    }
}

/// Measures the disk that stores `target`, with page faults on `threads` threads. Reports each step to `progress`.
pub fn measure_disk(
    target: &DiskTarget,
    threads: usize,
    options: &MeasurementOptions,
    progress: &mut dyn FnMut(&str),
) -> Result<Disk, MeasurementError> {
    let (mut file, what) = target.open(options)?;
    let cold = "each after fadvise has dropped the page cache, without O_DIRECT";
    progress("disk: sequential reads");
    let samples = file.read_rate(options, read_sequentially)?;
    let source = format!("sequential reads of {what} in calls of 1 MiB, {cold}");
    let sequential = samples.sourced_positive_median(BytesPerSecond, &source)?;
    progress("disk: page faults");
    let samples = file.read_rate(options, |file, range, end| read_by_faults(threads, file, &range, end))?;
    let source = format!(
        "touching a mapping of {what} from front to back with {threads} threads and no advice, {cold}"
    );
    let fault = samples.sourced_positive_median(BytesPerSecond, &source)?;
    progress("disk: populating");
    let samples = file.read_rate(options, |file, range, until| read_by_populating(file, &range, until));
    let populate =
        if_supported(samples, &format!("MADV_POPULATE_READ over {what} in calls of 2 MiB, {cold}"))?;
    progress("disk: streaming");
    let turnover = if_supported(
        file.stream_rate(options),
        &format!(
            "CPU time of one thread that requests pieces of {what} of 1 MiB (MADV_WILLNEED), populates \
             them and discards them (MADV_DONTNEED, fadvise), {cold}"
        ),
    )?;
    progress("disk: random pieces");
    let reading_rate = populate.as_ref().unwrap_or(&sequential).value;
    let piece_latency = match file.random_piece_times(options) {
        Ok((bytes, times)) => {
            let own_time = (bytes / reading_rate).0;
            let what = format!(
                "reading {bytes} past the page cache at random places of {what}, less the time at the rate of populating"
            );
            Some(times.sourced_median(|time| Seconds((time - own_time).max(0.0)), &what))
        }
        Err(error) if is_unsupported(&error) => None,
        Err(error) => return Err(error),
    };
    progress("disk: random reads");
    let times = file.random_read_times(options)?;
    let latency =
        times.sourced_median(Seconds, &format!("one read of 4 KiB at random places of {what}, {cold}"));
    let random = Sourced {
        value: (Bytes(4096) / Seconds(latency.value.0.max(1e-9))).rounded(),
        source: format!("derived: 4 KiB over `latency`; {}", latency.source),
        spread: latency.spread,
    };
    Ok(Disk {
        sequential_bandwidth: sequential,
        fault_bandwidth: Some(fault),
        random_bandwidth: Some(random),
        populate_bandwidth: populate,
        page_cache_throughput: turnover,
        latency: Some(latency),
        piece_latency,
        bandwidth_limit: None,
        read_ahead_window: read_ahead_window(target.folder()),
    })
}

/// Returns the rate from the samples, or `None` if the system lacks the system call, as Linux before 5.14 does.
fn if_supported(
    samples: Result<Samples, MeasurementError>,
    what: &str,
) -> Result<Option<Sourced<BytesPerSecond>>, MeasurementError> {
    match samples {
        Ok(samples) => samples.sourced_positive_median(BytesPerSecond, what).map(Some),
        Err(error) if is_unsupported(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

fn is_unsupported(error: &MeasurementError) -> bool {
    use io::ErrorKind::{InvalidInput, Unsupported};
    matches!(error, MeasurementError::File { source, .. } if matches!(source.kind(), Unsupported | InvalidInput))
}

/// Returns the read-ahead window of the block device that stores a folder, or `None` if the window is unknown.
pub fn read_ahead_window(folder: &Path) -> Option<Sourced<Bytes>> {
    #[cfg(any(target_os = "android", target_os = "linux"))]
    {
        use std::os::unix::fs::MetadataExt;
        let device = fs::metadata(folder).ok()?.dev();
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let path = Path::new("/sys/class/bdi").join(number).join("read_ahead_kb");
        let kib: u64 = fs::read_to_string(&path).ok()?.trim().parse().ok()?;
        Some(Sourced::new(Bytes(kib * 1024), format!("read from {}", path.display())))
    }
    #[cfg(not(any(target_os = "android", target_os = "linux")))]
    {
        let _ = fs::metadata(folder);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_usable(disk: &Disk) {
        let rates = [
            &disk.fault_bandwidth,
            &disk.random_bandwidth,
            &disk.populate_bandwidth,
            &disk.page_cache_throughput,
        ];
        for rate in rates.into_iter().flatten().chain([&disk.sequential_bandwidth]) {
            assert!(rate.value.0.is_finite() && rate.value.0 > 0.0, "{rate:?}");
            assert!(rate.source.contains("median of "), "{rate:?}");
        }
        assert!(disk.latency.as_ref().unwrap().value.0 > 0.0);
    }

    #[test]
    fn folder_is_measured_with_a_scratch_file() {
        let folder = tempfile::tempdir().unwrap();
        let target = DiskTarget::Folder(folder.path().into());
        let mut messages = Vec::new();
        let disk = measure_disk(&target, 2, &MeasurementOptions::minimal(), &mut |what| {
            messages.push(what.to_owned());
        })
        .unwrap();
        assert_usable(&disk);
        let source = &disk.sequential_bandwidth.source;
        assert!(source.contains("a scratch file of "), "{source}");
        assert!(messages.len() >= 4);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn file_is_measured_unchanged() {
        let folder = tempfile::tempdir_in(".").unwrap();
        let path = folder.path().join("model.gguf");
        let content = vec![7; 5 << 20];
        fs::write(&path, &content).unwrap();
        File::open(&path).unwrap().sync_all().unwrap();
        let disk =
            measure_disk(&DiskTarget::File(path.clone()), 1, &MeasurementOptions::minimal(), &mut |_| ())
                .unwrap();
        assert_usable(&disk);
        assert_eq!(fs::read(&path).unwrap(), content);
        let missing = DiskTarget::File(folder.path().join("missing.gguf"));
        let error = measure_disk(&missing, 1, &MeasurementOptions::minimal(), &mut |_| ()).unwrap_err();
        assert!(error.to_string().starts_with("cannot open `"), "{error}");
    }
}
