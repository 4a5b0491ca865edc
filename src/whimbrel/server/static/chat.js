// The chat page. Chat sends the conversation with every message; Complete continues a text, for models without a chat template.

import { KEY, checkAccess, element, readEvents, request } from "/page/client.js";
import { isSubmitKey, isTouch, showDivider, showEditor, showEntry, updateContent, updateStats } from "/page/turns.js";

const find = (id) => document.getElementById(id);
const [log, form, text, send, stop, status, model] = ["turns", "form", "text", "send", "stop", "status", "model"].map(find);
const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens"];
const FIELDS = ["system", ...SAMPLING, "tools", "key"]; // kept in sessionStorage
const STATE = "whimbrel.state";
const DEFAULT_TEMPERATURE = 0.8; // as in `whimbrel chat`
const EXAMPLES = {
  chat: [
    "Hello! What can you help me with?",
    "Explain in three sentences how a rainbow forms.",
    "Tell me a short story about a bird.",
  ],
  complete: ["Once upon a time", "The most important thing to know about", "It was late in the evening when"],
};
const number = new Intl.NumberFormat("en");
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

let cards = []; // of /v1/models
let controller = null; // aborts the response that is streaming
let editing = false;
let state = {
  mode: null, // "chat" or "complete"
  chat: [],
  complete: [],
  start: 0, // index of the first message in the context
  used: 0, // number of tokens in the context after the last response
};

const card = () => cards.find(({ id }) => id === model.value);
const entries = () => state[state.mode];

function store() {
  try {
    sessionStorage.setItem(STATE, JSON.stringify(state));
  } catch { // QuotaExceededError
    showStatus("This conversation is too long to be stored: it will be lost when the page is closed or reloaded.", true);
  }
}

function showStatus(message, isError = false) {
  status.textContent = message;
  status.classList.toggle("error", isError);
}

// Models and settings

async function loadModels() {
  await checkAccess();
  cards = (await (await request("/v1/models")).json()).data;
  const chosen = sessionStorage.getItem("whimbrel.model");
  model.replaceChildren(...cards.map(({ id }) => new Option(id, id, false, id === chosen)));
  find("settings").classList.remove("locked");
  if (!controller) setBusy(false);
  setMode(state.mode ?? defaultMode());
}

const defaultMode = () => (card().has_chat_template ? "chat" : "complete");

function setMode(mode) {
  if (state.mode !== mode) state.used = 0;
  state.mode = mode;
  find(`mode-${mode}`).checked = true;
  for (const field of document.querySelectorAll(".chat-only")) field.hidden = mode !== "chat";
  for (const field of document.querySelectorAll(".tools-only")) field.hidden ||= !card().supports_tools;
  send.textContent = mode === "chat" ? "Send" : "Complete";
  find("caution").textContent = mode === "chat" ? "Answers may be wrong." : "The text may be wrong.";
  document.title = `${model.value} · Whimbrel`;
  for (const [name, value] of Object.entries(defaults())) find(name).placeholder = value ?? "off";
  render();
  store();
}

function defaults() {
  const { generation_config: config, has_chat_template, context_length } = card();
  const limit = config.max_new_tokens ?? (has_chat_template && state.mode === "chat" ? 1024 : 256);
  const own = { temperature: DEFAULT_TEMPERATURE, ...config, max_tokens: Math.min(limit, Math.floor(context_length / 2)) };
  return Object.fromEntries(SAMPLING.map((name) => [name, own[name] ?? null]));
}

// The sampling parameters of a request: those that the user set, else those of the model.
function sampling() {
  const values = Object.entries(defaults()).map(([name, value]) => [name, find(name).value ? Number(find(name).value) : value]);
  return Object.fromEntries(values.filter(([, value]) => value !== null));
}

function tools() {
  const source = find("tools").value.trim();
  if (!source || !card().supports_tools) return {};
  let parsed;
  try {
    parsed = JSON.parse(source);
  } catch (error) {
    throw new Error(`Tools in Settings are not valid JSON: ${error.message}`);
  }
  if (!Array.isArray(parsed)) throw new Error("Tools in Settings must be a JSON list");
  return { tools: parsed };
}

function askForKey() {
  find("settings").open = true;
  find("settings").classList.toggle("locked", !cards.length); // only the key can be entered
  find("key").focus();
}

// The page

function render() {
  editing = false;
  const list = entries();
  log.replaceChildren(...list.map((entry, index) => showEntry(entry, controller ? {} : actions(entry, index === list.length - 1))));
  markStart();
  find("welcome").hidden = list.length > 0;
  if (!list.length) showWelcome();
  showMeter();
  const call = pendingCall();
  const label = call ? `Result of ${call.function.name}` : state.mode === "chat" ? "Message" : "Text to continue";
  find("text-label").textContent = label;
  text.placeholder = label;
}

// Marks where the context starts, if the server has dropped older messages.
function markStart() {
  log.querySelector(".divider")?.remove();
  if (state.mode === "chat" && state.start > 0) log.children[state.start]?.before(showDivider());
}

// Scrolls to the end after a change, unless the user has scrolled up.
function follow(change) {
  const atBottom = innerHeight + scrollY > document.body.scrollHeight - 100;
  change();
  if (atBottom) scrollTo(0, document.body.scrollHeight);
}

function actions(entry, isLast) {
  const edit = { Edit: () => startEdit(entry) };
  if (entry.role === "user") return edit;
  if (entry.role === "completion") return { ...edit, ...(isLast && { Regenerate: regenerate, Continue: continueText }) };
  return entry.role === "assistant" && isLast ? { Regenerate: regenerate } : {};
}

function showWelcome() {
  const { id, parent, num_parameters, context_length, vocab_size, dtype, has_chat_template } = card();
  const chat = state.mode === "chat";
  find("greeting").textContent = chat ? `Chat with ${id}` : `Complete text with ${id}`;
  find("introduction").textContent = introduction(chat, has_chat_template);
  const facts = {
    Type: parent ? `Adapter for ${parent}` : has_chat_template ? "Chat model" : "Base model",
    Parameters: compact.format(num_parameters),
    Context: `${number.format(context_length)} tokens`,
    Vocabulary: number.format(vocab_size),
    Weights: dtype,
  };
  const fact = ([name, value]) => element("div", {}, element("dt", { textContent: name }), element("dd", { textContent: value }));
  find("facts").replaceChildren(...Object.entries(facts).map(fact));
  const mode = has_chat_template ? state.mode : "complete"; // of the examples: a base model continues texts
  const example = (prompt) => {
    const button = element("button", { type: "button", textContent: prompt });
    button.addEventListener("click", () => {
      if (state.mode !== mode) setMode(mode);
      submit(prompt);
    });
    return button;
  };
  find("examples-title").textContent = mode === "chat" ? "Try one of these" : "Try one of these prompts";
  find("examples").replaceChildren(...EXAMPLES[mode].map(example));
}

function introduction(chat, hasTemplate) {
  if (chat && hasTemplate) return "Ask a question, or start from an example.";
  if (chat) return "This is a base model without a chat template. It is given a plain “User: … Assistant:” transcript and may not answer; Complete mode works better.";
  if (hasTemplate) return "The model continues your text, without using its chat template.";
  return "This is a base model: it continues your text.";
}

function showMeter() {
  const { context_length: size } = card();
  const used = Math.min(state.used, size);
  find("meter").hidden = !used;
  find("context").max = size;
  find("context").value = used;
  find("used").textContent = `${number.format(used)} of ${number.format(size)} tokens`;
}

function setBusy(busy) {
  send.hidden = busy;
  stop.hidden = !busy;
  for (const id of ["new", "modes"]) find(id).disabled = busy || !cards.length;
  model.disabled = busy || cards.length < 2;
  log.setAttribute("aria-busy", String(busy));
}

// Generating

function apiMessage({ role, content, tool_calls, tool_call_id, name }) {
  return { role, content, ...(tool_calls && { tool_calls }), ...(tool_call_id && { tool_call_id, name }) };
}

// Streams the response into `entry`, which is the last one of the mode once the response has started. The server drops the beginning
// of a prompt that does not fit, and says so.
async function streamInto(entry, path, prompt) {
  const sent = performance.now();
  const options = { model: model.value, stream: true, stream_options: { include_usage: true }, truncation: "auto" };
  const body = JSON.stringify({ ...options, ...sampling(), ...prompt });
  const response = await request(path, { method: "POST", body, signal: controller.signal });
  if (entries().at(-1) !== entry) entries().push(entry);
  follow(render);
  const item = log.lastElementChild;
  const content = item.querySelector(".content");
  content.classList.add("waiting");
  const before = entry.content.length;
  let [chunks, first, last, usage, finish, drawn, dropped] = [0, 0, 0, null, null, true, false];
  // Tokens per second after the first token; for an answer that arrives all at once, since the request.
  const speed = (tokens) => (last > first && tokens > 1 ? ((tokens - 1) * 1000) / (last - first) : (tokens * 1000) / (last - sent));
  const draw = () => {
    drawn = true;
    updateContent(content, entry);
    updateStats(item, entry);
  };
  for await (const event of readEvents(response)) {
    const [choice] = event.choices;
    if (event.dropped_messages && !dropped) {
      state.start += event.dropped_messages;
      follow(markStart);
    }
    dropped ||= Boolean(event.dropped_messages || event.truncated);
    usage = event.usage ?? usage;
    finish = choice?.finish_reason ?? finish;
    const piece = choice?.text ?? choice?.delta?.content ?? "";
    if (piece || choice?.delta?.tool_calls) {
      entry.content += piece;
      for (const { index, ...call } of choice.delta?.tool_calls ?? []) (entry.tool_calls ??= [])[index] = call;
      last = performance.now();
      first ||= last;
      Object.assign(entry, { tokens: ++chunks, exact: false, rate: speed(chunks) });
      if (drawn) requestAnimationFrame(() => follow(draw));
      drawn = false;
    }
  }
  const { completion_tokens: tokens, total_tokens: total } = usage;
  Object.assign(entry, { tokens, exact: true, rate: last ? speed(tokens) : null });
  state.used = total;
  find("answer").textContent = entry.content.slice(before); // for screen readers
  showStatus(notes(finish, dropped, total, entry.content.length === before && !entry.tool_calls));
}

function notes(finish, dropped, total, empty) {
  const parts = [];
  if (dropped) parts.push(state.mode === "chat" ? "Older messages were left out to make room for the answer." : "To leave room for the continuation, the model only saw the end of the text.");
  if (finish === "stop" && state.mode === "complete") parts.push("The model ended the text.");
  else if (finish === "stop" && empty) parts.push("The answer is empty: the model stopped immediately.");
  if (finish === "length") parts.push(total >= card().context_length ? "Stopped because the context is full." : "Stopped at the token limit.");
  return parts.join(" ");
}

// Runs `change`, which changes the entries, then generates. Without a response, restores them and puts `input` back into the text field.
// Afterwards, the button of the last entry named `action` has the focus again.
async function generate(change, { input = "", action = null } = {}) {
  if (controller) return;
  controller = new AbortController();
  setBusy(true);
  showStatus("Generating…");
  let [entry, saved] = [null, state];
  try {
    if (!cards.length) await loadModels();
    saved = structuredClone(state);
    change();
    render();
    scrollTo(0, document.body.scrollHeight);
    if (pendingCall()) return; // the model has called several tools: more results are needed
    if (state.mode === "chat") {
      entry = { role: "assistant", content: "", model: model.value };
      const system = find("system").value.trim();
      const messages = [...(system ? [{ role: "system", content: system }] : []), ...state.chat.slice(state.start).map(apiMessage)];
      await streamInto(entry, "/v1/chat/completions", { messages, ...tools() });
    } else {
      entry = entries().at(-1);
      await streamInto(entry, "/v1/completions", { prompt: entry.prompt + entry.content });
    }
  } catch (error) {
    const aborted = error.name === "AbortError";
    showStatus(aborted ? "Stopped." : `Error: ${error.message}`, !aborted);
    if (error.status === 401) askForKey();
    if (!entry?.tokens) {
      state = saved;
      text.value = [input, text.value].filter(Boolean).join("\n\n"); // the next message may already be there
    }
  } finally {
    if (status.textContent === "Generating…") showStatus("");
    controller = null;
    setBusy(false);
    store();
    if (cards.length) follow(render);
    restoreFocus(action);
  }
}

// Moves the focus to a button of the last entry, or to the text field, if the focused element is gone.
function restoreFocus(action) {
  const focused = document.activeElement;
  if (focused !== document.body && focused.checkVisibility()) return;
  const buttons = [...(log.lastElementChild?.querySelectorAll("button") ?? [])];
  const button = buttons.find(({ textContent }) => textContent === action);
  if (button) button.focus();
  else if (!isTouch()) text.focus(); // would open the keyboard of a phone
}

function submit(input) {
  const call = pendingCall();
  const change = () => {
    if (state.mode === "complete") return state.complete.push(newText(input));
    if (call) return state.chat.push({ role: "tool", content: input, tool_call_id: call.id, name: call.function.name });
    return state.chat.push({ role: "user", content: input });
  };
  return generate(change, { input });
}

const newText = (prompt) => ({ role: "completion", prompt, content: "", model: model.value });

// The first tool call whose result is missing.
function pendingCall() {
  if (state.mode !== "chat") return undefined;
  const last = state.chat.findLastIndex(({ role }) => role === "assistant");
  const results = new Set(state.chat.slice(last + 1).map(({ tool_call_id }) => tool_call_id));
  if (state.chat.slice(last + 1).some(({ role }) => role === "user")) return undefined;
  return state.chat[last]?.tool_calls?.find(({ id }) => !results.has(id));
}

function regenerate() {
  const change = () => {
    if (state.mode === "chat") state.chat.pop();
    else extend(entries().at(-1).extended ?? 0);
  };
  return generate(change, { action: "Regenerate" });
}

function continueText() {
  return generate(() => extend(entries().at(-1).content.length), { action: "Continue" });
}

// Keeps `length` characters of the last completion, to be extended by the next response.
function extend(length) {
  const entry = entries().at(-1);
  Object.assign(entry, { content: entry.content.slice(0, length), extended: length, tokens: 0, model: model.value });
}

function startEdit(entry) {
  if (editing) render(); // closes the other editor
  const index = entries().indexOf(entry);
  const item = log.querySelectorAll("article")[index];
  const save = (input) => {
    if (state.mode === "chat" && !input.trim()) return;
    const change = () => {
      if (state.mode === "complete") {
        state.complete.splice(index, 1); // the other texts stay
        state.complete.push(newText(input));
        return;
      }
      state.chat.splice(index, Infinity, { role: "user", content: input });
      if (index <= state.start) [state.start, state.used] = [0, 0];
    };
    generate(change, { input });
  };
  const cancel = () => {
    render();
    log.querySelectorAll("article")[index].querySelector(".actions button:nth-child(2)").focus();
  };
  showEditor(item, (entry.prompt ?? "") + entry.content, send.textContent, save, cancel);
  editing = true;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const input = state.mode === "complete" ? text.value : text.value.trim();
  if (controller || (state.mode !== "complete" && !input)) return;
  text.value = "";
  submit(input);
});

text.addEventListener("keydown", (event) => {
  if (!isSubmitKey(event)) return;
  event.preventDefault();
  form.requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") controller?.abort();
});

stop.addEventListener("click", () => controller?.abort());

find("new").addEventListener("click", () => {
  if (!cards.length) return;
  Object.assign(state, { [state.mode]: [], start: 0, used: 0 });
  render();
  store();
  showStatus("");
  if (!isTouch()) text.focus();
});

for (const mode of ["chat", "complete"]) {
  find(`mode-${mode}`).addEventListener("change", () => {
    if (!cards.length) return;
    showStatus("");
    setMode(mode);
  });
}

model.addEventListener("change", () => {
  const previous = cards.find(({ id }) => id === sessionStorage.getItem("whimbrel.model")) ?? cards[0];
  sessionStorage.setItem("whimbrel.model", model.value);
  Object.assign(state, { start: 0, used: 0 });
  showStatus("");
  setMode(previous.has_chat_template === card().has_chat_template ? state.mode : defaultMode());
});

find("defaults").addEventListener("click", () => {
  for (const name of SAMPLING) {
    find(name).value = "";
    sessionStorage.removeItem(`whimbrel.${name}`);
  }
});

for (const id of FIELDS) {
  const name = id === "key" ? KEY : `whimbrel.${id}`;
  find(id).value = sessionStorage.getItem(name) ?? "";
  find(id).addEventListener("change", () => {
    sessionStorage.setItem(name, find(id).value);
    if (id === "key") start();
  });
}

function start() {
  return loadModels().then(() => showStatus(""), (error) => {
    showStatus(error.message, true);
    if (error.status === 401) askForKey();
  });
}

addEventListener("pagehide", () => controller && store()); // a reload keeps what has been generated

state = { ...state, ...JSON.parse(sessionStorage.getItem(STATE) ?? "{}") };
start();
