// The elements of the conversation. Model output goes through the sanitizer of markdown.js; everything else is set as textContent.

import { copyButton, element } from "/page/client.js";
import { renderMarkdown } from "/page/markdown.js";

const number = new Intl.NumberFormat("en");

// `entry` is a message of a chat, or {role: "completion", prompt, content}. `actions` maps names of buttons to functions.
export function showEntry(entry, actions) {
  const item = element("article", { className: entry.role, ariaLabel: author(entry) });
  const content = element("div", { className: "content" });
  item.append(element("span", { className: "author", textContent: author(entry) }), content);
  updateContent(content, entry);
  const buttons = Object.entries(actions).map(([name, action]) => {
    const button = element("button", { type: "button", textContent: name });
    button.addEventListener("click", action);
    return button;
  });
  const stats = element("span", { className: "stats" });
  item.append(element("div", { className: "actions" }, copyButton(() => (entry.prompt ?? "") + entry.content), ...buttons, stats));
  updateStats(item, entry);
  return item;
}

function author(entry) {
  if (entry.role === "user") return "You";
  if (entry.role === "tool") return `Result of ${entry.name}`;
  return entry.model;
}

export function updateContent(content, entry) {
  content.classList.toggle("plain", entry.role !== "assistant");
  if (entry.role === "completion") {
    content.replaceChildren(entry.prompt, element("span", { className: "generated", textContent: entry.content }));
  } else if (entry.role === "assistant") {
    content.replaceChildren(renderAnswer(entry.content), ...(entry.tool_calls ?? []).map(showCall));
  } else {
    content.textContent = entry.content;
  }
}

function renderAnswer(text) {
  try {
    return renderMarkdown(text);
  } catch { // marked recurses too deeply, for example in thousands of ">"
    return element("div", { className: "plain", textContent: text });
  }
}

function showCall({ function: called }) {
  let text = called.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // shown as it is
  }
  const title = element("span", {}, "Tool call: ", element("code", { textContent: called.name }));
  return element("div", { className: "call" }, title, element("pre", { textContent: text }));
}

export function updateStats(item, { tokens, exact, rate }) {
  const parts = [];
  if (tokens) parts.push(`${exact ? "" : "about "}${number.format(tokens)} token${tokens === 1 ? "" : "s"}`);
  if (rate) parts.push(`${rate < 10 ? rate.toFixed(1) : number.format(Math.round(rate))} tokens/s`);
  item.querySelector(".stats").textContent = parts.join(" · ");
}

export function showDivider() {
  return element("p", { className: "divider", textContent: "The model no longer sees the messages above: they were left out to make room for the answer" });
}

// Replaces the content of `item` by a text field; calls `save(text)` or `cancel()`.
export function showEditor(item, text, label, save, cancel) {
  const field = element("textarea", { value: text, rows: Math.min(12, text.split("\n").length + 1), ariaLabel: "Edit text" });
  const send = element("button", { type: "submit", className: "primary", textContent: label });
  const stop = element("button", { type: "button", textContent: "Cancel" });
  const form = element("form", { className: "edit" }, field, element("div", { className: "row" }, stop, send));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    save(field.value);
  });
  stop.addEventListener("click", cancel);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") cancel();
    if (isSubmitKey(event)) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  item.classList.add("editing");
  item.replaceChildren(form);
  field.focus();
}

export const isTouch = () => matchMedia("(pointer: coarse)").matches;

// On touch screens, Enter starts a new line: there is no Shift+Enter. The Enter that ends the input of an input method (as for
// Japanese) does not submit; in Safari, only the key code tells it apart.
export function isSubmitKey(event) {
  return event.key === "Enter" && !event.shiftKey && !event.isComposing && event.keyCode !== 229 && !isTouch();
}
