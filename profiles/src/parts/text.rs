//! Parts of a device as text: `rtx-3060-12gb, ddr4-3200-dual, 16 GiB, nvme-gen3, windows`, in any order.

use std::fmt;
use std::str::FromStr;

use super::{Catalogue, DeviceParts, PartKind, UnknownPart};
use crate::Bytes;

/// Why a text does not name the parts of a device.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PartsError {
    #[error(transparent)]
    Unknown(#[from] UnknownPart),
    #[error("two parts are of the same kind: `{first}` and `{second}`")]
    Twice { first: String, second: String },
    #[error("these parts are missing: {}", .kinds.join(", "))]
    Missing { kinds: Vec<&'static str> },
    #[error("these parts do not exist together: {reason}")]
    Incompatible { reason: &'static str },
    #[error("{reason}")]
    Invalid { reason: String },
}

impl PartsError {
    pub fn hint(&self) -> String {
        match self {
            Self::Unknown(unknown) => unknown.hint(),
            Self::Incompatible { .. } => "`hearth device list` has all parts".to_owned(),
            Self::Invalid { .. } => "check the size of the memory".to_owned(),
            Self::Twice { .. } | Self::Missing { .. } => {
                "write for example `ddr4-3200-dual, 16 GiB, nvme-gen3, linux`, and a graphics card if there is one, such as \
                 `rtx-3060-12gb`; `hearth device list` has all parts"
                    .to_owned()
            }
        }
    }
}

impl fmt::Display for DeviceParts {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(gpu) = &self.gpu {
            write!(formatter, "{gpu}, ")?;
        }
        write!(formatter, "{}, {}, {}, {}", self.cpu, self.memory, self.disk, self.os)
    }
}

impl FromStr for DeviceParts {
    type Err = PartsError;

    fn from_str(text: &str) -> Result<Self, PartsError> {
        let catalogue = Catalogue::shipped();
        let (mut found, mut memory): (Vec<(PartKind, String)>, Option<Bytes>) = (Vec::new(), None);
        let twice = |first: &str, second: &str| PartsError::Twice {
            first: first.to_owned(),
            second: second.to_owned(),
        };
        for word in text.split(',').map(str::trim).filter(|word| !word.is_empty()) {
            if let Ok(bytes) = word.parse::<Bytes>() {
                if let Some(first) = memory.replace(bytes) {
                    return Err(twice(&first.to_string(), word));
                }
                continue;
            }
            let kind = match catalogue.part(word) {
                Ok(part) => part.kind,
                // `16`, `-8 GiB` or `3 PiB`.
                Err(_) if is_number(word) => {
                    let reason = format!("`{word}` is not a size of memory; write for example `16 GiB`");
                    return Err(PartsError::Invalid { reason });
                }
                Err(unknown) => return Err(unknown.into()),
            };
            if let Some((_, other)) = found.iter().find(|(other, _)| *other == kind) {
                return Err(twice(other, word));
            }
            found.push((kind, word.to_owned()));
        }
        let mut take = |kind: PartKind| {
            let at = found.iter().position(|(other, _)| *other == kind)?;
            Some(found.swap_remove(at).1)
        };
        let (cpu, disk, os, gpu) =
            (take(PartKind::Cpu), take(PartKind::Disk), take(PartKind::System), take(PartKind::Gpu));
        match (cpu, memory, disk, os) {
            (Some(cpu), Some(memory), Some(disk), Some(os)) => Ok(Self { cpu, memory, disk, os, gpu }),
            (cpu, memory, disk, os) => {
                let all = [
                    (cpu.is_none(), "a CPU"),
                    (memory.is_none(), "the size of the memory"),
                    (disk.is_none(), "a disk"),
                    (os.is_none(), "an operating system"),
                ];
                let kinds =
                    all.into_iter().filter(|(is_missing, _)| *is_missing).map(|(_, what)| what).collect();
                Err(PartsError::Missing { kinds })
            }
        }
    }
}

/// Returns whether a text is a number, perhaps with a unit.
fn is_number(text: &str) -> bool {
    text.split_whitespace().next().is_some_and(|first| first.parse::<f64>().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_in_any_order_and_written_again() {
        let parts: DeviceParts = "windows, 16 GiB,rtx-3060-12gb, nvme-gen3, ddr4-3200-dual".parse().unwrap();
        assert_eq!(parts.gpu.as_deref(), Some("rtx-3060-12gb"));
        assert_eq!(parts.to_string().parse::<DeviceParts>().unwrap(), parts);
    }

    #[test]
    fn missing_and_wrong_parts_are_named() {
        let error = |text: &str| text.parse::<DeviceParts>().unwrap_err();
        let missing = error("rtx-3060-12gb, 16 GiB").to_string();
        assert_eq!(missing, "these parts are missing: a CPU, a disk, an operating system");
        for size in ["16", "-8 GiB", "3 PiB"] {
            let text = error(&format!("{size}, nvme-gen3")).to_string();
            assert_eq!(text, format!("`{size}` is not a size of memory; write for example `16 GiB`"));
        }
        assert!(error("rtx3060, 16 GiB").hint().contains("`rtx-3060-8gb`"));
        assert!(error("linux, windows").to_string().contains("same kind"));
        assert!(error("1 GiB, 2 GiB").to_string().contains("`1.00 GiB` and `2 GiB`"));
    }
}
