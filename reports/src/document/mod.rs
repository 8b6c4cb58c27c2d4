//! The document model of a report, printed as HTML and as Markdown.
//!
//! A report consists of sections, and a section of blocks. [`html`] and [`markdown`] print the same blocks. [`Text`]
//! distinguishes the words of this program from names of a trace, so that each format can escape and format them.
//!
//! Not here: the contents of the sections ([`crate::sections`], [`crate::published`], [`crate::validation`]).

mod html;
mod markdown;

use crate::charts::drawing::Drawing;

/// The text of a cell without a value: an en dash.
pub const NO_VALUE: &str = "\u{2013}";

/// A part of a sentence.
#[derive(Debug, Clone, PartialEq)]
pub enum Span {
    /// Words of this program.
    Words(String),
    /// A name from a trace or a document.
    Name(String),
    /// A digest or a command line.
    Code(String),
}

/// The text of a paragraph, a caption or a table cell.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Text(pub Vec<Span>);

impl Text {
    pub fn words(mut self, words: impl Into<String>) -> Self {
        self.0.push(Span::Words(words.into()));
        self
    }

    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.0.push(Span::Name(name.into()));
        self
    }

    /// Appends a digest or a command line.
    pub fn code(mut self, code: impl Into<String>) -> Self {
        self.0.push(Span::Code(code.into()));
        self
    }

    pub fn append(mut self, mut other: Text) -> Self {
        self.0.append(&mut other.0);
        self
    }

    /// Returns the text without markup.
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

/// The style of a table row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowStyle {
    Plain,
    Total,
    /// The first row of a new group.
    Group,
}

/// A table whose first column is text.
#[derive(Debug, Clone, PartialEq)]
pub struct Table {
    pub caption: Text,
    /// The headings of the columns.
    pub headings: Vec<String>,
    /// The rows, with a cell for each column.
    pub rows: Vec<(RowStyle, Vec<Text>)>,
    /// Whether all columns are text; otherwise those after the first are numbers.
    pub all_text: bool,
}

impl Table {
    /// Creates a table of numbers in plain rows.
    pub fn new(
        caption: impl Into<Text>,
        headings: impl IntoIterator<Item = impl Into<String>>,
        rows: impl IntoIterator<Item = Vec<Text>>,
    ) -> Self {
        Self {
            caption: caption.into(),
            headings: headings.into_iter().map(Into::into).collect(),
            rows: rows.into_iter().map(|row| (RowStyle::Plain, row)).collect(),
            all_text: false,
        }
    }

    pub fn all_text(self) -> Self {
        Self { all_text: true, ..self }
    }

    /// Returns a block with the table; `None` if it has no rows.
    pub fn block(self) -> Option<Block> {
        (!self.rows.is_empty()).then_some(Block::Table(self))
    }
}

/// A drawing with a caption.
#[derive(Debug, Clone)]
pub struct Figure {
    /// The file name without the extension.
    pub name: String,
    pub drawing: Drawing,
    pub caption: Text,
}

/// A part of a section.
#[derive(Debug, Clone)]
pub enum Block {
    Paragraph(Text),
    /// A warning or a caveat.
    Note(Text),
    Table(Table),
    Figure(Figure),
    /// A title, and terms with their definitions; collapsible in HTML.
    Definitions(&'static str, Vec<(&'static str, &'static str)>),
    /// A title and a list of sentences; collapsible in HTML.
    Details(&'static str, Vec<String>),
}

/// A section of a report.
#[derive(Debug, Clone)]
pub struct Section {
    pub title: String,
    /// The `id` attribute for links.
    pub anchor: &'static str,
    pub blocks: Vec<Block>,
}

/// A complete report.
#[derive(Debug, Clone)]
pub struct Document {
    pub title: Text,
    /// The blocks before the first section: the summary and the notes.
    pub opening_blocks: Vec<Block>,
    pub sections: Vec<Section>,
}

impl Document {
    /// Adds a section, unless it has no blocks.
    pub fn push(&mut self, title: &str, anchor: &'static str, blocks: impl IntoIterator<Item = Block>) {
        let blocks: Vec<Block> = blocks.into_iter().collect();
        if !blocks.is_empty() {
            self.sections.push(Section { title: title.to_owned(), anchor, blocks });
        }
    }

    /// Returns the names and contents of the HTML page, the Markdown file and each figure.
    pub fn files(&self) -> Vec<(String, Vec<u8>)> {
        let figures =
            self.figures().map(|figure| (format!("{}.svg", figure.name), figure.drawing.standalone_svg()));
        let pages =
            [("index.html".to_owned(), html::render(self)), ("report.md".to_owned(), markdown::render(self))];
        pages.into_iter().chain(figures).map(|(name, text)| (name, text.into_bytes())).collect()
    }

    /// Returns all figures in order.
    fn figures(&self) -> impl Iterator<Item = &Figure> {
        let blocks =
            self.opening_blocks.iter().chain(self.sections.iter().flat_map(|section| &section.blocks));
        blocks.filter_map(|block| match block {
            Block::Figure(figure) => Some(figure),
            _ => None,
        })
    }
}

/// Serializes a value as indented JSON with a newline at the end.
pub fn json(value: &impl serde::Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(value).expect("reports are serializable");
    json.push(b'\n');
    json
}
