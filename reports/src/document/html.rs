//! Prints a report as one self-contained HTML page.
//!
//! Styles and drawings are inline, so the page loads no other file and needs no script. A content security policy
//! forbids loading files and running scripts, as a second protection if a name is not escaped correctly.

use std::fmt::{self, Write};

use super::{Block, Document, RowStyle, Span, Table, Text};
use crate::charts::drawing;
use crate::text::escape::html;

const STYLE: &str = include_str!("page.css");

pub fn render(document: &Document) -> String {
    let mut out = String::new();
    let _ = write!(
        out,
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\"/>\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n\
         <meta name=\"color-scheme\" content=\"light dark\"/>\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\"/>\n\
         <title>{}</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{}</h1>\n",
        html(&document.title.to_plain_text()),
        drawing::STYLE_SHEET,
        text(&document.title)
    );
    let _ = blocks(&mut out, &document.opening_blocks);
    out.push_str("<nav>");
    for section in &document.sections {
        let _ = write!(out, "<a href=\"#{}\">{}</a>", section.anchor, html(&section.title));
    }
    out.push_str("</nav>\n");
    for section in &document.sections {
        let _ = writeln!(out, "<section id=\"{}\">\n<h2>{}</h2>", section.anchor, html(&section.title));
        let _ = blocks(&mut out, &section.blocks);
        out.push_str("</section>\n");
    }
    out.push_str("</main>\n</body>\n</html>\n");
    out
}

fn blocks(out: &mut String, blocks: &[Block]) -> fmt::Result {
    for (index, block) in blocks.iter().enumerate() {
        match block {
            Block::Paragraph(paragraph) => {
                let class = if index == 0 { " class=\"lead\"" } else { "" };
                writeln!(out, "<p{class}>{}</p>", text(paragraph))?;
            }
            Block::Note(note) => writeln!(out, "<p class=\"note\">{}</p>", text(note))?,
            Block::Table(table) => print(out, table)?,
            Block::Figure(drawing, caption) => writeln!(
                out,
                "<figure>\n<h3>{}</h3>\n{}\n<figcaption>{}</figcaption>\n</figure>",
                html(&drawing.title),
                drawing.to_inline_html(),
                text(caption)
            )?,
            Block::Definitions(title, meanings) => {
                write!(out, "<details>\n<summary>{}</summary>\n<dl>\n", html(title))?;
                for (word, meaning) in meanings {
                    writeln!(out, "<dt>{}</dt><dd>{}</dd>", html(word), html(meaning))?;
                }
                out.push_str("</dl>\n</details>\n");
            }
            Block::Details(title, sentences) => {
                write!(out, "<details>\n<summary>{}</summary>\n<ul>\n", html(title))?;
                for sentence in sentences {
                    writeln!(out, "<li>{}</li>", html(sentence))?;
                }
                out.push_str("</ul>\n</details>\n");
            }
        }
    }
    Ok(())
}

fn print(out: &mut String, table: &Table) -> fmt::Result {
    let class = if table.has_only_text_columns { "textual" } else { "numbers" };
    write!(
        out,
        "<p class=\"caption\">{}</p>\n<div class=\"scroll\"><table class=\"{class}\">\n<thead><tr>",
        text(&table.caption)
    )?;
    for heading in &table.headings {
        // The label of a run must not be broken at its hyphen.
        write!(out, "<th scope=\"col\">{}</th>", html(heading).replace('-', "&#8209;"))?;
    }
    out.push_str("</tr></thead>\n<tbody>\n");
    for (style, row) in &table.rows {
        out.push_str(match style {
            RowStyle::Plain => "<tr>",
            RowStyle::Total => "<tr class=\"total\">",
            RowStyle::Group => "<tr class=\"group\">",
        });
        for (index, cell) in row.iter().enumerate() {
            match index {
                0 => write!(out, "<th scope=\"row\">{}</th>", text(cell))?,
                _ => write!(out, "<td>{}</td>", text(cell))?,
            }
        }
        out.push_str("</tr>\n");
    }
    writeln!(out, "</tbody>\n</table></div>")
}

fn text(text: &Text) -> String {
    text.0
        .iter()
        .map(|span| match span {
            Span::Words(words) => keep_units(&html(words)),
            Span::Name(name) => format!("<b>{}</b>", html(name)),
            Span::Code(code) => format!("<code>{}</code>", html(code)),
        })
        .collect()
}

/// Replaces the space between a number and its unit with a non-breaking space.
fn keep_units(words: &str) -> String {
    const UNITS: [&str; 8] = ["ms", "s", "%", "B", "KiB", "MiB", "GiB", "TiB"];
    let mut out = String::with_capacity(words.len());
    for (index, word) in words.split(' ').enumerate() {
        if index > 0 {
            let unit = word.trim_end_matches([',', '.', ';', ')', ':']);
            let number = out.ends_with(|c: char| c.is_ascii_digit());
            out.push_str(if number && UNITS.contains(&unit) { "&#160;" } else { " " });
        }
        out.push_str(word);
    }
    out
}

#[cfg(test)]
mod tests {
    #[test]
    fn unit_stays_with_its_number() {
        assert_eq!(super::keep_units("takes 60.9 ms (9.1 %), or"), "takes 60.9&#160;ms (9.1&#160;%), or");
        assert_eq!(super::keep_units(" 2 devices a ms "), " 2 devices a ms ");
    }
}
