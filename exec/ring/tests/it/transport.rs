//! The contract of transports, checked for each implementation.

use std::sync::Arc;
use std::time::Duration;

use hearth_profiles::Seconds;
use hearth_ring::wire::{Frame, Message, WireError};
use hearth_ring::{
    DelayedTransport, EmulatedPath, EmulatedTransport, EncryptedTransport, Key, Listener, MemoryTransport,
    TcpTransport, Transport,
};

/// Checks that frames arrive whole and in order, a truncated frame is an error, and an address has one listener.
async fn check_transport_contract(transport: impl Transport, address: &str) {
    let mut listener = transport.bind(address).await.unwrap();
    assert!(transport.bind(&listener.address()).await.is_err(), "the address is in use");
    let mut near = transport.connect(&listener.address()).await.unwrap();
    let mut far = listener.accept().await.unwrap();
    let frame = |nonce: u64| {
        let payload = vec![nonce as u8; nonce as usize * 7];
        Frame { message: Message::Ping { nonce }, payload }
    };
    let frames: Vec<Frame> = (0..100).map(frame).collect();
    let sent = frames.clone();
    let writer = tokio::spawn(async move {
        for frame in &sent {
            frame.write(&mut near).await.unwrap();
        }
        let half = sent[9].encode().unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut near, &half[..20]).await.unwrap();
    });
    for frame in &frames {
        assert_eq!(Frame::read(&mut far, 1 << 10).await.unwrap().as_ref(), Some(frame));
    }
    assert!(matches!(Frame::read(&mut far, 1 << 10).await, Err(WireError::Truncated)));
    writer.await.unwrap();
    assert!(transport.connect("127.0.0.1:1").await.is_err(), "there is no listener");
}

#[tokio::test]
async fn transports_deliver_whole_frames_in_order() {
    let key = Key::parse("a phrase for a test").unwrap();
    check_transport_contract(TcpTransport, "127.0.0.1:0").await;
    check_transport_contract(MemoryTransport::default(), "a").await;
    check_transport_contract(EncryptedTransport::new(TcpTransport, key.clone()), "127.0.0.1:0").await;
    check_transport_contract(EncryptedTransport::new(MemoryTransport::default(), key), "a").await;
    let delayed = DelayedTransport::new(MemoryTransport::default(), Duration::from_millis(1));
    check_transport_contract(delayed, "a").await;
    let path = EmulatedPath::with_latency(Seconds(1e-4));
    let emulated = EmulatedTransport::new(TcpTransport, Arc::new(move |_| Ok(path.clone())));
    check_transport_contract(emulated, "127.0.0.1:0").await;
}
