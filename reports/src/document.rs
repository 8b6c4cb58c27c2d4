//! What does a report say, before it is HTML or Markdown?
//!
//! A report is written once, as sections of blocks; [`crate::page`] and [`crate::markdown`] print the
//! same blocks. Text keeps words of this program apart from names that came with a trace, so that each
//! format can escape and set them in its own way.
//!
//! Not here: what the sections hold ([`crate::contents`]).

use crate::svg::Drawing;

/// A piece of a sentence.
#[derive(Debug, Clone, PartialEq)]
pub enum Span {
    /// This program's words.
    Words(String),
    /// A name from a trace.
    Name(String),
    /// A digest or a command line, to be copied.
    Code(String),
}

/// A sentence or paragraph.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Text(pub Vec<Span>);

impl Text {
    /// Appends words.
    pub fn words(mut self, words: impl Into<String>) -> Self {
        self.0.push(Span::Words(words.into()));
        self
    }

    /// Appends a name.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.0.push(Span::Name(name.into()));
        self
    }

    /// Appends a digest or a command line.
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.0.push(Span::Code(code.into()));
        self
    }

    /// Appends another text.
    pub fn then(mut self, mut other: Text) -> Self {
        self.0.append(&mut other.0);
        self
    }

    /// As plain characters.
    pub fn plain(&self) -> String {
        self.0
            .iter()
            .map(|span| match span {
                Span::Words(text) | Span::Name(text) | Span::Code(text) => text.as_str(),
            })
            .collect()
    }
}

impl From<&str> for Text {
    fn from(words: &str) -> Self {
        Self::default().words(words)
    }
}

impl From<String> for Text {
    fn from(words: String) -> Self {
        Self::default().words(words)
    }
}

/// How a table's row is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weight {
    /// As all others.
    Plain,
    /// A sum.
    Total,
    /// The first row of a new group.
    Group,
}

/// A table; its first column is text, the others are numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    /// What it shows.
    pub caption: Text,
    /// A heading for each column.
    pub head: Vec<String>,
    /// Rows with a cell for each column.
    pub rows: Vec<(Weight, Vec<Text>)>,
    /// Whether the other columns are text too.
    pub wordy: bool,
}

/// A drawing with its explanation.
#[derive(Debug, Clone)]
pub struct Figure {
    /// File name without the ending.
    pub name: String,
    /// Its picture.
    pub drawing: Drawing,
    /// What it shows, and how to read it.
    pub caption: Text,
}

/// A part of a section.
#[derive(Debug, Clone)]
pub enum Block {
    /// A paragraph.
    Paragraph(Text),
    /// Something to know before reading on.
    Note(Text),
    /// A table.
    Table(Table),
    /// A figure.
    Figure(Figure),
    /// Words and what they mean, under a heading, folded away where possible.
    Meanings(&'static str, Vec<(&'static str, &'static str)>),
    /// Sentences under a heading, folded away where possible.
    Folded(&'static str, Vec<String>),
}

/// A part of a report under a heading.
#[derive(Debug, Clone)]
pub struct Section {
    /// Its heading.
    pub title: String,
    /// An identifier for links.
    pub anchor: &'static str,
    /// What it holds.
    pub blocks: Vec<Block>,
}

/// A whole report.
#[derive(Debug, Clone)]
pub struct Document {
    /// Its heading.
    pub title: Text,
    /// The summary and the notes, before the first section.
    pub opening: Vec<Block>,
    /// The sections.
    pub sections: Vec<Section>,
}

impl Document {
    /// All figures in order.
    pub fn figures(&self) -> impl Iterator<Item = &Figure> {
        let blocks = self.opening.iter().chain(self.sections.iter().flat_map(|section| &section.blocks));
        blocks.filter_map(|block| match block {
            Block::Figure(figure) => Some(figure),
            _ => None,
        })
    }
}
