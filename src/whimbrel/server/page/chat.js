// The chat page: it keeps the conversation, sends it with every turn, and shows the answer as it is written.
// Text is only ever set as text, so nothing that a model or a user writes can become a part of the page.

const find = (id) => document.getElementById(id);
const [turns, form, text, send, stop, status] = ["turns", "form", "text", "send", "stop", "status"].map(find);
const KEPT = { system: "whimbrel.system", temperature: "whimbrel.temperature", tokens: "whimbrel.tokens", key: "whimbrel.key" };
const CONVERSATION = "whimbrel.conversation";

let messages = [];
let model = null;
let under_way = null; // what stops the answer that is being written

function tell(words, fault = false) {
  status.textContent = words;
  status.classList.toggle("fault", fault);
}

function show(message) {
  const turn = document.createElement("li");
  turn.className = message.role;
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = message.role === "user" ? "You" : "Model";
  const words = document.createElement("p");
  words.textContent = message.content;
  turn.append(who, words);
  turns.append(turn);
  turn.scrollIntoView({ block: "end" });
  return words;
}

function keep() {
  sessionStorage.setItem(CONVERSATION, JSON.stringify(messages));
}

async function ask(path, options = {}) {
  const headers = { "Content-Type": "application/json" };
  if (find("key").value) headers.Authorization = `Bearer ${find("key").value}`;
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => null);
  if (answer.status === 401) find("settings").open = true;
  throw new Error(body?.error?.message ?? `the server answered with ${answer.status}`);
}

async function find_model() {
  const { data } = await (await ask("/v1/models")).json();
  model = data[0].id;
  find("model").textContent = model;
}

function body() {
  const system = find("system").value.trim();
  const asked = { model, stream: true, messages: system ? [{ role: "system", content: system }, ...messages] : messages };
  if (find("temperature").value) asked.temperature = Number(find("temperature").value);
  if (find("tokens").value) asked.max_completion_tokens = Number(find("tokens").value);
  return JSON.stringify(asked);
}

// The events of a stream: each is the lines between two blank ones, and ours have one line.
async function* events(answer) {
  let held = "";
  for await (const piece of pieces(answer.body.pipeThrough(new TextDecoderStream()).getReader())) {
    const parts = (held + piece).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
  throw new Error("the answer was cut short");
}

async function* pieces(reader) {
  for (let next = await reader.read(); !next.done; next = await reader.read()) yield next.value;
}

async function answer_turn() {
  const turn = { role: "assistant", content: "" };
  if (model === null) await find_model();
  const answer = await ask("/v1/chat/completions", { method: "POST", body: body(), signal: under_way.signal });
  const words = show(turn);
  messages.push(turn);
  let finish = null;
  for await (const event of events(answer)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices;
    turn.content += choice?.delta.content ?? "";
    finish = choice?.finish_reason ?? finish;
    const follows = innerHeight + scrollY > document.body.scrollHeight - 100; // unless the reader has gone back up
    words.textContent = turn.content;
    if (follows) words.parentElement.scrollIntoView({ block: "end" });
  }
  tell(finish === "length" ? "The answer ended because it reached its length." : "");
}

async function take_turn(words) {
  const said = { role: "user", content: words };
  messages.push(said);
  const shown = show(said).parentElement;
  under_way = new AbortController();
  busy(true);
  tell("Writing…");
  const before = messages.length;
  try {
    await answer_turn();
  } catch (error) {
    tell(error.name === "AbortError" ? "Stopped." : `That failed: ${error.message}`, error.name !== "AbortError");
    if (messages.length === before) { // nothing was answered: the words go back to where they were written
      messages.pop();
      shown.remove();
      text.value = words;
    }
  } finally {
    under_way = null;
    busy(false);
    keep();
    text.focus();
  }
}

function busy(is) {
  send.hidden = is;
  stop.hidden = !is;
  find("new").disabled = is;
  turns.setAttribute("aria-busy", String(is));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const words = text.value.trim();
  if (under_way || !words) return;
  text.value = "";
  take_turn(words);
});

text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    form.requestSubmit();
  }
});

stop.addEventListener("click", () => under_way?.abort());

find("new").addEventListener("click", () => {
  messages = [];
  turns.replaceChildren();
  keep();
  tell("");
  text.focus();
});

for (const [id, name] of Object.entries(KEPT)) {
  find(id).value = sessionStorage.getItem(name) ?? "";
  find(id).addEventListener("change", () => {
    sessionStorage.setItem(name, find(id).value);
    if (id === "key") find_model().then(() => tell(""), (error) => tell(error.message, true));
  });
}

messages = JSON.parse(sessionStorage.getItem(CONVERSATION) ?? "[]");
messages.forEach(show);
find_model().catch((error) => tell(error.message, true));
