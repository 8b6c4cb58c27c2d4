"use strict";
// Shows Markdown as elements of the page. Text of a model becomes text nodes only, so it cannot add elements or scripts.

const INLINE = /`([^`]+)`|\*\*(.+?)\*\*|__(.+?)__|\*([^\s*](?:.*?[^\s*])?)\*|~~(.+?)~~|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)|(https?:\/\/[^\s<>()]+[^\s<>().,;:!?'"])/;

function element(name, ...children) {
  const made = document.createElement(name);
  made.append(...children);
  return made;
}

function link(address, ...children) {
  const made = element("a", ...children);
  made.href = address;
  made.rel = "noreferrer noopener";
  made.target = "_blank";
  return made;
}

// Returns the nodes of a text with emphasis, code and links.
function inline(text) {
  const nodes = [];
  for (let found; (found = INLINE.exec(text)); text = text.slice(found.index + found[0].length)) {
    if (found.index > 0) nodes.push(text.slice(0, found.index));
    const [, code, strong, strong2, emphasis, deleted, name, address, bare] = found;
    if (code !== undefined) nodes.push(element("code", code));
    else if (strong ?? strong2) nodes.push(element("strong", ...inline(strong ?? strong2)));
    else if (emphasis !== undefined) nodes.push(element("em", ...inline(emphasis)));
    else if (deleted !== undefined) nodes.push(element("del", ...inline(deleted)));
    else if (address !== undefined) nodes.push(link(address, ...inline(name)));
    else nodes.push(link(bare, bare));
  }
  if (text) nodes.push(text);
  return nodes;
}

function codeBlock(lines) {
  const code = element("code", lines.join("\n"));
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.addEventListener("click", () => navigator.clipboard?.writeText(code.textContent));
  const block = element("div", copy, element("pre", code));
  block.className = "code";
  return block;
}

const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());

function table(lines) {
  const row = (name, line) => element("tr", ...cells(line).map(cell => element(name, ...inline(cell))));
  const body = element("tbody", ...lines.slice(2).map(line => row("td", line)));
  const wide = element("div", element("table", element("thead", row("th", lines[0])), body));
  wide.className = "wide";
  return wide;
}

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;

// Returns the list that begins with the first line, and removes its lines.
function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark)) made.start = parseInt(mark, 10);
  while (lines.length) {
    const found = ITEM.exec(lines[0]);
    if (found && found[1].length > indent.length && made.lastChild) made.lastChild.append(list(lines));
    else if (found && found[1].length === indent.length && /\d/.test(found[2]) === /\d/.test(mark)) {
      made.append(element("li", ...inline(found[3])));
      lines.shift();
    } else if (!found && /^\s+\S/.test(lines[0]) && made.lastChild) made.lastChild.append("\n", ...inline(lines.shift().trim()));
    else break;
  }
  return made;
}

// Returns the blocks of a text. A block of code that has no end yet is shown as far as it is.
function blocks(text) {
  const lines = text.split("\n"), made = [];
  const isBlock = line => /^\s*(```|#{1,6}\s|>|([-*_]\s*){3,}$)/.test(line) || ITEM.test(line);
  while (lines.length) {
    const line = lines[0];
    if (!line.trim()) lines.shift();
    else if (/^\s*```/.test(line)) {
      lines.shift();
      const end = lines.findIndex(other => /^\s*```\s*$/.test(other));
      made.push(codeBlock(lines.splice(0, end < 0 ? lines.length : end)));
      if (end >= 0) lines.shift();
    } else if (/^\s*#{1,6}\s/.test(line)) {
      const [, marks, title] = /^\s*(#+)\s+(.*?)\s*#*$/.exec(lines.shift());
      made.push(element("h" + Math.min(marks.length + 2, 6), ...inline(title)));
    } else if (/^\s*([-*_]\s*){3,}$/.test(line)) {
      lines.shift();
      made.push(element("hr"));
    } else if (/^\s*>/.test(line)) {
      const quoted = [];
      while (lines.length && /^\s*>/.test(lines[0])) quoted.push(lines.shift().replace(/^\s*> ?/, ""));
      made.push(element("blockquote", ...blocks(quoted.join("\n"))));
    } else if (ITEM.test(line)) made.push(list(lines));
    else if (lines.length > 1 && line.includes("|") && /^\s*\|?(\s*:?-{2,}:?\s*\|?)+$/.test(lines[1])) {
      const end = lines.findIndex(other => !other.includes("|"));
      made.push(table(lines.splice(0, end < 0 ? lines.length : end)));
    } else {
      const paragraph = [lines.shift()];
      while (lines.length && lines[0].trim() && !isBlock(lines[0])) paragraph.push(lines.shift());
      made.push(element("p", ...inline(paragraph.join("\n"))));
    }
  }
  return made;
}
