//! Clocks: wall time, and the CPU time and run-queue delay of a thread.
//!
//! Only this module of the crate reads clocks. Wall time is monotonic. The CPU time of a thread comes from its CPU
//! clock. The run-queue delay, the time for which the thread was ready but not running, is the second number in
//! `/proc/thread-self/schedstat`. The rest of the wall time is waiting; in a compute step, the thread waits for pages
//! of weights from disk.
//!
//! The run-queue delay is known only on Linux; on other systems it is zero.

#[cfg(unix)]
use hearth_profiles::measure::sampling::thread_cpu_time;

use crate::read_counter::ProcFile;

/// Returns monotonic wall time in nanoseconds since the first call in this process.
#[allow(clippy::disallowed_methods)] // real computations take real time, and this module measures it
pub fn monotonic_nanos() -> u64 {
    use std::sync::OnceLock;
    use std::time::Instant;
    static START: OnceLock<Instant> = OnceLock::new();
    let start = *START.get_or_init(Instant::now);
    Instant::now().duration_since(start).as_nanos() as u64
}

/// Returns the time in nanoseconds of a clock that all processes of this machine share.
#[allow(clippy::disallowed_methods)] // as above; system time is for systems without such a clock
pub fn machine_clock_nanos() -> u64 {
    #[cfg(unix)]
    {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
    }
    #[cfg(not(unix))]
    {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        since.map_or(0, |since| since.as_nanos() as u64)
    }
}

/// Returns the time of the clock that dates files.
#[allow(clippy::disallowed_methods)] // only compared with the dates of files
pub fn system_time() -> std::time::SystemTime {
    std::time::SystemTime::now()
}

/// Returns the beginning of this day in the time zone of the user.
pub(crate) fn today() -> jiff::civil::DateTime {
    jiff::Zoned::now().date().at(0, 0, 0, 0)
}

pub fn thread_cpu_nanos() -> u64 {
    #[cfg(unix)]
    {
        thread_cpu_time().map_or(0, |time| time.as_nanos() as u64)
    }
    #[cfg(not(unix))]
    {
        monotonic_nanos()
    }
}

thread_local! {
    static SCHEDSTAT: ProcFile = ProcFile::open("/proc/thread-self/schedstat");
}

/// Returns the total run-queue delay of the calling thread since its start, in nanoseconds.
fn run_queue_nanos() -> u64 {
    SCHEDSTAT.with(|file| file.read_number(|text| text.split_ascii_whitespace().nth(1)?.parse().ok()))
}

/// How one thread spent an interval of wall time, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
pub struct ThreadTimes {
    pub wall_ns: u64,
    pub cpu_ns: u64,
    /// Run-queue delay: the time for which the thread was ready but not running.
    pub queue_ns: u64,
}

/// The minimum time between two readings of the CPU time, and the minimum idle time for which the run-queue delay is
/// read, in nanoseconds: both cost system calls. A thread that is idle for less counts as computing; few pages arrive
/// from disk so quickly.
const MIN_IDLE_NS: u64 = 20_000;

/// A stopwatch that measures how one thread spends its time.
#[derive(Debug)]
pub struct Stopwatch {
    /// When the last lap ended.
    wall: u64,
    /// When the CPU time was read.
    read: u64,
    cpu: u64,
    queue: u64,
}

impl Stopwatch {
    pub fn start() -> Stopwatch {
        let (queue, wall) = (run_queue_nanos(), monotonic_nanos());
        Stopwatch { wall, read: wall, cpu: thread_cpu_nanos(), queue }
    }

    /// Ends a lap and returns how the thread spent the time since the previous lap, or since the start. A lap that ends
    /// less than 20 us after a reading counts as computing, and what it was idle counts for the next lap with a
    /// reading. Must be called by the thread that started the stopwatch.
    pub fn lap(&mut self) -> ThreadTimes {
        let wall = monotonic_nanos();
        let wall_ns = wall - self.wall;
        let mut times = ThreadTimes { wall_ns, cpu_ns: wall_ns, queue_ns: 0 };
        self.wall = wall;
        let since_read = wall - self.read;
        if since_read > MIN_IDLE_NS {
            let cpu = thread_cpu_nanos();
            let idle = since_read.saturating_sub(cpu.saturating_sub(self.cpu)).min(wall_ns);
            (self.read, self.cpu) = (wall, cpu);
            if idle > MIN_IDLE_NS {
                let queue = run_queue_nanos();
                times.queue_ns = queue.saturating_sub(self.queue).min(idle);
                times.cpu_ns -= idle;
                self.queue = queue;
            }
        }
        times
    }

    /// Returns the time at which the last lap ended, in nanoseconds of [`monotonic_nanos`].
    pub fn last_lap_end_ns(&self) -> u64 {
        self.wall
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_laps_count_as_computing() {
        let mut watch = Stopwatch::start();
        let busy = |nanos: u64| {
            let start = monotonic_nanos();
            while monotonic_nanos() - start < nanos {
                std::hint::spin_loop();
            }
        };
        let mut total = ThreadTimes::default();
        for _ in 0..2000 {
            busy(MIN_IDLE_NS / 4);
            let lap = watch.lap();
            assert!(lap.cpu_ns + lap.queue_ns <= lap.wall_ns, "{lap:?}");
            total.wall_ns += lap.wall_ns;
            total.cpu_ns += lap.cpu_ns;
            total.queue_ns += lap.queue_ns;
        }
        // Other programs may interrupt the thread, which then has a run-queue delay.
        assert!(total.wall_ns - total.cpu_ns - total.queue_ns < total.wall_ns / 5, "{total:?}");
    }

    #[test]
    fn sleep_is_neither_cpu_nor_queue() {
        let mut watch = Stopwatch::start();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let slept = watch.lap();
        assert!(slept.wall_ns >= 20_000_000);
        assert!(slept.wall_ns - slept.cpu_ns - slept.queue_ns >= 10_000_000, "{slept:?}");
        let mut sum = 0u64;
        while monotonic_nanos() - watch.last_lap_end_ns() < 20_000_000 {
            sum = std::hint::black_box(sum + 1);
        }
        let span = watch.lap();
        assert!(span.wall_ns - span.cpu_ns - span.queue_ns < 5_000_000, "{span:?}");
    }
}
