"use strict";
// Shows Markdown while a model writes it. HTML in it stays text, what is made of it is sanitised, and nothing of it is
// loaded: images become links.

const SANITISE = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre",
    "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["align", "href", "start", "title"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};
const LOWEST_LEVEL = 3;  // of headings: those of turns are above
const COPIED_MS = 1500;

marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escaped(text)}</p>` : escaped(text)),
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
    heading({ tokens, depth }) {
      const level = Math.max(depth, LOWEST_LEVEL);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
  },
});
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName !== "A") return;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
});

function escaped(text) {
  return text.replace(/[&<>"']/g, (char) => `&#${char.charCodeAt(0)};`);
}

// Only the blocks that have changed are made again, so that a selection in the others stays.
function showMarkdown(box, text) {
  const tokens = marked.lexer(text);
  const blocks = tokens.filter((token) => token.type !== "space" && token.type !== "def");
  const shown = [...box.children];
  nestHeadings(blocks);
  blocks.forEach((token, i) => {
    if (shown[i]?.source === token.raw) return;
    const block = blockOf(token, tokens.links);
    if (i < shown.length) shown[i].replaceWith(block);
    else box.append(block);
  });
  shown.slice(blocks.length).forEach((block) => block.remove());
}

// No level is left out, whatever levels the model has chosen.
function nestHeadings(tokens) {
  const above = [];
  for (const token of tokens.filter(({ type }) => type === "heading")) {
    while (above.at(-1) >= token.depth) above.pop();
    above.push(token.depth);
    token.depth = Math.min(LOWEST_LEVEL - 1 + above.length, 6);
  }
}

function blockOf(token, links) {
  const block = document.createElement("div");
  block.className = "block";
  block.source = token.raw;
  block.append(DOMPurify.sanitize(marked.parser(Object.assign([token], { links })), SANITISE));
  for (const pre of block.querySelectorAll("pre")) wrapCode(pre, pre.parentNode === block ? token.lang ?? "" : "");
  for (const table of block.querySelectorAll("table")) wrapTable(table);
  return block;
}

function wrapCode(pre, language) {
  pre.tabIndex = 0; // can be scrolled by keyboard
  pre.textContent = pre.textContent.replace(/\n$/, "");
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const name = Object.assign(document.createElement("span"), { textContent: language.split(/\s/)[0] });
  bar.append(name, copyButton(() => pre.textContent, "Copy code"));
  const box = document.createElement("div");
  box.className = "code";
  pre.replaceWith(box);
  box.append(bar, pre);
}

function wrapTable(table) {
  const box = document.createElement("div");
  box.className = "wide";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Table");
  table.replaceWith(box);
  box.append(table);
}

function copyButton(textOf, label) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "small", textContent: label });
  button.addEventListener("click", async () => {
    button.textContent = (await copied(textOf())) ? "Copied" : "Not copied";
    setTimeout(() => { button.textContent = label; }, COPIED_MS);
  });
  return button;
}

async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { /* a page without TLS on another host has no clipboard */ }
  const field = Object.assign(document.createElement("textarea"), { value: text, className: "hidden" });
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  return done;
}
