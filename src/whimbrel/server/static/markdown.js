// Renders Markdown that a model wrote. Raw HTML is shown as text; what marked generates is sanitized by DOMPurify.

import { copyButton, element } from "/page/client.js";

const { marked, DOMPurify } = window; // classic scripts
const ALLOWED_TAGS = (
  "a blockquote br code del em h1 h2 h3 h4 h5 h6 hr li ol p pre strong table tbody td th thead tr ul #text"
).split(" ");
const ALLOWED_ATTR = ["align", "class", "href", "start"];
const escape = (text) => text.replace(/[&<>"]/g, (character) => `&#${character.charCodeAt()};`);

marked.use({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, block }) => (block ? `<p>${escape(text.trim())}</p>` : escape(text)),
    image: ({ text, href }) => escape(text || href), // loading it would be a request to another site
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

// Returns a fragment for the page.
export function renderMarkdown(text) {
  const fragment = DOMPurify.sanitize(marked.parse(text), { ALLOWED_TAGS, ALLOWED_ATTR, ALLOW_DATA_ATTR: false, RETURN_DOM_FRAGMENT: true });
  for (const link of fragment.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const block of fragment.querySelectorAll("pre")) addCodeHeader(block);
  for (const table of fragment.querySelectorAll("table")) scrollable(table, "Table");
  return fragment;
}

function addCodeHeader(block) {
  const code = block.querySelector("code") ?? block;
  const language = /language-([\w+#.-]+)/.exec(code.className)?.[1] ?? "code";
  const header = element("div", { className: "code-header" }, element("span", { textContent: language }), copyButton(() => code.textContent));
  const box = element("div", { className: "code" });
  block.replaceWith(box);
  box.append(header, block);
  block.tabIndex = 0; // so that a wide block can be scrolled with the keyboard
  block.setAttribute("role", "region");
  block.setAttribute("aria-label", `Code: ${language}`);
}

function scrollable(node, name) {
  const box = element("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: name });
  node.replaceWith(box);
  box.append(node);
}
