"use strict";
// The table of runs, the chart across models, and the comparison of ticked runs. Uses make() and state of page.js.

const percent = (value) => (value === null ? "–" : (100 * value).toFixed(1));
const interval = (success) => (success && success.ci95_low !== null ? `${percent(success.ci95_low)}–${percent(success.ci95_high)}` : "–");
const ORDER_OF_KINDS = ["only A", "only B", "both", "neither"];
const UNKNOWN = -999999999999; // sorts below every figure
const runs = { drawn: false, ticked: null, filter: "", sorted: null };

const modelOf = (source) => source.settings.model || source.settings.agent || source.settings.engine || "";
const whole = (source) => source.parts[0];

// Title, text of a cell, and the number to sort by; a column without any text is left out.
const COLUMNS = [
  ["run", (one) => one.name],
  ["environment", (one) => one.env.replaceAll("spear/", "")],
  ["panel", (one) => one.settings.panel || ""],
  ["model", modelOf],
  ["method", (one) => one.settings.method || ""],
  ["episodes", (one) => whole(one).episodes.toLocaleString("en"), (one) => whole(one).episodes],
  ["faults", (one) => (whole(one).faults ? String(whole(one).faults) : ""), (one) => whole(one).faults],
  ["won %", (one) => (whole(one).success ? percent(whole(one).success.mean) : "–"), (one) => (whole(one).success ? whole(one).success.mean : UNKNOWN)],
  ["95 % interval", (one) => interval(whole(one).success), (one) => (whole(one).success ? whole(one).success.ci95_low : UNKNOWN)],
  ["reward", (one) => (whole(one).reward === null ? "" : signed(whole(one).reward)), (one) => whole(one).reward],
  ["tokens", (one) => (one.tokens ? one.tokens.toLocaleString("en") : ""), (one) => one.tokens],
  ["cost", (one) => (one.cost === null ? "" : short(one.cost)), (one) => one.cost],
  ["time", (one) => (one.seconds === null ? "" : duration(one.seconds)), (one) => one.seconds],
  ["date", (one) => one.date || ""],
];
const HINTS = { time: "sum of the times of its episodes", tokens: "prompts and responses, where they were counted", date: "last written, UTC", "won %": "share of tasks, each the mean of its episodes" };

function duration(seconds) {
  if (seconds < 99.5) return `${short(Number(seconds.toPrecision(2)))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 100 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function drawRuns() {
  const ready = new Set(data.sources.map((one) => one.name));
  if (runs.ticked === null) runs.ticked = new Set(data.sources.length <= 2 ? ready : []);
  for (const name of runs.ticked) if (!ready.has(name)) runs.ticked.delete(name);
  const shown = COLUMNS.filter(([, text]) => data.sources.some((one) => text(one)));
  const body = make("tbody", {}, data.sources.map((source) => drawRunRow(source, shown)));
  const table = make("table", { class: "figures runs" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col", "data-sort-method": "none", "aria-label": "compare" }),
      shown.map(([title, , value]) => make("th", { scope: "col", class: value ? "" : "text", title: HINTS[title] || "", "data-sort-method": value ? "number" : null }, title)))), body);
  const count = make("span", { class: "soft", "aria-live": "polite" });
  const filter = make("input", { id: "runs-filter", type: "search", value: runs.filter, placeholder: "Filter runs   /", "aria-label": "Filter runs", oninput: () => { runs.filter = filter.value; filterRuns(body, count); } });
  const scrolled = [$("runs"), document.querySelector("#runs .scroll")].map((one) => (one ? one.scrollTop : 0));
  runs.drawn = true;
  $("runs").replaceChildren(make("section", { class: "inner" },
    make("div", { class: "above" }, filter, count, make("span", { id: "ticked", class: "soft" })),
    make("div", { class: "scroll" }, table), make("div", { id: "models" }), make("div", { id: "compared" })));
  new Tablesort(table, { descending: true });
  const headings = table.tHead.rows[0].cells;
  if (runs.sorted) { // a run was read again: in the order that was chosen
    const heading = [...headings].find((one) => one.textContent === runs.sorted[0]);
    for (let i = 0; heading && i < 2 && heading.getAttribute("aria-sort") !== runs.sorted[1]; i++) heading.click();
  }
  table.addEventListener("afterSort", () => {
    const heading = [...headings].find((one) => one.hasAttribute("aria-sort"));
    runs.sorted = heading ? [heading.textContent, heading.getAttribute("aria-sort")] : null;
    drawModels();
  });
  filterRuns(body, count);
  drawCompared();
  [$("runs"), document.querySelector("#runs .scroll")].forEach((one, i) => { one.scrollTop = scrolled[i]; });
}

function drawRunRow(source, shown) {
  const tick = make("input", { type: "checkbox", checked: runs.ticked.has(source.name), "aria-label": `compare ${source.name}`, onchange: () => {
    if (tick.checked) runs.ticked.add(source.name);
    else runs.ticked.delete(source.name);
    drawCompared();
  } });
  const row = make("tr", { "data-run": source.name }, make("td", {}, tick), shown.map(([title, text, value]) => {
    const number = value ? value(source) : null;
    const cell = title === "run" ? make("button", { class: "quiet", title: "Show its episodes", onclick: () => showPart(source, whole(source)) }, text(source)) : text(source);
    return make(title === "run" ? "th" : "td", { class: value ? "" : "text", scope: title === "run" ? "row" : null, "data-sort": value ? (number === null ? UNKNOWN : Number(number)).toFixed(9) : text(source) }, cell, title === "95 % interval" ? bar(whole(source).success) : null);
  }));
  row.hay = COLUMNS.map(([, text]) => text(source)).join(" ").toLowerCase();
  return row;
}

function filterRuns(body, count) {
  const parts = runs.filter.toLowerCase().split(/\s+/).filter(Boolean);
  for (const row of body.rows) row.hidden = !parts.every((part) => row.hay.includes(part));
  const left = [...body.rows].filter((row) => !row.hidden).length;
  count.textContent = left === body.rows.length ? `${left} runs` : `${left} of ${body.rows.length} runs`;
  drawModels();
}

// Success of the runs in sight, in the order of the table, a chart for each panel, or environment with its keywords.
function drawModels() {
  const named = new Map(data.sources.map((one) => [one.name, one]));
  const groups = new Map();
  for (const row of document.querySelectorAll("#runs tr[data-run]")) {
    const source = named.get(row.dataset.run);
    if (row.hidden || !source || !whole(source).success) continue;
    const { panel, split, keywords } = source.settings;
    const title = [source.env.replaceAll("spear/", ""), ...(panel ? [panel] : [split, keywords])].filter(Boolean).join(" · ");
    groups.set(title, [...(groups.get(title) || []), source]);
  }
  $("models").replaceChildren(make("div", { class: "grid" }, [...groups].filter(([, found]) => found.length > 1).map(([title, found]) => {
    const labels = labelAll(found);
    return make("figure", { class: "chart models" }, make("figcaption", {}, title, make("span", { class: "soft" }, "  won %, 95 % interval")), found.map((source, place) =>
      make("div", { class: "model" }, make("span", { title: source.name }, labels[place]),
        bar(whole(source).success) || make("span"), make("b", {}, percent(whole(source).success.mean)))));
  })));
}

// Model and method of each run, and its name as well where another one has the same.
function labelAll(found) {
  const labels = found.map((one) => [modelOf(one), one.settings.method === "plain" ? "" : one.settings.method].filter(Boolean).join(" · "));
  const counts = new Map();
  for (const label of labels) counts.set(label, (counts.get(label) || 0) + 1);
  return found.map((one, place) => [labels[place], !labels[place] || counts.get(labels[place]) > 1 ? one.name : ""].filter(Boolean).join(" · "));
}

// The interval as a band and the mean as a mark in it.
function bar(success) {
  if (!success || success.ci95_low === null) return null;
  const svg = draw("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", class: "interval", role: "img", "aria-label": `${percent(success.mean)} %` });
  svg.append(draw("rect", { x: 0, y: 4, width: 100, height: 2, class: "axis" }),
    draw("rect", { x: 100 * success.ci95_low, y: 2, width: Math.max(1, 100 * (success.ci95_high - success.ci95_low)), height: 6, rx: 1, class: "band" }),
    draw("rect", { x: Math.min(98, 100 * success.mean), y: 0, width: 2, height: 10, class: "mean" }));
  return svg;
}

function showPart(source, part) {
  state.found = null;
  Object.assign(filters, { text: "", said: "", source: source.source, step: source.step === null ? "" : String(source.step), subtask: part.subtask ?? "", env: "", stop: "", won: "", low: "", high: "" });
  showView("episodes");
  buildFilters();
  applyFilters();
}

// ---------------------------------------------------------------- the ticked runs

function drawCompared() {
  const found = data.sources.filter((one) => runs.ticked.has(one.name));
  $("ticked").replaceChildren(found.length ? make("button", { onclick: () => $("compared").scrollIntoView({ block: "start" }) }, `${found.length} ticked ↓`) : "Tick runs to compare them.");
  const two = found.length === 2 && found.every((one) => one.step === null) ? found : null;
  $("compared").replaceChildren(...[found.length > 2 ? drawAcross(found) : null, ...(found.length > 2 ? [] : found.map(drawSource)), two ? drawPair(two) : null].filter(Boolean));
}

function drawSource(source) {
  const rows = source.parts.map((part) => make("tr", { class: part.subtask === null ? "whole" : "", tabIndex: 0, onclick: () => showPart(source, part), onkeydown: (event) => event.key === "Enter" && showPart(source, part) },
    make("th", { scope: "row" }, part.subtask ?? "all"), make("td", {}, part.success ? String(part.success.tasks) : "0"), make("td", {}, String(part.episodes)),
    make("td", {}, part.success ? percent(part.success.mean) : "–"), make("td", {}, interval(part.success)), make("td", {}, bar(part.success)),
    make("td", {}, percent(part.score)), make("td", {}, part.turns === null ? "–" : part.turns.toFixed(1)), make("td", {}, String(part.faults))));
  return make("section", { class: "source" }, make("h2", {}, source.name),
    make("div", { class: "chips" }, Object.entries(source.settings).map(([key, value]) => chip(words(key), value))),
    make("div", { class: "scroll" }, make("table", { class: "figures parts" }, make("thead", {}, make("tr", {}, ["subtask", "tasks", "episodes", "won %", "95 % interval", "", "score %", "turns", "faults"].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, rows))));
}

// Three runs or more: a column for each, a row for each subtask.
function drawAcross(found) {
  const subtasks = [...new Set(found.flatMap((one) => one.parts.map((part) => part.subtask)))];
  const row = (subtask) => make("tr", { class: subtask === null ? "whole" : "" }, make("th", { scope: "row" }, subtask ?? "all"), found.map((source) => {
    const part = source.parts.find((one) => one.subtask === subtask);
    if (!part || !part.success) return make("td", {}, "–");
    return make("td", {}, `${percent(part.success.mean)} `, make("span", { class: "soft" }, interval(part.success)), bar(part.success));
  }));
  return make("section", { class: "source", id: "across" }, make("h2", {}, "Side by side"), make("p", { class: "soft" }, "Won %, 95 % interval. Whether they differ by more than chance: spear compare."),
    make("div", { class: "scroll" }, make("table", { class: "figures" }, make("thead", {}, make("tr", {}, ["subtask", ...found.map((one) => one.name)].map((name) => make("th", { scope: "col" }, name)))), make("tbody", {}, subtasks.map(row)))));
}

function drawPair([a, b]) {
  const kinds = comparePair(a.source, b.source);
  const total = ORDER_OF_KINDS.reduce((sum, kind) => sum + kinds[kind].length, 0);
  return make("section", { class: "source", id: "pair" }, make("h2", {}, "Side by side"),
    make("div", { class: "chips" }, chip("A", a.name), chip("B", b.name), make("span", { class: "soft" }, `${total} episodes of the same task and seed. Whether they differ by more than chance: spear compare.`)),
    ORDER_OF_KINDS.map((kind) => make("details", { class: "kind", open: kind.startsWith("only") && kinds[kind].length < 60 },
      make("summary", {}, `Won by ${kind}: ${kinds[kind].length}`),
      make("ul", {}, kinds[kind].slice(0, 500).map(([one, other]) => make("li", {}, make("button", { class: "quiet", onclick: () => openPair(one, other).catch(showProblem) }, `${one.task}${one.seed === "0" ? "" : `, seed ${one.seed}`}`), make("span", { class: "soft" }, ` ${nameRow(one)}`)))))),
    make("div", { id: "beside" }));
}

function comparePair(first, second) {
  const kinds = Object.fromEntries(ORDER_OF_KINDS.map((kind) => [kind, []]));
  const key = (row) => [row.env.replace(/.*:/, ""), row.tasks, row.task, row.seed].join("\n"); // other tasks may have the same names
  const counted = (name) => state.rows.filter((row) => row.source === name && row.counts && row.step === null && row.stop !== "fault");
  const others = new Map(counted(second).map((row) => [key(row), row]));
  for (const a of counted(first)) {
    const b = others.get(key(a));
    if (b) kinds[a.won ? (b.won ? "both" : "only A") : b.won ? "only B" : "neither"].push([a, b]);
  }
  return kinds;
}

async function openPair(a, b) {
  const bodies = await Promise.all([loadBody(a.i), loadBody(b.i)]);
  const column = (body, row, name) => make("div", {}, make("h3", {}, `${name}: `, make("button", { class: "quiet", onclick: () => { showView("episodes"); openEpisode(row.i); } }, row.source)),
    make("div", { class: "chips" }, chip("", words(body.stop), body.stop === "won" ? "good" : "bad"), chip("score", short(body.score)), chip("turns", String(body.turns.length))), drawWhy(body.criteria), drawTurns(body));
  $("beside").replaceChildren(make("h2", {}, bodies[0].instruction), make("div", { class: "columns" }, column(bodies[0], a, "A"), column(bodies[1], b, "B")));
  for (const card of document.querySelectorAll("#beside .turn")) card.removeAttribute("id"); // those of the episode's own view are meant by their ids
  $("beside").scrollIntoView({ block: "start" });
}
