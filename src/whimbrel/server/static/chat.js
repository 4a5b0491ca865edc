// The chat page: keeps the conversation, sends all of it with every message, and shows the response as it streams.
// Text is only ever set as textContent, so that neither model output nor user input can inject HTML.

const find = (id) => document.getElementById(id);
const [log, form, text, send, stop, status, model] = ["turns", "form", "text", "send", "stop", "status", "model"].map(find);
const STORED_FIELDS = {
  model: "whimbrel.model", system: "whimbrel.system", temperature: "whimbrel.temperature", tokens: "whimbrel.tokens", key: "whimbrel.key",
};
const CONVERSATION = "whimbrel.conversation";

let messages = [];
let controller = null; // aborts the response that is streaming

function showStatus(message, isError = false) {
  status.textContent = message;
  status.classList.toggle("error", isError);
}

function showMessage(message) {
  const item = document.createElement("li");
  item.className = message.role;
  const author = document.createElement("span");
  author.className = "author";
  author.textContent = message.role === "user" ? "You" : "Model";
  const content = document.createElement("p");
  content.textContent = message.content;
  item.append(author, content);
  log.append(item);
  item.scrollIntoView({ block: "end" });
  return content;
}

function store() {
  sessionStorage.setItem(CONVERSATION, JSON.stringify(messages));
}

async function request(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (find("key").value) headers.Authorization = `Bearer ${find("key").value}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  if (response.status === 401) find("settings").open = true;
  throw Object.assign(new Error(body?.error?.message ?? `HTTP status ${response.status}`), { code: body?.error?.code });
}

async function loadModels() {
  const { data } = await (await request("/v1/models")).json();
  const chosen = sessionStorage.getItem(STORED_FIELDS.model);
  model.replaceChildren(...data.map(({ id }) => new Option(id, id, false, id === chosen)));
  model.disabled = data.length < 2;
}

function requestBody(history) {
  const system = find("system").value.trim();
  const body = { model: model.value, stream: true, messages: system ? [{ role: "system", content: system }, ...history] : history };
  if (find("temperature").value) body.temperature = Number(find("temperature").value);
  if (find("tokens").value) body.max_completion_tokens = Number(find("tokens").value);
  return JSON.stringify(body);
}

// If the conversation is longer than the model's context, leaves out the oldest pairs of messages.
async function requestCompletion() {
  for (let start = 0; ; start += 2) {
    try {
      const body = requestBody(messages.slice(start));
      const response = await request("/v1/chat/completions", { method: "POST", body, signal: controller.signal });
      return { response, truncated: start > 0 };
    } catch (error) {
      if (error.code !== "context_length_exceeded" || start + 2 >= messages.length) throw error;
    }
  }
}

// Server-sent events are separated by blank lines; ours have one `data:` line each.
async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    const parts = (buffer + next.value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("the connection was closed before the end of the response");
}

async function streamResponse() {
  const message = { role: "assistant", content: "" };
  if (!model.value) await loadModels();
  const { response, truncated } = await requestCompletion();
  const content = showMessage(message);
  messages.push(message);
  let finish = null;
  for await (const event of readEvents(response)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    message.content += choice?.delta.content ?? "";
    finish = choice?.finish_reason ?? finish;
    const atBottom = innerHeight + scrollY > document.body.scrollHeight - 100; // do not scroll if the user scrolled up
    content.textContent = message.content;
    if (atBottom) content.parentElement.scrollIntoView({ block: "end" });
  }
  const notes = [];
  if (finish === "length") notes.push("Stopped at the token limit.");
  if (truncated) notes.push("The context is full: the oldest messages were left out.");
  showStatus(notes.join(" "));
}

async function submit(input) {
  const message = { role: "user", content: input };
  messages.push(message);
  const item = showMessage(message).parentElement;
  controller = new AbortController();
  setBusy(true);
  showStatus("Generating…");
  const before = messages.length;
  try {
    await streamResponse();
  } catch (error) {
    const aborted = error.name === "AbortError";
    showStatus(aborted ? "Stopped." : `Error: ${error.message}`, !aborted);
    if (messages.length === before) { // no response: put the message back into the text box
      messages.pop();
      item.remove();
      text.value = input;
    }
  } finally {
    controller = null;
    setBusy(false);
    store();
    text.focus();
  }
}

function setBusy(busy) {
  send.hidden = busy;
  stop.hidden = !busy;
  find("new").disabled = busy;
  log.setAttribute("aria-busy", String(busy));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const input = text.value.trim();
  if (controller || !input) return;
  text.value = "";
  submit(input);
});

text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stop.addEventListener("click", () => controller?.abort());

find("new").addEventListener("click", () => {
  messages = [];
  log.replaceChildren();
  store();
  showStatus("");
  text.focus();
});

for (const [id, name] of Object.entries(STORED_FIELDS)) {
  find(id).value = sessionStorage.getItem(name) ?? "";
  find(id).addEventListener("change", () => {
    sessionStorage.setItem(name, find(id).value);
    if (id === "key") loadModels().then(() => showStatus(""), (error) => showStatus(error.message, true));
  });
}

messages = JSON.parse(sessionStorage.getItem(CONVERSATION) ?? "[]");
messages.forEach(showMessage);
loadModels().catch((error) => showStatus(error.message, true));
