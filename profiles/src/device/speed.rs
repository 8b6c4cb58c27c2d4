//! Devices at another speed: the rates and fixed times of a processor that other programs or heat slow down.

use super::{Cpu, DeviceProfile, Gpu};
use crate::document_values::FormatMap;
use crate::document_values::Sourced;
use crate::units::{FlopsPerSecond, Seconds};

type Rates = FormatMap<Sourced<FlopsPerSecond>>;

impl DeviceProfile {
    /// Returns the device with the processors at a fraction of their speed. The CPU has no quota: the fraction is that
    /// of the rates that a quota sustains.
    #[must_use]
    pub fn at_speed(&self, fraction: f64) -> DeviceProfile {
        let mut cpu = self.cpu.with_sustained_rates().at_speed(fraction);
        lengthen(&mut cpu.window_overhead, fraction);
        DeviceProfile { cpu, gpu: self.gpu.as_ref().map(|gpu| gpu.at_speed(fraction)), ..self.clone() }
    }
}

impl Cpu {
    /// Returns the CPU with all rates at a fraction of their values, and its fixed times longer in proportion.
    #[must_use]
    pub fn at_speed(&self, fraction: f64) -> Cpu {
        let mut cpu = self.clone();
        let streamed = [&mut cpu.matvec_streamed, &mut cpu.matmul_streamed, &mut cpu.matmul_medium];
        let rates = [&mut cpu.matvec, &mut cpu.matmul].into_iter().chain(streamed);
        for rates in rates {
            multiply(rates, fraction);
        }
        cpu.read_bandwidth = self.read_bandwidth.map(|rate| *rate * fraction);
        cpu.attention_rate = self.attention_rate.as_ref().map(|rate| rate.map(|rate| *rate * fraction));
        cpu.activation_bandwidth =
            self.activation_bandwidth.as_ref().map(|rate| rate.map(|rate| *rate * fraction));
        for cost in [&mut cpu.layer_overhead, &mut cpu.token_overhead] {
            lengthen(cost, fraction);
        }
        cpu
    }
}

impl Gpu {
    /// Returns the GPU with all rates at a fraction of their values, and its fixed times longer in proportion.
    #[must_use]
    pub fn at_speed(&self, fraction: f64) -> Gpu {
        let mut gpu = self.clone();
        for rates in [&mut gpu.matvec, &mut gpu.matmul] {
            multiply(rates, fraction);
        }
        gpu.read_bandwidth = self.read_bandwidth.map(|rate| *rate * fraction);
        for cost in [&mut gpu.window_overhead, &mut gpu.layer_overhead] {
            lengthen(cost, fraction);
        }
        gpu
    }
}

fn multiply(rates: &mut Rates, fraction: f64) {
    rates.0.values_mut().for_each(|rate| rate.value = rate.value * fraction);
}

/// Divides a fixed time by a fraction of the full speed.
fn lengthen(cost: &mut Option<Sourced<Seconds>>, fraction: f64) {
    *cost = cost.as_ref().map(|cost| cost.map(|time| *time * (1.0 / fraction)));
}

#[cfg(test)]
mod tests {
    use crate::device::shipped_profile;

    #[test]
    fn half_the_speed_doubles_times() {
        let device = shipped_profile("d3").expect("shipped");
        let slow = device.at_speed(0.5);
        let (gpu, slow_gpu) = (device.gpu.as_ref().expect("a GPU"), slow.gpu.as_ref().expect("a GPU"));
        assert_eq!(slow_gpu.read_bandwidth.value.0, gpu.read_bandwidth.value.0 / 2.0);
        for ((_, slow), (_, fast)) in slow_gpu.matmul.iter().zip(gpu.matmul.iter()) {
            assert_eq!(slow.value.0, fast.value.0 / 2.0);
        }
        assert_eq!(slow.cpu.read_bandwidth.value.0, device.cpu.read_bandwidth.value.0 / 2.0);
        let overhead = |cost: &crate::Sourced<crate::Seconds>| cost.value.0;
        let both = [&slow, &device].map(|device| device.cpu.token_overhead.as_ref().map(overhead));
        assert_eq!(both[0], both[1].map(|time| time * 2.0));
        assert_eq!((&slow.memory, &slow.disk), (&device.memory, &device.disk));
    }
}
