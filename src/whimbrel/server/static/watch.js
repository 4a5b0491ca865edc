// The page of `whimbrel watch`: polls /api/runs and draws its curves. Text is only ever set as textContent, so that
// samples cannot inject HTML.

import { checkKey, element, errorMessage } from "/page/client.js";

const find = (id) => document.getElementById(id);
const POLL_RUNNING = 1000, POLL_IDLE = 5000, NOTICE = 8000; // milliseconds
const GIB = 2 ** 30;
const NBSP = "\u00a0"; // keeps a number and its unit on one line
const MAX_SAMPLES = 6; // of all runs, and at least one of each; older ones are folded
const MAX_SELECTED = 5; // runs that are selected when the page is opened
const COLORS = 8;
const CHARTS = [
  { field: "loss", title: "Loss", height: 340 },
  { field: "lr", title: "Learning rate" },
  { field: "grad_norm", title: "Gradient norm" },
  { field: "tokens_per_second", title: "Tokens/s", fromZero: true },
  { field: "peak_memory", title: "Peak memory (GiB)", fromZero: true },
  { field: "rewards/margins", title: "Reward margin" }, // of preference pairs
  { field: "rewards/accuracies", title: "Reward accuracy" },
];
const AXIS_NAMES = { step: "step", tokens: "tokens", seconds: "training time" };

let runs = [];
const selected = new Set(); // names of the runs that are drawn
const curves = new Map(); // by name
let version = 0;
let charts = [];
let layout = ""; // what the current charts were made for
let noticeEnd = 0; // until when the reply of a run is shown
let shownSamples = "";
let timer = null;
let request = null; // aborts the request that is running

// ---------------------------------------------------------------------------------------------- formatting

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 2 });

function formatTime(seconds) {
  const rounded = Math.round(seconds), minutes = Math.floor(rounded / 60), hours = Math.floor(minutes / 60);
  if (hours) return `${hours}${NBSP}h ${minutes % 60}${NBSP}min`;
  return minutes ? `${minutes}${NBSP}min ${rounded % 60}${NBSP}s` : `${+seconds.toPrecision(3)}${NBSP}s`;
}

const FORMATS = {
  loss: (value) => value.toFixed(4),
  tokens_per_second: (value) => compact.format(value),
  step: (value) => value.toLocaleString("en"),
  tokens: (value) => compact.format(value),
  seconds: formatTime,
};
const short = (value) => `${+value.toPrecision(3)}`;
const format = (field, value) => (value === null || value === undefined ? "–" : (FORMATS[field] ?? short)(value));

function showStatus(message, isError = false) {
  if (find("status").textContent !== message) find("status").textContent = message;
  find("status").classList.toggle("error", isError);
}

// ---------------------------------------------------------------------------------------------- requests

async function call(path, options = {}) {
  const key = sessionStorage.getItem("whimbrel.watch.key") ?? "";
  if (!key) throw accessError("This page requires a key."); // a rejected request would be an error in the console
  checkKey(key);
  const headers = { Authorization: `Bearer ${key}`, "Content-Type": "application/json" };
  const response = await fetch(path, { ...options, headers }).catch(reportDisconnected);
  if (response.ok) return response.json().catch(reportDisconnected);
  if (response.status === 401) throw accessError("The key is incorrect.");
  throw new Error(await errorMessage(response));
}

const accessError = (message) => Object.assign(new Error(message), { status: 401 });

function reportDisconnected() {
  const names = runs.length <= 3 ? runs.map((run) => ` ${run.name}`).join("") : "";
  throw new Error(`Disconnected. To see the runs again, run: whimbrel watch${names}`);
}

function showError(error) {
  if (error.status === 401) askForKey();
  showStatus(error.message, true);
}

function askForKey() {
  if (!find("login").hidden) return;
  find("login").hidden = false;
  find("key").focus();
}

async function refresh() {
  clearTimeout(timer);
  request?.abort();
  const own = (request = new AbortController());
  const query = new URLSearchParams({ smoothing: find("smoothing").value, since: version });
  for (const name of selected) query.append("run", name);
  try {
    const reply = await call(`/api/runs?${query}`, { signal: own.signal });
    find("login").hidden = true;
    const known = new Set(runs.map((run) => run.name));
    runs = reply.runs;
    version = reply.version;
    for (const [name, curve] of Object.entries(reply.curves)) {
      curve.peak_memory = curve.peak_memory.map((value) => value && value / GIB);
      curves.set(name, curve);
    }
    const removed = removeMissing();
    const added = selectNew(known);
    if (Date.now() >= noticeEnd) showStatus(describe());
    showRuns();
    if (removed || Object.keys(reply.curves).length) draw();
    else showSamples(); // in another order if a run has ended
    if (added) return reload();
  } catch (error) {
    if (own.signal.aborted) return;
    showError(error);
    if (error.status === 401) return; // until another key is entered
  }
  const wait = runs.some((run) => run.state === "running") ? POLL_RUNNING : POLL_IDLE;
  if (!document.hidden) timer = setTimeout(refresh, wait);
}

function removeMissing() {
  const names = new Set(runs.map((run) => run.name));
  const missing = [...selected, ...curves.keys()].filter((name) => !names.has(name));
  for (const name of missing) {
    selected.delete(name);
    curves.delete(name);
  }
  return missing.length > 0;
}

// Selects the newest runs when the page is opened; later, also those that appear, as long as there are colors.
function selectNew(known) {
  const added = runs.filter((run) => !known.has(run.name));
  const newest = [...added].sort((a, b) => (b.state === "running") - (a.state === "running") || b.modified - a.modified);
  const chosen = newest.slice(0, Math.max((known.size ? COLORS : MAX_SELECTED) - selected.size, 0));
  for (const run of added) if (chosen.includes(run)) selected.add(run.name);
  return chosen.length > 0;
}

function reload() {
  version = 0;
  refresh();
}

function describe() {
  if (!runs.length) return "No runs yet.";
  const unreadable = runs.find((run) => run.error);
  if (unreadable) return unreadable.error;
  const running = runs.filter((run) => run.state === "running").length;
  return `${runs.length} ${runs.length === 1 ? "run" : "runs"}, ${running} running`;
}

async function control(run, action) {
  if (action === "stop" && !confirm(`Stop ${run} after the current step? It will then be evaluated and saved as configured.`)) return;
  try {
    const reply = await call("/api/control", { method: "POST", body: JSON.stringify({ run, action }) });
    showStatus(`${run} (step ${reply.step}) ${reply.message}`);
  } catch (error) {
    showError(error);
  }
  noticeEnd = Date.now() + NOTICE;
}

// ---------------------------------------------------------------------------------------------- table

const color = (name) => `--run-${[...selected].indexOf(name) % COLORS}`;

// Rows are kept and only their values change, so that the keyboard focus stays where it is.
function showRuns() {
  const body = find("runs");
  const rows = new Map([...body.children].map((row) => [row.dataset.name, row]));
  const wanted = runs.map((run) => rows.get(run.name) ?? createRow(run.name));
  if (wanted.length !== body.children.length || wanted.some((row, index) => row !== body.children[index])) body.replaceChildren(...wanted);
  runs.forEach((run, index) => updateRow(wanted[index], run));
}

function createRow(name) {
  const box = element("input", { type: "checkbox" });
  box.addEventListener("change", () => {
    if (box.checked) selected.add(name);
    else selected.delete(name);
    showRuns();
    if (box.checked) reload();
    else draw();
  });
  const label = element("label", {}, box, element("span", { className: "swatch" }), element("span", { textContent: name }));
  const cell = (field, label, className = "") => {
    const created = element("td", { className });
    Object.assign(created.dataset, { field, label });
    return created;
  };
  const row = element(
    "tr", {}, element("th", { scope: "row" }, label), cell("state", "State"), cell("step", "Step"),
    cell("loss", "Train loss", "number"), cell("validation", "Validation loss", "number"), cell("tokens_per_second", "Tokens/s", "number"),
    cell("peak_memory", "Peak memory", "number"), cell("eta_seconds", "Time left", "number"), element("td", { className: "actions" }),
  );
  row.dataset.name = name;
  return row;
}

function updateRow(row, run) {
  const chosen = selected.has(run.name);
  row.querySelector("input").checked = chosen;
  row.querySelector(".swatch").style.background = chosen ? `var(${color(run.name)})` : "transparent";
  const set = (field, text) => {
    const cell = row.querySelector(`[data-field="${field}"]`);
    if (cell.firstChild?.nodeValue !== text) cell.replaceChildren(text);
    cell.classList.toggle("empty", text === "–");
    return cell;
  };
  set("state", run.state);
  const step = set("step", `${format("step", run.step ?? 0)} / ${run.total ? format("step", run.total) : "?"}`);
  if (!step.querySelector("progress")) step.append(element("progress", { ariaLabel: `Progress of ${run.name}` }));
  Object.assign(step.querySelector("progress"), { max: run.total || 1, value: run.step ?? 0 });
  set("loss", format("loss", run.loss));
  set("validation", format("loss", run.validation));
  set("tokens_per_second", format("tokens_per_second", run.tokens_per_second));
  set("peak_memory", run.peak_memory ? `${format("peak_memory", run.peak_memory / GIB)}${NBSP}GiB` : "–");
  set("eta_seconds", run.eta_seconds === null || run.eta_seconds === undefined ? "–" : formatTime(Math.round(run.eta_seconds)));
  const actions = row.querySelector(".actions"), running = run.state === "running";
  if (running === (actions.children.length > 0)) return;
  const names = running ? { save: "Save", stop: "Stop" } : {};
  actions.replaceChildren(
    ...Object.entries(names).map(([action, textContent]) => {
      const button = element("button", { type: "button", textContent, ariaLabel: `${textContent} ${run.name}` });
      button.addEventListener("click", () => control(run.name, action));
      return button;
    }),
  );
}

// ---------------------------------------------------------------------------------------------- charts

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// The series of a chart, each as [x values, y values, options]. Those that are `quiet` have no value below the chart.
function seriesOf(chart, drawn, axis) {
  const all = [];
  for (const [name, curve] of drawn) {
    const stroke = style(color(name)), x = curve[axis];
    const add = (title, xs, ys, options) => all.push([xs, ys, { title, run: name, stroke, points: { show: false }, ...options }]);
    if (curve[chart.field].every((value) => value === null)) continue;
    if (chart.field !== "loss") {
      add("", x, curve[chart.field], { width: 1.5 });
      continue;
    }
    if (curve.span > 1) add("unsmoothed", x, curve.loss, { width: 1, alpha: 0.25, quiet: true });
    add(curve.span > 1 ? "train (smoothed)" : "train", x, curve.smoothed, { width: 1.5 });
    const { loss } = curve.validation;
    if (loss.length) {
      const points = { show: true, size: 6, fill: style("--background"), stroke };
      add("validation", curve.validation[axis], loss, { width: 2, dash: [6, 4], points });
    }
  }
  return all;
}

function draw() {
  const axis = find("axis").value, logarithmic = find("log").checked;
  const drawn = [...selected].filter((name) => curves.has(name)).map((name) => [name, curves.get(name)]);
  const shown = CHARTS.filter((chart) => drawn.some(([, curve]) => curve[chart.field].some((value) => value !== null)));
  const prepared = shown.map((chart) => seriesOf(chart, drawn, axis));
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const wanted = JSON.stringify([axis, logarithmic, dark, shown.map((chart) => chart.field), prepared.map((all) => all.map(([, , options]) => [options.run, options.title]))]);
  const data = prepared.map((all) => (all.length ? uPlot.join(all.map(([x, y]) => [x, y])) : [[]]));
  if (wanted !== layout) {
    layout = wanted;
    charts.forEach((plot) => plot.destroy());
    find("charts").replaceChildren();
    charts = shown.map((chart, index) => createChart(chart, prepared[index].map(([, , options]) => options), data[index], axis, logarithmic));
  } else {
    charts.forEach((plot, index) => {
      const xs = plot.data[0], { min, max } = plot.scales.x;
      const zoomed = xs.length > 0 && (min > xs[0] || max < xs.at(-1));
      plot.setData(data[index], !zoomed);
      if (zoomed) plot.redraw();
    });
  }
  charts.forEach((plot) => showValues(plot));
  showSamples();
}

function createChart(chart, series, data, axis, logarithmic) {
  const isLoss = chart.field === "loss";
  const figure = element("figure", { className: isLoss ? "main" : "", tabIndex: 0, ariaLabel: `${chart.title} by ${AXIS_NAMES[axis]}` });
  const note = isLoss ? " train (solid), validation (dashed), resumes (dotted vertical lines)" : "";
  const values = element("p", { className: "values" });
  figure.append(element("figcaption", {}, chart.title, element("span", { textContent: note })));
  find("charts").append(figure);
  const line = { stroke: style("--muted"), grid: { stroke: style("--grid"), width: 1 }, ticks: { stroke: style("--grid"), width: 1 } };
  const options = {
    width: Math.max(figure.clientWidth - 20, 100),
    height: chart.height ?? 200,
    legend: { show: false },
    cursor: { sync: { key: "runs" }, drag: { x: true, y: false }, points: { size: 7 } },
    scales: { x: { time: false }, y: chart.fromZero ? { range: (plot, min, max) => [0, (max || 1) * 1.1] } : { distr: isLoss && logarithmic ? 3 : 1 } },
    axes: [
      { ...line, values: (plot, ticks) => ticks.map((tick) => (axis === "seconds" ? formatTime(tick) : compact.format(tick))) },
      { ...line, size: 64, values: (plot, ticks) => ticks.map((tick) => (tick === null ? "" : isLoss ? `${+tick.toPrecision(4)}` : format(chart.field, tick))) },
    ],
    series: [{}, ...series.map((each) => ({ ...each, spanGaps: false }))],
    hooks: { setCursor: [showValues], draw: isLoss ? [drawResumes] : [] },
  };
  const plot = new uPlot(options, data, figure);
  Object.assign(plot, { chart, valuesLine: values, axisName: axis });
  figure.append(values);
  figure.addEventListener("keydown", (event) => moveCursor(plot, event));
  new ResizeObserver(() => plot.setSize({ width: Math.max(figure.clientWidth - 20, 100), height: chart.height ?? 200 })).observe(figure);
  return plot;
}

// Below each chart: the last values of each run, or the last ones before the cursor. Series have values at different steps.
function showValues(plot) {
  if (!plot.valuesLine) return; // being created
  const xs = plot.data[0], at = plot.cursor.idx ?? xs.length - 1;
  const entries = new Map(); // by run
  plot.series.forEach((series, index) => {
    if (index === 0 || series.quiet) return;
    let position = at;
    while (position >= 0 && (plot.data[index][position] ?? null) === null) position--;
    const entry = entries.get(series.run) ?? { last: -1, values: [] };
    entry.last = Math.max(entry.last, position);
    entry.values.push(`${series.title} ${format(plot.chart.field, plot.data[index][position])}`.trim());
    entries.set(series.run, entry);
  });
  plot.valuesLine.replaceChildren(
    ...[...entries].map(([name, { last, values }]) => {
      const swatch = element("span", { className: "swatch" });
      swatch.style.background = `var(${color(name)})`;
      const where = last < 0 ? "" : `, ${AXIS_NAMES[plot.axisName]} ${format(plot.axisName, xs[last])}`;
      return element("span", {}, swatch, `${name.split("/").at(-1)}${where}: ${values.join(", ")}`);
    }),
  );
}

function moveCursor(plot, event) {
  const direction = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!direction || !plot.data[0].length) return;
  event.preventDefault();
  const last = plot.data[0].length - 1;
  const step = event.shiftKey ? Math.max(1, Math.round(last / 20)) : 1;
  const index = Math.min(Math.max((plot.cursor.idx ?? last) + direction * step, 0), last);
  plot.setCursor({ left: plot.valToPos(plot.data[0][index], "x"), top: plot.over.clientHeight / 2 });
}

function drawResumes(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.setLineDash([2 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.lineWidth = 1.5 * devicePixelRatio;
  for (const name of selected) {
    ctx.strokeStyle = style(color(name));
    for (const x of curves.get(name)?.resumes[find("axis").value] ?? []) {
      const left = plot.valToPos(x, "x", true);
      if (left < bbox.left || left > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(left, bbox.top);
      ctx.lineTo(left, bbox.top + bbox.height);
      ctx.stroke();
    }
  }
  ctx.restore();
}

// ---------------------------------------------------------------------------------------------- samples

// The selected runs: running ones first, then the newest.
function sampledRuns() {
  const drawn = runs.filter(({ name }) => selected.has(name) && curves.has(name));
  const running = drawn.filter(({ state }) => state === "running");
  return [...running, ...drawn.filter((run) => !running.includes(run)).sort((a, b) => b.modified - a.modified)];
}

function showSamples() {
  const names = sampledRuns().map(({ name }) => name);
  const samples = names.map((name) => curves.get(name).samples); // the newest first
  const key = JSON.stringify([names, samples]);
  if (key === shownSamples) return;
  shownSamples = key;
  const counts = shownCounts(samples.map(({ length }) => length));
  const article = (name, { step, text }) =>
    element("article", {}, element("h3", { textContent: `${name}, step ${format("step", step)}` }), element("p", { textContent: text, tabIndex: 0 }));
  const articles = (from, to) => names.flatMap((name, index) => samples[index].slice(from(index), to(index)).map((sample) => article(name, sample)));
  const newest = articles(() => 0, (index) => counts[index]);
  const older = articles((index) => counts[index], () => Infinity);
  find("samples").replaceChildren(...(newest.length ? newest : [element("p", { className: "hint", textContent: "No samples yet." })]));
  find("older-samples").replaceChildren(...older);
  find("older").hidden = !older.length;
}

// How many samples of each run are shown, given how many there are: one of each in turn, up to the maximum.
function shownCounts(available) {
  const counts = available.map((number) => Math.min(number, 1));
  let rest = MAX_SAMPLES - counts.reduce((sum, count) => sum + count, 0);
  for (let before = null; rest > 0 && rest !== before; ) {
    before = rest;
    available.forEach((number, index) => {
      if (rest > 0 && counts[index] < number) [counts[index], rest] = [counts[index] + 1, rest - 1];
    });
  }
  return counts;
}

// ---------------------------------------------------------------------------------------------- start

for (const id of ["axis", "log"]) find(id).addEventListener("change", draw);
find("smoothing").addEventListener("change", reload);
find("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("whimbrel.watch.key", find("key").value);
  reload();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("visibilitychange", () => !document.hidden && refresh());

function takeKey() { // the printed link ends with #key=...; the key is not left in the address bar
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (key === null) return;
  sessionStorage.setItem("whimbrel.watch.key", key);
  history.replaceState(null, "", location.pathname);
}

takeKey();
addEventListener("hashchange", () => { takeKey(); reload(); });
refresh();
