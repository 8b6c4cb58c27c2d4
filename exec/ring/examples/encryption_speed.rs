//! Measures the round-trip time of small frames and the throughput of large frames, with and without encryption.
//!
//!     cargo run --release -p hearth-ring --example encryption_speed

use std::time::Instant;

use hearth_ring::wire::{Frame, Message};
use hearth_ring::{EncryptedTransport, Key, Listener, TcpTransport, Transport};

/// Size in bytes of a small frame: the f32 activations of one token with an embedding length of 2048.
const SMALL_FRAME_BYTES: usize = 8 << 10;
const ROUND_TRIPS: u64 = 5000;
const LARGE_FRAME_BYTES: usize = 4 << 20;
const LARGE_FRAMES: u64 = 100;
const REPEATS: usize = 5;

type Failure = Box<dyn std::error::Error + Send + Sync>;

#[tokio::main]
async fn main() -> Result<(), Failure> {
    let key = Key::parse("a phrase for a measurement")?;
    let mut small = [Vec::new(), Vec::new()];
    let mut large = [Vec::new(), Vec::new()];
    // Alternately, so that other load of this machine affects both.
    for _ in 0..REPEATS {
        small[0].push(round_trip(&TcpTransport).await?);
        small[1].push(round_trip(&EncryptedTransport::new(TcpTransport, key.clone())).await?);
        large[0].push(one_way(&TcpTransport).await?);
        large[1].push(one_way(&EncryptedTransport::new(TcpTransport, key.clone())).await?);
    }
    for (at, name) in ["plain", "encrypted"].into_iter().enumerate() {
        let (trip, rate) = (median(&mut small[at]), LARGE_FRAME_BYTES as f64 / median(&mut large[at]) / 1e6);
        println!("{name:>9}: round trip of 8 KiB in {:.1} us, 4 MiB frames at {rate:.0} MB/s", trip * 1e6);
    }
    Ok(())
}

fn median(seconds: &mut [f64]) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

fn frame(bytes: usize) -> Frame {
    Frame { message: Message::Ping { nonce: 1 }, payload: vec![1; bytes] }
}

async fn pair<T: Transport>(transport: &T) -> Result<(T::Stream, T::Stream), Failure> {
    let mut listener = transport.bind("127.0.0.1:0").await?;
    let near = transport.connect(&listener.address()).await?;
    Ok((near, listener.accept().await?))
}

#[allow(clippy::disallowed_methods)] // a measurement reads the clock
async fn round_trip<T: Transport>(transport: &T) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(transport).await?;
    let echo = tokio::spawn(async move {
        while let Ok(Some(frame)) = Frame::read(&mut far, SMALL_FRAME_BYTES).await {
            if frame.write(&mut far).await.is_err() {
                return;
            }
        }
    });
    let frame = frame(SMALL_FRAME_BYTES);
    let mut started = Instant::now();
    for trip in 0..=ROUND_TRIPS {
        frame.write(&mut near).await?;
        Frame::read(&mut near, SMALL_FRAME_BYTES).await?;
        if trip == 0 {
            started = Instant::now();
        }
    }
    let seconds = started.elapsed().as_secs_f64() / ROUND_TRIPS as f64;
    drop(near);
    echo.await?;
    Ok(seconds)
}

#[allow(clippy::disallowed_methods)] // a measurement reads the clock
async fn one_way<T: Transport>(transport: &T) -> Result<f64, Failure> {
    let (mut near, mut far) = pair(transport).await?;
    let frame = frame(LARGE_FRAME_BYTES);
    let writing = tokio::spawn(async move {
        for _ in 0..=LARGE_FRAMES {
            frame.write(&mut near).await?;
        }
        Ok::<_, Failure>(())
    });
    Frame::read(&mut far, LARGE_FRAME_BYTES).await?;
    let started = Instant::now();
    for _ in 0..LARGE_FRAMES {
        Frame::read(&mut far, LARGE_FRAME_BYTES).await?;
    }
    let seconds = started.elapsed().as_secs_f64() / LARGE_FRAMES as f64;
    writing.await??;
    Ok(seconds)
}
