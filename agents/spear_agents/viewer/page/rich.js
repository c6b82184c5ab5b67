"use strict";
// Markdown and LaTeX in transcripts. Marked only splits a text into tokens, and the nodes are made here: of a fixed list
// of elements, with text in them. HTML stays text; a link is its text and address; nothing is loaded.

const LONGEST_RICH = 20000; // characters; a longer text is shown as it was written
const LONGEST_TEX = 2000;
const MARKS = /^ {0,3}(?:#{1,6} |[-*+] |\d{1,3}[.)] |```|~~~)|\*\*\S|`[^`\n]+`|^[ \t]*\|.*\|[ \t]*$/m;
const MATH = new RegExp(String.raw`^(?:\$\$((?:[^$\\]|\\[^]){1,${LONGEST_TEX}}?)\$\$|\\\[([^]{1,${LONGEST_TEX}}?)\\\]|\\\(([^]{1,${LONGEST_TEX}}?)\\\)|\$(?!\s)((?:[^$\\\n]|\\.){1,500}?)(?<!\s)\$(?!\d))`);
const MATH_START = /\$|\\[[(]/;

// LaTeX at the start of a text. Dollars may also be prices, or boxes of a board: between them is a command, a brace, an
// exponent or an equation, or one letter.
function readMath(text) {
  const found = MATH.exec(text);
  if (!found) return undefined;
  const tex = found[1] ?? found[2] ?? found[3] ?? found[4];
  if (text[0] === "$" && !/\\[a-zA-Z]|[\^={}]|^[A-Za-z]$/.test(tex)) return undefined;
  return { raw: found[0], tex, display: found[1] !== undefined || found[2] !== undefined };
}

const search = (pattern) => (text) => { const at = text.search(pattern); return at < 0 ? undefined : at; };
const markdown = new marked.Marked({ gfm: true, breaks: true, extensions: [
  { name: "math", level: "inline", start: search(MATH_START), tokenizer: (text) => { const found = readMath(text); return found && { type: "math", ...found }; } },
  { name: "displayed", level: "block", start: search(/(?<=\n)(?:\$\$|\\\[)/), tokenizer: (text) => { const found = readMath(text); return found && found.display ? { type: "math", ...found } : undefined; } },
] });

const isRich = (text) => typeof text === "string" && text.length <= LONGEST_RICH && (MARKS.test(text) || splitMath(text) !== null);

// A text as nodes; null where it has neither Markdown nor LaTeX, or is too long, or cannot be read.
function richText(text) {
  if (!state.rich || !isRich(text)) return null;
  try {
    const made = make("div", { class: "rich" }, markdown.lexer(text).map(makeNode));
    made.source = text;
    return made;
  } catch { return null; } // nested too deeply
}

// A text with its LaTeX set and everything else as it was written; null without LaTeX.
function mathText(text) {
  const parts = state.rich && typeof text === "string" && text.length <= LONGEST_RICH ? splitMath(text) : null;
  if (!parts) return null;
  const made = make("pre", { class: "rich" }, parts.map((part) => (typeof part === "string" ? part : makeMath(part))));
  made.source = text;
  return made;
}

function splitMath(text) {
  const parts = [];
  let [done, at] = [0, 0];
  for (;;) {
    const next = text.slice(at).search(MATH_START);
    if (next < 0) break;
    at += next;
    const found = readMath(text.slice(at, at + 2 * LONGEST_TEX));
    if (found) {
      parts.push(text.slice(done, at), found);
      done = at += found.raw.length;
    } else at += 1;
  }
  return parts.length ? [...parts, text.slice(done)] : null;
}

const ELEMENTS = { strong: "strong", em: "em", del: "del", paragraph: "p", blockquote: "blockquote" };

function makeNode(token) {
  const inside = () => (token.tokens || []).map(makeNode);
  switch (token.type) {
    case "space": return null;
    case "strong": case "em": case "del": case "paragraph": case "blockquote": return make(ELEMENTS[token.type], {}, inside());
    case "heading": return make("h4", {}, inside());
    case "text": return token.tokens ? inside() : token.text;
    case "escape": return token.text;
    case "codespan": return make("code", {}, token.text);
    case "code": return make("pre", {}, token.text);
    case "hr": case "br": return make(token.type);
    case "list": return make(token.ordered ? "ol" : "ul", { start: token.ordered ? Number(token.start) || 0 : null }, token.items.map((item) => make("li", {}, item.tokens.map(makeNode))));
    case "table": return make("table", {}, make("tr", {}, token.header.map((cell) => make("th", {}, cell.tokens.map(makeNode)))),
      token.rows.map((row) => make("tr", {}, row.map((cell) => make("td", {}, cell.tokens.map(makeNode))))));
    case "link": return [inside(), token.text === token.href ? null : ` (${token.href})`];
    case "math": return makeMath(token);
    default: return token.raw; // HTML, images, definitions
  }
}

function makeMath({ raw, tex, display }) {
  const element = make("span", { class: display ? "math display" : "math" }, raw);
  loadMath().then(() => katex.render(tex, element, { output: "mathml", displayMode: display, trust: false, maxExpand: 100, maxSize: 20, strict: "ignore" }))
    .catch(() => { element.textContent = raw; });
  return element;
}

let mathLoaded = null;
function loadMath() {
  mathLoaded = mathLoaded || (async () => {
    const text = data.token ? (await ask("/api/katex")).text : await unpack("katex");
    document.head.append(make("script", { textContent: text }));
  })();
  return mathLoaded;
}
