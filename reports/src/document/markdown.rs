//! Prints a report as Markdown with pipe tables; figures are links to SVG files in the same folder.

use std::fmt::Write;

use super::{Block, Document, RowStyle, Span, Table, Text};
use crate::text::escape;

pub fn render(document: &Document) -> String {
    let mut out = format!("# {}\n", text(&document.title));
    blocks(&mut out, &document.opening_blocks);
    for section in &document.sections {
        let _ = write!(out, "\n## {}\n", escape::markdown(&section.title));
        blocks(&mut out, &section.blocks);
    }
    out
}

fn blocks(out: &mut String, blocks: &[Block]) {
    for block in blocks {
        out.push('\n');
        match block {
            Block::Paragraph(paragraph) => {
                let _ = writeln!(out, "{}", text(paragraph).trim_end());
            }
            Block::Note(note) => {
                let _ = writeln!(out, "> **Note.** {}", text(note).trim_end());
            }
            Block::Table(table) => print(out, table),
            Block::Figure(drawing, caption) => {
                let title = escape::markdown(&drawing.title);
                let _ = writeln!(out, "![{title}]({}.svg)\n\n{}", drawing.id, text(caption).trim_end());
            }
            Block::Definitions(title, meanings) => {
                let _ = writeln!(out, "{title}:\n");
                for (word, meaning) in meanings {
                    let _ = writeln!(out, "- **{word}**: {meaning}");
                }
            }
            Block::Details(title, sentences) => {
                let _ = writeln!(out, "{title}:\n");
                for sentence in sentences {
                    let _ = writeln!(out, "- {}", escape::markdown(sentence));
                }
            }
        }
    }
}

fn print(out: &mut String, table: &Table) {
    let _ = writeln!(out, "{}\n", text(&table.caption).trim_end());
    let cells = |cells: Vec<String>| format!("| {} |\n", cells.join(" | "));
    out.push_str(&cells(table.headings.iter().map(|heading| escape::markdown(heading)).collect()));
    let rule = |column: usize| if column == 0 || table.text_columns_only { "---" } else { "---:" };
    out.push_str(&cells((0..table.headings.len()).map(|column| rule(column).to_owned()).collect()));
    for (style, row) in &table.rows {
        let bold = |cell: &Text| match style {
            RowStyle::Total => format!("**{}**", text(cell)),
            RowStyle::Plain | RowStyle::Group => text(cell),
        };
        out.push_str(&cells(row.iter().map(bold).collect()));
    }
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
