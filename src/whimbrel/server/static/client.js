// Requests to the API, shared by the pages.

export const KEY = "whimbrel.key"; // in sessionStorage, entered on the chat page

// fetch would reject such a key as if the server could not be reached.
export function checkKey(key) {
  if (/^[ -~]*$/.test(key)) return;
  throw Object.assign(new Error("The key is incorrect: keys contain only printable ASCII characters."), { status: 401 });
}

// Throws like a rejected request, but the browser logs no error in its console.
export async function checkAccess() {
  const { authorized } = await (await request("/page/access")).json();
  if (!authorized) throw accessError(sessionStorage.getItem(KEY));
}

const accessError = (key) => Object.assign(new Error(key ? "The API key is incorrect." : "This server requires an API key."), { status: 401 });

export async function request(path, options = {}) {
  const key = sessionStorage.getItem(KEY) ?? "";
  checkKey(key);
  const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("Cannot reach the server.");
  });
  if (response.ok) return response;
  if (response.status === 401) throw accessError(key);
  throw Object.assign(new Error(await errorMessage(response)), { status: response.status });
}

export async function errorMessage(response) {
  const body = await response.json().catch(() => null);
  return body?.error?.message ?? `HTTP status ${response.status}`;
}

// Yields the chunks of a streamed completion. Server-sent events are separated by blank lines; ours have one `data:` line each.
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    const parts = (buffer + next.value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
  throw new Error("The connection was closed before the end of the response.");
}

export function element(tag, properties = {}, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Browsers have no clipboard API on plain HTTP, except on loopback.
  const [area, focused] = [element("textarea", { value: text, className: "visually-hidden" }), document.activeElement];
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  focused.focus();
  if (!copied) throw new Error("copying is not allowed");
}

export function copyButton(text, name = "Copy") {
  const button = element("button", { type: "button", className: "copy", textContent: name });
  button.addEventListener("click", async () => {
    try {
      await copy(typeof text === "function" ? text() : text);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copy failed";
    }
    setTimeout(() => (button.textContent = name), 1500);
  });
  return button;
}
