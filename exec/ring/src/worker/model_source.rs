//! The source of a worker's layers: a model file, or the head.
//!
//! A worker without a model file fetches its layers over a separate connection to the head: first the chunks of the
//! files' headers, which have the offset of each tensor, and then the chunks of its layers and of the small tensors
//! outside the layers. Each chunk is sent with its hash. Fetched chunks are stored in a folder that the user chooses,
//! and are not fetched again in a later session or after a broken connection.
//!
//! The head is trusted: a device with the key could send wrong weights. The hash only detects data that was damaged
//! during an unencrypted transmission, or on the disk.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::gguf::{GgufModel, layer_of_tensor};
use hearth_profiles::model::ModelProfile;
use hearth_schema::Plan;
use hearth_schema::pass::MAX_PASS_TOKENS;

use super::epoch::{EpochReport, WorkerEpoch};
use super::worker::WorkerOptions;
use crate::error::{Result, RingError, protocol_error};
use crate::execution::{LocalModel, check_executable, worker_info_without_model};
use crate::wire::{
    ByteStream, ConnectionPurpose, FileLengths, Frame, Message, Transport, WRITE_TIMEOUT, WorkerInfo,
    open_connection, with_timeout,
};
use hearth_runtime::fetched_file::{CHUNK_BYTES, FetchedFile};
use hearth_runtime::{ExecError, Weights};

/// The time limit for one chunk over a slow link. source: assumed, 1 MiB at half a megabit per second
const CHUNK_DEADLINE: Duration = Duration::from_secs(20);
/// Maximum number of chunk requests without a reply. source: assumed, 4 MiB fill a gigabit link of 30 ms round trip
const CHUNKS_AHEAD: usize = 4;
const MAX_FILES: usize = 1024;
/// Maximum size in bytes of the header of a model file, which has the tensor table and the vocabulary.
const MAX_HEADER_BYTES: u64 = 1 << 30;
/// Maximum size of a model file in bytes, so that sums of sizes cannot overflow.
const MAX_FILE_BYTES: u64 = 1 << 50;

/// Limit in bytes of the activations of a pass if the model is unknown: twice those of an embedding length of 16384.
const MAX_ACTIVATION_BYTES: usize = 2 * MAX_PASS_TOKENS as usize * (16 << 10) * size_of::<f32>();

#[derive(Debug, Clone)]
pub enum ModelSource {
    /// A local model file.
    File(Arc<LocalModel>),
    /// The layers are fetched from the head, and stored in this folder.
    Fetch(PathBuf),
}

impl ModelSource {
    fn model(&self) -> Option<&LocalModel> {
        match self {
            ModelSource::File(model) => Some(model),
            ModelSource::Fetch(_) => None,
        }
    }

    pub(super) fn worker_info(&self) -> WorkerInfo {
        self.model().map_or_else(worker_info_without_model, LocalModel::worker_info)
    }

    /// Returns the maximum size of the received activations of a pass, in bytes.
    pub(super) fn max_activation_bytes(&self) -> usize {
        self.model().map_or(MAX_ACTIVATION_BYTES, LocalModel::max_activation_bytes)
    }

    pub(super) fn check_plan(&self, plan: &Plan) -> Result<()> {
        self.model().map_or_else(|| check_executable(plan), |model| model.check_plan(plan))
    }
}

impl<T: Transport> WorkerEpoch<T> {
    /// Fetches the missing chunks into a subfolder of `folder`, reports the progress to the head, and opens the model.
    pub(super) async fn fetch_layers(&self, folder: &Path) -> Result<LocalModel> {
        let (transport, head) = (&self.worker.transport, &self.config.head_address);
        let (mut stream, _) =
            open_connection(transport, "the head", head, self.session, ConnectionPurpose::Fetch).await?;
        let lengths = list_files(&mut stream).await?;
        let paths = file_paths(&self.plan, folder, lengths.len())?;
        let mut files = Vec::new();
        for (lengths, path) in lengths.iter().zip(&paths) {
            let opened = FetchedFile::open(path, lengths.file_bytes);
            files.push(opened.map_err(|error| RingError::unusable_fetch_folder(path, &error))?);
        }
        let headers: Vec<_> =
            lengths.iter().map(|lengths| std::iter::once(0..lengths.header_bytes).collect()).collect();
        self.fetch_ranges(&mut stream, &mut files, &headers, folder).await?;
        let model = GgufModel::open(&paths[0]).map_err(ExecError::from)?;
        let profile = ModelProfile::from_gguf(&model).map_err(ExecError::from)?;
        if profile.shape_digest() != self.plan.model.shape_digest {
            return Err(protocol_error("the head", "it serves a different model than the one in its plan"));
        }
        let own = self.plan.windows(usize::from(self.config.device_index));
        let ranges = tensor_ranges(&model, &own, files.len());
        self.fetch_ranges(&mut stream, &mut files, &ranges, folder).await?;
        let own = own.into_iter().flatten().collect();
        let weights = Arc::new(Weights::open_fetched(&paths[0], own)?);
        let WorkerOptions { backend_factory, verification, .. } = self.worker.options.clone();
        Ok(LocalModel { weights, profile, backend_factory, verification, route_options: Arc::default() })
    }

    /// Fetches the missing chunks of the byte ranges `ranges[i]` of each file `files[i]`, with up to [`CHUNKS_AHEAD`]
    /// requests at the same time.
    async fn fetch_ranges(
        &self,
        stream: &mut T::Stream,
        files: &mut [FetchedFile],
        ranges: &[Vec<Range<u64>>],
        folder: &Path,
    ) -> Result<()> {
        let cannot = |error: std::io::Error| RingError::unusable_fetch_folder(folder, &error);
        let mut missing = Vec::new();
        for (index, (file, ranges)) in (0u16..).zip(files.iter_mut().zip(ranges)) {
            let chunks = file.find_missing_chunks(ranges).map_err(cannot)?;
            missing.extend(chunks.into_iter().map(|chunk| (index, chunk)));
        }
        let total = missing.len() as u64;
        let (mut missing, mut requested, mut done) = (missing.into_iter(), VecDeque::new(), 0);
        loop {
            while requested.len() < CHUNKS_AHEAD
                && let Some((file, chunk)) = missing.next()
            {
                let request = Frame::from(Message::GetChunk { file, chunk });
                with_timeout(WRITE_TIMEOUT, "requesting layers", request.write(stream)).await??;
                requested.push_back((file, chunk));
            }
            let Some(expected) = requested.pop_front() else { return Ok(()) };
            let read = Frame::read(stream, CHUNK_BYTES as usize);
            let frame = with_timeout(CHUNK_DEADLINE, "receiving a chunk of the model", read).await??;
            let Some(Frame { message: Message::Chunk { file, chunk, hash }, payload }) = frame else {
                return Err(protocol_error("the head", "its reply is not a chunk of the model"));
            };
            let target = files.get_mut(usize::from(file)).filter(|_| (file, chunk) == expected);
            let Some(target) = target else {
                return Err(protocol_error("the head", "it sent a chunk that was not requested"));
            };
            if !target.write_chunk(chunk, &payload, hash).map_err(cannot)? {
                let what = format!("chunk {chunk} of file {file} does not match its hash");
                return Err(protocol_error("the head", what));
            }
            done += 1;
            let (done, total) = (done * CHUNK_BYTES, total * CHUNK_BYTES);
            self.report(EpochReport::Message(Message::Fetching { done, total }));
        }
    }
}

/// Returns the paths of the model's files. Creates their folder, which is named after the digest of the model.
fn file_paths(plan: &Plan, folder: &Path, count: usize) -> Result<Vec<PathBuf>> {
    let digest = plan.model.file_digest.as_ref().unwrap_or(&plan.model.shape_digest);
    // The digest comes from another device, so only letters and digits may become part of a path.
    let name: String = digest.chars().filter(char::is_ascii_alphanumeric).take(80).collect();
    let folder = folder.join(if name.is_empty() { "model" } else { &name });
    std::fs::create_dir_all(&folder).map_err(|error| RingError::unusable_fetch_folder(&folder, &error))?;
    Ok(match count {
        1 => vec![folder.join("model.gguf")],
        _ => (1..=count).map(|split| folder.join(format!("model-{split:05}-of-{count:05}.gguf"))).collect(),
    })
}

async fn list_files(stream: &mut impl ByteStream) -> Result<Vec<FileLengths>> {
    let request = Frame::from(Message::ListFiles);
    with_timeout(WRITE_TIMEOUT, "requesting the list of model files", request.write(stream)).await??;
    let frame = with_timeout(CHUNK_DEADLINE, "listing the model files", Frame::read(stream, 0)).await??;
    let Some(Frame { message: Message::Files { files }, .. }) = frame else {
        return Err(protocol_error("the head", "its reply is not the list of its model files"));
    };
    let is_valid = |lengths: &FileLengths| {
        lengths.header_bytes <= lengths.file_bytes.min(MAX_HEADER_BYTES)
            && (1..=MAX_FILE_BYTES).contains(&lengths.file_bytes)
    };
    if files.is_empty() || files.len() > MAX_FILES || !files.iter().all(is_valid) {
        return Err(protocol_error("the head", "the list of its model files is invalid"));
    }
    Ok(files)
}

/// Returns the byte ranges to fetch from each file: the tensors of the layers `own`, and the tensors outside all layers
/// except the embedding and the output matrix.
fn tensor_ranges(model: &GgufModel, own: &[Range<u32>], file_count: usize) -> Vec<Vec<Range<u64>>> {
    let is_needed = |name: &str| match layer_of_tensor(name) {
        Some(layer) => own.iter().any(|window| window.contains(&layer)),
        None => !["token_embd.weight", "output.weight"].contains(&name),
    };
    let mut ranges = vec![Vec::new(); file_count];
    for tensor in model.tensors.iter().filter(|tensor| is_needed(&tensor.name)) {
        if let Some(ranges) = ranges.get_mut(tensor.file_index) {
            ranges.push(tensor.offset..tensor.offset.saturating_add(tensor.bytes.0));
        }
    }
    ranges
}
