//! Prints a report as Markdown with pipe tables; figures are links to SVG files in the same folder.

use std::fmt::{self, Write};

use super::{Block, Document, RowStyle, Span, Table, Text};
use crate::text::escape;

pub fn render(document: &Document) -> String {
    let mut out = format!("# {}\n", text(&document.title));
    let _ = blocks(&mut out, &document.opening_blocks);
    for section in &document.sections {
        let _ = write!(out, "\n## {}\n", escape::markdown(&section.title));
        let _ = blocks(&mut out, &section.blocks);
    }
    out
}

fn blocks(out: &mut String, blocks: &[Block]) -> fmt::Result {
    for block in blocks {
        out.push('\n');
        match block {
            Block::Paragraph(paragraph) => writeln!(out, "{}", text(paragraph).trim_end())?,
            Block::Note(note) => writeln!(out, "> **Note.** {}", text(note).trim_end())?,
            Block::Table(table) => out.push_str(&markdown_table(table)),
            Block::Figure(drawing, caption) => {
                let title = escape::markdown(&drawing.title);
                writeln!(out, "![{title}]({}.svg)\n\n{}", drawing.id, text(caption).trim_end())?;
            }
            Block::Definitions(title, meanings) => {
                writeln!(out, "{title}:\n")?;
                for (word, meaning) in meanings {
                    writeln!(out, "- **{word}**: {meaning}")?;
                }
            }
            Block::Details(title, sentences) => {
                writeln!(out, "{title}:\n")?;
                for sentence in sentences {
                    writeln!(out, "- {}", escape::markdown(sentence))?;
                }
            }
        }
    }
    Ok(())
}

fn markdown_table(table: &Table) -> String {
    let mut out = format!("{}\n\n", text(&table.caption).trim_end());
    let cells = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    out.push_str(&cells(table.headings.iter().map(|heading| escape::markdown(heading)).collect()));
    let rule = |column: usize| if column == 0 || table.has_only_text_columns { "---" } else { "---:" };
    out.push_str(&cells((0..table.headings.len()).map(|column| rule(column).to_owned()).collect()));
    for (style, row) in &table.rows {
        let bold = |cell: &Text| match style {
            RowStyle::Total => format!("**{}**", text(cell)),
            RowStyle::Plain | RowStyle::Group => text(cell),
        };
        out.push_str(&cells(row.iter().map(bold).collect()));
    }
    out
}

fn text(text: &Text) -> String {
    text.0
        .iter()
        .map(|span| match span {
            Span::Words(words) => escape::markdown(words),
            Span::Name(name) => escape::markdown(name),
            Span::Code(code) => escape::markdown_code(code),
        })
        .collect()
}
