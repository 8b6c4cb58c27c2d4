//! The head's listener: lets in those who send activations to the head, and those who fetch layers from it.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};

use super::layer_server;
use crate::execution::LocalModel;
use crate::wire::{Known, Listener, Purpose, SharedDoor, Strangers, admit, hear, refuse};

/// After a connection that could not be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Lets in those who send activations to the head, and those who fetch layers from it.
pub(super) async fn accept<L: Listener>(mut listener: L, door: SharedDoor, model: Arc<LocalModel>)
where
    L::Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let mut strangers = Strangers::default();
    loop {
        let Ok(stream) = listener.accept().await else {
            tokio::time::sleep(ACCEPT_PAUSE).await;
            continue;
        };
        let (door, model) = (door.clone(), model.clone());
        strangers.let_in(move |known| take_connection(stream, door, model, known));
    }
}

/// Serves a connection to the head, from its first frame on.
async fn take_connection<S>(mut stream: S, door: SharedDoor, model: Arc<LocalModel>, known: Known)
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let Ok((session, purpose)) = hear(&mut stream).await else { return };
    known.greeted();
    let own = door.lock().unwrap_or_else(PoisonError::into_inner).as_ref().map(|door| door.session);
    // How these end is told to the head by the door, or by the worker that fetches.
    match purpose {
        Purpose::Data { from, epoch } => {
            let _ = admit(stream, &door, session, (from, epoch), model.max_activation_bytes()).await;
        }
        Purpose::Fetch if own == Some(session) => {
            let _ = layer_server::serve(stream, model).await;
        }
        _ => drop(refuse(&mut stream, "this is the head of another session, or no worker".into()).await),
    }
}
