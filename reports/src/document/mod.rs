//! The document model of a report, printed as HTML and as Markdown.
//!
//! A report consists of sections, and a section of blocks. [`html`] and [`markdown`] print the same blocks. [`Text`]
//! distinguishes the words of this program from names of a trace, so that each format can escape and format them.

mod html;
mod markdown;

use crate::charts::drawing::Drawing;

/// The text of a table cell without a value: an en dash.
pub const NO_VALUE: &str = "\u{2013}";

/// A part of a [`Text`]. Its kind determines how HTML and Markdown escape and format the part.
#[derive(Debug, Clone)]
pub enum Span {
    /// Text that this program writes.
    Words(String),
    /// A name from a trace or a document.
    Name(String),
    /// A digest or a command line.
    Code(String),
}

#[derive(Debug, Clone, Default)]
pub struct Text(pub Vec<Span>);

impl Text {
    pub fn append_words(mut self, words: impl Into<String>) -> Self {
        self.0.push(Span::Words(words.into()));
        self
    }

    pub fn append_name(mut self, name: impl Into<String>) -> Self {
        self.0.push(Span::Name(name.into()));
        self
    }

    pub fn append_code(mut self, code: impl Into<String>) -> Self {
        self.0.push(Span::Code(code.into()));
        self
    }

    pub fn append(mut self, mut other: Text) -> Self {
        self.0.append(&mut other.0);
        self
    }

    /// Returns the text without markup.
    pub fn to_plain_text(&self) -> String {
        self.0
            .iter()
            .map(|span| match span {
                Span::Words(text) | Span::Name(text) | Span::Code(text) => text.as_str(),
            })
            .collect()
    }

    /// Returns a value as the text of a table cell; a missing value becomes [`NO_VALUE`].
    pub fn from_option(value: Option<impl Into<String>>) -> Self {
        value.map_or_else(|| NO_VALUE.into(), |value| value.into().into())
    }
}

impl From<&str> for Text {
    fn from(words: &str) -> Self {
        Self::default().append_words(words)
    }
}

impl From<String> for Text {
    fn from(words: String) -> Self {
        Self::default().append_words(words)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RowStyle {
    Plain,
    Total,
    /// The first row of a new group of rows.
    Group,
}

/// A table whose first column is text.
#[derive(Debug, Clone)]
pub struct Table {
    pub caption: Text,
    pub headings: Vec<String>,
    /// The rows, with a cell for each column.
    pub rows: Vec<(RowStyle, Vec<Text>)>,
    /// Whether all columns are text. Otherwise the columns after the first column are numbers.
    pub has_only_text_columns: bool,
}

impl Table {
    /// Creates a table of numbers in plain rows.
    pub fn new(
        caption: impl Into<Text>,
        headings: impl IntoIterator<Item = impl Into<String>>,
        rows: impl IntoIterator<Item = Vec<Text>>,
    ) -> Self {
        Self::with_row_styles(caption, headings, rows.into_iter().map(|row| (RowStyle::Plain, row)))
    }

    /// Creates a table of numbers, with a style for each row.
    pub fn with_row_styles(
        caption: impl Into<Text>,
        headings: impl IntoIterator<Item = impl Into<String>>,
        rows: impl IntoIterator<Item = (RowStyle, Vec<Text>)>,
    ) -> Self {
        let headings = headings.into_iter().map(Into::into).collect();
        let (caption, rows) = (caption.into(), rows.into_iter().collect());
        Self { caption, headings, rows, has_only_text_columns: false }
    }

    pub fn with_only_text_columns(self) -> Self {
        Self { has_only_text_columns: true, ..self }
    }

    /// Returns a block with the table, in which all columns are text; `None` if the table has no rows.
    pub fn into_text_block(self) -> Option<Block> {
        self.with_only_text_columns().into_block()
    }

    /// Returns a block with the table; `None` if the table has no rows.
    pub fn into_block(self) -> Option<Block> {
        (!self.rows.is_empty()).then_some(Block::Table(self))
    }
}

#[derive(Debug, Clone)]
pub enum Block {
    Paragraph(Text),
    /// A warning or a caveat.
    Note(Text),
    Table(Table),
    Figure(Drawing, Text),
    /// A title, and terms with their definitions; collapsible in HTML.
    Definitions(&'static str, Vec<(&'static str, &'static str)>),
    /// A title and a list of sentences; collapsible in HTML.
    Details(&'static str, Vec<String>),
}

#[derive(Debug, Clone)]
pub struct Section {
    pub title: String,
    /// The HTML `id` of the section, to which links refer.
    pub anchor: &'static str,
    pub blocks: Vec<Block>,
}

#[derive(Debug, Clone)]
pub struct Document {
    pub title: Text,
    /// The blocks before the first section: the summary and the notes.
    pub opening_blocks: Vec<Block>,
    pub sections: Vec<Section>,
}

impl Document {
    /// Adds a section, unless it has no blocks.
    pub fn push_section(
        &mut self,
        title: &str,
        anchor: &'static str,
        blocks: impl IntoIterator<Item = Block>,
    ) {
        let blocks: Vec<Block> = blocks.into_iter().collect();
        if !blocks.is_empty() {
            self.sections.push(Section { title: title.to_owned(), anchor, blocks });
        }
    }

    /// Returns the name and the contents of each file: the HTML page, the Markdown file and the figures.
    pub fn render_files(&self) -> Vec<(String, Vec<u8>)> {
        let blocks = self.sections.iter().flat_map(|section| &section.blocks);
        let figures = blocks.filter_map(|block| {
            let Block::Figure(drawing, _) = block else { return None };
            Some((format!("{}.svg", drawing.id), drawing.to_standalone_svg()))
        });
        let pages =
            [("index.html".to_owned(), html::render(self)), ("report.md".to_owned(), markdown::render(self))];
        pages.into_iter().chain(figures).map(|(name, text)| (name, text.into_bytes())).collect()
    }
}

/// Serializes a value as indented JSON with a newline at the end.
pub fn to_json(value: &impl serde::Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(value).expect("reports are serializable");
    json.push(b'\n');
    json
}
