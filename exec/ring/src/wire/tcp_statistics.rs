//! What the kernel knows about a TCP connection: round-trip time, congestion window, retransmissions.
//!
//! Only on Linux, whose option `TCP_INFO` has these values (`struct tcp_info` in include/uapi/linux/tcp.h).

use std::time::Duration;

use tokio::net::TcpStream;

/// The state of a TCP connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpStatistics {
    /// The smoothed round-trip time.
    pub round_trip: Duration,
    /// The congestion window, in segments.
    pub congestion_window: u32,
    /// Data segments sent, with repetitions.
    pub sent_segments: u64,
    pub retransmitted_segments: u64,
}

#[cfg(target_os = "linux")]
pub fn read_tcp_statistics(stream: &TcpStream) -> Option<TcpStatistics> {
    use std::os::fd::AsRawFd;

    // SAFETY: all fields are integers, for which zero is valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut length = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the descriptor is open as long as the stream is borrowed, and the kernel writes at most `length` bytes.
    let status = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut length,
        )
    };
    (status == 0).then(|| TcpStatistics {
        round_trip: Duration::from_micros(info.tcpi_rtt.into()),
        congestion_window: info.tcpi_snd_cwnd,
        sent_segments: info.tcpi_data_segs_out.into(),
        retransmitted_segments: info.tcpi_total_retrans.into(),
    })
}

#[cfg(not(target_os = "linux"))]
pub fn read_tcp_statistics(_stream: &TcpStream) -> Option<TcpStatistics> {
    None
}
