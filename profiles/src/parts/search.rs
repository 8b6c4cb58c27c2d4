//! Search in the catalogue: by words, and by what a mistyped name probably means.

use std::fmt;

use serde::Serialize;

use super::Catalogue;

/// Number of parts that an error suggests. source: assumed, fits on a line
const MAX_SUGGESTIONS: usize = 3;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PartKind {
    Gpu,
    Cpu,
    Disk,
    #[serde(rename = "os")]
    System,
}

/// A part in a list.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PartSummary {
    pub kind: PartKind,
    pub id: String,
    pub name: String,
    /// The numbers of the data sheet, as text.
    pub numbers: String,
    /// The source of the numbers.
    pub source: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no {kind} `{id}` in the catalogue")]
pub struct UnknownPart {
    pub kind: PartKind,
    pub id: String,
    /// The names of similar parts, the most similar first.
    pub suggestions: Vec<String>,
}

impl UnknownPart {
    /// Returns what was probably meant, and how to find parts.
    pub fn hint(&self) -> String {
        let names: Vec<String> = self.suggestions.iter().map(|id| format!("`{id}`")).collect();
        format!(
            "did you mean {}? `hearth device search {}` lists all of this kind",
            names.join(" or "),
            self.kind
        )
    }
}

impl fmt::Display for PartKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Gpu => "gpu",
            Self::Cpu => "cpu",
            Self::Disk => "disk",
            Self::System => "os",
        })
    }
}

impl Catalogue {
    /// Returns all parts in the order of the catalogue.
    pub fn summaries(&self) -> Vec<PartSummary> {
        let mut all = Vec::new();
        let mut push = |kind, id: &str, name: &str, numbers: String, source: &str| {
            let [id, name, source] = [id, name, source].map(str::to_owned);
            all.push(PartSummary { kind, id, name, numbers, source });
        };
        for family in &self.gpus {
            for part in &family.gpus {
                let numbers = format!("{} at {}, {}", part.memory, part.bandwidth, part.fp32);
                push(PartKind::Gpu, &part.id, &part.name, numbers, &family.source);
            }
        }
        for family in &self.cpus {
            for part in &family.cpus {
                let numbers = format!("{} cores, {}", part.cores, part.bandwidth);
                push(PartKind::Cpu, &part.id, &part.name, numbers, &family.source);
            }
        }
        for family in &self.disks {
            for part in &family.disks {
                push(PartKind::Disk, &part.id, &part.name, part.sequential.to_string(), &family.source);
            }
        }
        for part in &self.systems {
            let numbers = format!("other programs hold {}", part.used_memory.value);
            push(PartKind::System, &part.id, &part.name, numbers, &part.used_memory.source);
        }
        all
    }

    /// Returns the parts whose kind, id and name together contain all words; spaces, dashes and case do not count.
    pub fn search(&self, words: &[String]) -> Vec<PartSummary> {
        let words: Vec<String> = words.iter().map(|word| squeezed(word)).collect();
        let mut found = self.summaries();
        found.retain(|part| {
            let text = squeezed(&format!("{} {} {}", part.kind, part.id, part.name));
            words.iter().all(|word| text.contains(word.as_str()))
        });
        found
    }

    /// Returns the part with this id, of any kind.
    pub fn part(&self, id: &str) -> Result<PartSummary, UnknownPart> {
        let all = self.summaries();
        match all.iter().find(|part| part.id == id) {
            Some(part) => Ok(part.clone()),
            // The kind of the most similar part is the one that was probably meant.
            None => Err(self.unknown(Self::nearest(&all, id).map_or(PartKind::Gpu, |part| part.kind), id)),
        }
    }

    fn nearest<'p>(all: &'p [PartSummary], id: &str) -> Option<&'p PartSummary> {
        all.iter().min_by_key(|part| distance(part, &squeezed(id)))
    }

    pub(super) fn unknown(&self, kind: PartKind, id: &str) -> UnknownPart {
        let wanted = squeezed(id);
        let mut all = self.summaries();
        all.retain(|part| part.kind == kind);
        all.sort_by_key(|part| distance(part, &wanted));
        let suggestions = all.into_iter().take(MAX_SUGGESTIONS).map(|part| part.id).collect();
        UnknownPart { kind, id: id.to_owned(), suggestions }
    }
}

/// Returns how far a part is from what was wanted: parts that contain it come first.
fn distance(part: &PartSummary, wanted: &str) -> (bool, usize) {
    let (id, name) = (squeezed(&part.id), squeezed(&part.name));
    let contains = !wanted.is_empty() && (id.contains(wanted) || name.contains(wanted));
    (!contains, strsim::damerau_levenshtein(&id, wanted))
}

/// Returns a text in lower case, with its letters and digits only.
fn squeezed(text: &str) -> String {
    text.chars().filter(|letter| letter.is_alphanumeric()).flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mistyped_names_find_the_part() {
        let catalogue = Catalogue::shipped();
        let meant = |kind, id: &str| catalogue.unknown(kind, id).suggestions[0].clone();
        assert!(catalogue.gpu_in_family("rtx3060").unwrap_err().hint().contains("`rtx-3060-12gb`"));
        assert_eq!(catalogue.part("nvme gen 3").unwrap_err().kind, PartKind::Disk);
        assert_eq!(meant(PartKind::Gpu, "rtx3080ti"), "rtx-3080-ti");
        assert_eq!(meant(PartKind::Gpu, "rx7900"), "rx-7900-xt");
        assert_eq!(meant(PartKind::Cpu, "m2"), "apple-m2");
        assert_eq!(meant(PartKind::Disk, "nvme4"), "nvme-gen4");
        assert_eq!(meant(PartKind::System, "win"), "windows");
    }

    #[test]
    fn words_find_parts_in_any_spelling() {
        let ids = |words: &[&str]| -> Vec<String> {
            let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
            Catalogue::shipped().search(&words).into_iter().map(|part| part.id).collect()
        };
        assert_eq!(ids(&["RTX 4090"]), ["rtx-4090", "rtx-4090-laptop"]);
        assert_eq!(ids(&["m4", "max"]), ["apple-m4-max-32", "apple-m4-max-40"]);
        assert!(ids(&["gpu"]).len() > 90);
        assert!(ids(&["floppy"]).is_empty());
    }
}
