//! Serves the layers of the head's model to workers that have no model file.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Result, protocol_error};
use crate::execution::LocalModel;
use crate::wire::{
    ByteStream, FileLengths, Frame, Message, WRITE_TIMEOUT, WorkerInfo, send_welcome, with_timeout,
};
use hearth_runtime::fetched_file::{CHUNK_BYTES, sha256};

/// The time limit between two requests of a worker. The worker may have to check its files first. source: assumed
const IDLE_DEADLINE: Duration = Duration::from_mins(10);

/// Serves chunks of the model files to a worker, until the worker closes the connection.
pub async fn serve(mut stream: impl ByteStream, model: Arc<LocalModel>) -> Result<()> {
    send_welcome(&mut stream, WorkerInfo::default()).await?;
    loop {
        let read = Frame::read(&mut stream, 0);
        let request = with_timeout(IDLE_DEADLINE, "waiting for a request for layers", read).await??;
        let reply = match request.map(|frame| frame.message) {
            None => return Ok(()),
            Some(Message::ListFiles) => {
                let sizes = model.weights.model().file_sizes.iter();
                let files = sizes
                    .map(|size| FileLengths { file_bytes: size.file_bytes, header_bytes: size.data_start });
                Frame::from(Message::Files { files: files.collect() })
            }
            Some(Message::GetChunk { file, chunk }) => {
                let shared = model.clone();
                // The pages may have to be read from disk.
                let read = tokio::task::spawn_blocking(move || read_chunk(&shared, file, chunk)).await;
                let read = read.map_err(|error| protocol_error("the head", error.to_string()))?;
                model.weights.check_unchanged()?;
                read.ok_or_else(|| {
                    protocol_error("a worker", "it requested a chunk that the model does not have")
                })?
            }
            Some(_) => {
                return Err(protocol_error("a worker", "its message is not a request for layers"));
            }
        };
        with_timeout(WRITE_TIMEOUT, "sending layers", reply.write(&mut stream)).await??;
    }
}

fn read_chunk(model: &LocalModel, file: u16, chunk: u64) -> Option<Frame> {
    // After the files of the model there may be one with packed weights.
    let model_files = model.weights.model().file_paths.len();
    let bytes = model.weights.mappings().take(model_files).nth(usize::from(file))?;
    let start = usize::try_from(chunk.checked_mul(CHUNK_BYTES)?).ok()?;
    let payload = bytes.get(start..bytes.len().min(start.checked_add(CHUNK_BYTES as usize)?))?.to_vec();
    let message = Message::Chunk { file, chunk, hash: sha256(&payload) };
    Some(Frame { message, payload })
}
