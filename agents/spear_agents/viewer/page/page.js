"use strict";
// Whatever a model or an environment wrote reaches the document as text only: through make(), never as markup.

const $ = (id) => document.getElementById(id);
const data = JSON.parse($("data").textContent);
const ROW = 62;
const state = { rows: [], shared: new Set(), shown: [], found: null, at: -1, turn: 0, body: null, colours: true, prompts: false, rich: true, view: "" };

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (key === "class") element.className = value;
    else if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key.includes("-") || key === "role") element.setAttribute(key, value);
    else element[key] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const signed = (value) => (value === null ? "–" : (value > 0 ? "+" : value < 0 ? "−" : "") + short(Math.abs(value)));
const short = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
const words = (text) => text.replaceAll("_", " ");

// ---------------------------------------------------------------- where the data is

async function ask(path, content) {
  const options = content === undefined ? {} : { method: "POST", body: JSON.stringify(content) };
  const reply = await fetch(path, { ...options, headers: { "X-Spear-Token": data.token } });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error || reply.statusText);
  return answer;
}

// A part of an exported page: an episode, or KaTeX.
async function unpack(id) {
  const bytes = Uint8Array.from(atob($(id).textContent), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const known = new Map();
async function loadBody(number) {
  if (known.has(number)) return known.get(number);
  const body = await (data.token ? ask(`/api/episode/${number}`) : unpack(`e${number}`));
  if (known.size > 50) known.delete(known.keys().next().value);
  known.set(number, body);
  return body;
}

// ---------------------------------------------------------------- the list

const filters = { text: "", said: "", source: "", env: "", step: "", subtask: "", stop: "", won: "", low: "", high: "", order: "file" };
const ORDERS = {
  file: ["as played", null],
  reward: ["best first", (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity)],
  worst: ["worst first", (a, b) => (a.reward ?? Infinity) - (b.reward ?? Infinity)],
  long: ["longest first", (a, b) => b.turns - a.turns],
  task: ["by task", (a, b) => (a.task < b.task ? -1 : a.task > b.task ? 1 : a.seed - b.seed)],
};

function buildFilters() {
  const change = (key) => (event) => { filters[key] = event.target.value; applyFilters(); };
  const choose = (key, label, wide) => {
    const present = state.rows.map((row) => row[key]).filter((value) => value !== null).map(String);
    // A value that no episode has may stand in an address: it is listed, so that it can be taken back.
    const values = [...new Set(filters[key] ? [...present, filters[key]] : present)].sort(key === "step" ? (a, b) => a - b : undefined);
    if (values.length < 2 && !filters[key]) return null;
    const named = values.map((value) => make("option", { value }, key === "stop" ? words(value) : key === "step" ? `Step ${value}` : value));
    const select = make("select", { class: wide, "aria-label": label, onchange: change(key) }, make("option", { value: "" }, label), named);
    select.value = filters[key];
    return select;
  };
  const number = (key, label) => make("input", { type: "number", step: "any", placeholder: label, value: filters[key], "aria-label": `reward, ${label}`, oninput: change(key) });
  const outcomes = [["", "All"], ["won", "Won"], ["lost", "Not won"]].map(([value, label]) =>
    make("button", { type: "button", "aria-pressed": String(value === filters.won), onclick: (event) => {
      filters.won = value;
      for (const other of event.target.parentNode.children) other.setAttribute("aria-pressed", String(other === event.target));
      applyFilters();
    } }, label));
  $("filters").replaceChildren(...[
    make("input", { id: "search", class: "wide", type: "search", placeholder: "Search tasks   /", value: filters.text, "aria-label": "Search tasks", oninput: change("text") }),
    make("input", { id: "said", class: "wide", type: "search", placeholder: "Search transcripts   \\", value: filters.said, "aria-label": "Search transcripts", oninput: (event) => { filters.said = event.target.value; searchSoon(); } }),
    choose("source", "All sources", "wide"), choose("env", "All environments", "wide"), choose("step", "All training steps", "wide"),
    make("div", { class: "pick", role: "group", "aria-label": "Outcome" }, outcomes),
    choose("subtask", "All subtasks"), choose("stop", "Any stop reason"),
    make("div", { class: "range" }, "Reward", number("low", "from"), "–", number("high", "to"),
      make("select", { "aria-label": "Order", onchange: change("order") }, Object.entries(ORDERS).map(([value, [label]]) => make("option", { value, selected: value === filters.order }, label)))),
  ].filter(Boolean));
  $("filters").onsubmit = (event) => event.preventDefault();
}

function applyFilters() {
  const parts = filters.text.toLowerCase().split(/\s+/).filter(Boolean);
  const low = filters.low === "" ? -Infinity : Number(filters.low);
  const high = filters.high === "" ? Infinity : Number(filters.high);
  const open = filters.low === "" && filters.high === "";
  state.shown = state.rows.filter((row) =>
    ["source", "env", "step", "subtask", "stop"].every((key) => !filters[key] || String(row[key]) === filters[key]) &&
    (!filters.won || row.won === (filters.won === "won")) && (!state.found || state.found.has(row.i)) &&
    (open || (row.reward !== null && row.reward >= low && row.reward <= high)) &&
    parts.every((part) => row.hay.includes(part)));
  if (ORDERS[filters.order][1]) state.shown.sort(ORDERS[filters.order][1]);
  const valid = state.shown.filter((row) => row.counts && row.stop !== "fault");
  const won = valid.filter((row) => row.won).length;
  $("count").textContent = `${state.shown.length.toLocaleString("en")} of ${state.rows.length.toLocaleString("en")} episodes` +
    (valid.length ? ` · ${((100 * won) / valid.length).toFixed(1)} % won` : "");
  $("rows").style.height = `${state.shown.length * ROW}px`;
  if (document.body.dataset.ready) writeAddress();
  drawRows();
  openShown();
}

// The open episode is one of the list. On a phone the list is shown until one is chosen.
function openShown() {
  if (state.view !== "episodes" || !document.body.dataset.ready || innerWidth <= 760) return;
  if (state.shown.length && !state.shown.some((row) => row.i === state.at)) openEpisode(state.shown[0].i);
}

// Only the rows in sight are in the document, however long the list is.
function drawRows() {
  const first = Math.max(0, Math.floor($("list").scrollTop / ROW) - 4);
  const last = Math.min(state.shown.length, first + Math.ceil($("list").clientHeight / ROW) + 9);
  const made = [];
  for (let place = first; place < last; place++) {
    const row = state.shown[place];
    const element = make("div", { class: row.counts ? "row" : "row earlier", role: "option", "aria-selected": String(row.i === state.at), onclick: () => openEpisode(row.i) },
      make("div", { class: "line" }, make("span", { class: `dot ${row.stop}`, title: words(row.stop) }),
        make("span", { class: "what" }, nameRow(row)), make("span", { class: "num" }, signed(row.reward))),
      make("div", { class: "line under" }, make("span", { class: "what" }, `${row.step === null ? "" : `${row.source} of step ${row.step} · `}${row.subtask} · ${row.task}${row.trial > 1 ? ` · trial ${row.trial}` : ""}${row.counts ? "" : " · played again later"}`), make("span", {}, `${row.turns} turn${row.turns === 1 ? "" : "s"}`)));
    element.style.top = `${place * ROW}px`;
    made.push(element);
  }
  $("rows").replaceChildren(...made);
}

function moveInList(step) {
  if (!state.shown.length) return;
  const now = state.shown.findIndex((row) => row.i === state.at);
  openEpisode(state.shown[now < 0 ? 0 : Math.min(state.shown.length - 1, Math.max(0, now + step))].i);
}

function bringIntoSight(number) {
  const place = state.shown.findIndex((row) => row.i === number);
  const list = $("list");
  if (place < 0) return;
  if (place * ROW < list.scrollTop) list.scrollTop = place * ROW;
  if ((place + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (place + 1) * ROW - list.clientHeight;
}

// ---------------------------------------------------------------- the address

// An episode is named by what it is of, so that a link holds when the run has grown or is opened elsewhere.
const NAMES = ["source", "task", "seed", "step", "trial"];
// The address that the page shows. Another one is the reader's, who typed it or followed a link, and is not overwritten.
let shownAddress = "";

function writeAddress() {
  if (location.hash !== shownAddress) return;
  const address = new URLSearchParams();
  const row = state.rows.find((one) => one.i === state.at);
  if (row) for (const key of NAMES) if ((row[key] ?? "") !== "" && (key !== "trial" || row.trial > 1)) address.set(key, row[key]);
  if (row && state.turn) address.set("turn", state.turn);
  for (const [key, value] of Object.entries(filters)) if (value && !(key === "order" && value === "file")) address.set(`f.${key}`, value);
  history.replaceState(null, "", `#${address}`);
  shownAddress = location.hash;
}

// The episode that an address names: the one that counts, where it was played more than once.
function findEpisode(address) {
  if (!address.has("task")) return undefined;
  const named = state.rows.filter((row) => NAMES.every((key) => !address.has(key) || String(row[key]) === address.get(key)));
  return named.filter((row) => row.counts).pop() || named.pop();
}

function readAddress() {
  if (location.hash === shownAddress) return;
  shownAddress = location.hash;
  if (VIEWS.includes(location.hash.slice(1))) return showView(location.hash.slice(1));
  showView("episodes");
  const address = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(filters)) filters[key] = address.get(`f.${key}`) || (key === "order" ? "file" : "");
  if (!ORDERS[filters.order]) filters.order = "file";
  buildFilters();
  state.found = null;
  applyFilters();
  if (filters.said) searchTranscripts().catch(showProblem);
  const row = findEpisode(address);
  if (row) openEpisode(row.i, Number(address.get("turn") || 0));
  else if (address.has("task")) {
    state.at = -1;
    $("detail").replaceChildren(make("p", { class: "empty" }, `No episode of ${address.get("task")} is in this run.`));
  }
}

// ---------------------------------------------------------------- one episode

async function openEpisode(number, turn = 0) {
  state.at = number;
  state.turn = turn;
  $("episodes").classList.add("reading");
  bringIntoSight(number);
  drawRows();
  try {
    const body = await loadBody(number);
    if (state.at !== number) return; // another one was asked for meanwhile
    state.body = body;
    drawEpisode();
    if (turn) goToTurn(turn);
    else $("detail").scrollTop = 0;
    writeAddress();
  } catch (error) {
    $("detail").replaceChildren(make("p", { class: "empty" }, `This episode cannot be shown: ${error.message}`));
  }
}

const chip = (label, value, kind = "") => make("span", { class: `chip ${kind}` }, label ? make("span", {}, label) : null, make("b", {}, value));

function drawEpisode() {
  const body = state.body;
  const place = state.rows.find((row) => row.i === state.at);
  const stopKind = body.stop === "won" ? "good" : body.stop === "fault" ? "warn" : "bad";
  const strip = make("div", { class: "strip" },
    body.turns.map((turn, i) => make("button", { class: turnKind(turn), title: turn.action || "unreadable", onclick: () => goToTurn(i + 1) }, String(i + 1))),
    make("div", { class: "tools" }, body.turns.some((turn) => turn.tokens) && toggle("colours", "Token colours", "t"),
      body.turns.some((turn) => turn.prompt) && toggle("prompts", "Prompts", "p"), [body.instruction, body.reflection, ...body.turns.flatMap((turn) => [turn.observation, turn.thought, turn.said])].some(isRich) && toggle("rich", "Markdown", "m")));
  $("detail").replaceChildren(make("div", { class: "inner" },
    make("button", { class: "back", onclick: closeEpisode }, "← Episodes"),
    make("div", { class: "head" },
      make("div", { class: "path" }, `${place && place.source ? `${place.source} · ` : ""}${body.env} · ${body.task} · seed ${body.seed}${body.step === null ? "" : ` · training step ${body.step}`}`),
      make("h2", {}, mathText(body.instruction) || body.instruction),
      make("div", { class: "chips" }, chip("", words(body.stop), stopKind), body.fault ? chip("fault", body.fault, "warn") : null,
        chip("subtask", body.subtask), chip("score", short(body.score)), chip("turns", String(body.turns.length)), chip("tool calls", String(body.tool_calls)), body.seconds === null ? null : chip("time", duration(body.seconds)), body.trial > 1 ? chip("trial", String(body.trial)) : null),
      make("div", { class: "chips" }, chip("reward", signed(body.reward), body.stop === "won" ? "good" : body.reward < 0 ? "bad" : ""),
        Object.entries(body.reward_terms).map(([name, value]) => chip(words(name), signed(value)))),
      drawWhy(body.criteria),
      body.detail ? make("div", { class: "note" }, body.detail) : null,
      body.notes.map((note) => make("div", { class: "note" }, note)),
      body.memory.map((text) => block("Remembered from an earlier trial", "seen", richText(text) || longText(text)))),
    strip, drawTurns(body),
    body.reflection === null ? null : block("Reflection after the episode", "seen", richText(body.reflection) || longText(body.reflection)), drawRaw(body)));
}

// What the task asked for, point by point: unmet ones first.
function drawWhy(criteria) {
  if (!criteria.length) return null;
  const rows = [...criteria].sort((a, b) => a.met - b.met).map((one) => make("tr", { class: one.met ? "met" : "unmet" },
    make("td", { "aria-label": one.met ? "met" : "not met" }, one.met ? "✓" : "✗"), make("th", { scope: "row" }, one.name), make("td", {}, one.found), make("td", {}, one.wanted)));
  const met = criteria.filter((one) => one.met).length;
  return make("details", { class: "why", open: met < criteria.length },
    make("summary", {}, "Why ", make("span", {}, `${met} of ${criteria.length} met`)),
    make("table", {}, make("tr", {}, ["", "", "found", "wanted"].map((name) => make("th", { scope: "col" }, name))), rows));
}

function drawTurns(body) {
  const first = new Map();
  body.turns.forEach((turn, i) => { if (!first.has(turn.anchor)) first.set(turn.anchor, i); });
  const cards = body.turns.map((turn, i) => drawTurn(body, turn, i, first.get(turn.anchor)));
  if (body.final_observation || body.final_image) {
    cards.push(make("section", { class: "turn final" }, make("div", { class: "top" }, make("b", {}, "End"), words(body.stop)),
      make("div", { class: "body" }, picture(body.final_image), make("div", { class: "words" }, block("Observation", "seen", seenText(body.final_observation))))));
  }
  return make("div", { class: "turns" }, cards);
}

const turnKind = (turn) => (turn.format_ok ? (turn.action_ok ? "" : "idle") : "broken");
const picture = (address) => (address && address.startsWith("data:image/png;base64,") ? make("img", { class: "picture", src: address, alt: "" }) : null);
const block = (label, kind, ...content) => make("div", { class: `block ${kind}` }, make("div", { class: "label" }, label, copyButton("Copy", () => content.flat().map((one) => one.source ?? one.innerText).join("\n"))), content);

function longText(text, limit = 3000) {
  const shown = make("pre", {}, text.length > limit ? text.slice(0, limit) : text || " ");
  if (text.length <= limit) return shown;
  const more = make("button", { class: "more", onclick: () => { shown.textContent = text; more.remove(); } }, `… ${(text.length - limit).toLocaleString("en")} more characters`);
  return make("div", {}, shown, more);
}

// WebShop's pages come as one line with a mark between the texts.
const seenText = (text) => (text.includes(" [SEP] ") ? make("div", { class: "pieces" }, text.split(" [SEP] ").map((piece) => make("span", {}, piece))) : mathText(text) || longText(text));

function drawTurn(body, turn, i, earlier) {
  const kind = turnKind(turn);
  const colour = make("i");
  const digest = hashText(turn.anchor);
  colour.style.background = `hsl(${digest % 360} 62% 55%)`;
  const said = state.colours && turn.tokens ? drawTokens(turn.tokens) : null;
  // The response is worth a block of its own where it says more than thought and action do.
  const bare = turn.said.replace(/<\/?\w+>/g, "").trim() === turn.action.trim();
  return make("section", { class: `turn${state.turn === i + 1 ? " here" : ""}`, id: `turn-${i + 1}` },
    make("div", { class: "top" }, make("b", {}, `Turn ${i + 1}`),
      turn.format_ok ? null : chip("", "malformed", "bad"), turn.action_ok ? null : chip("", "no effect", "warn"),
      turn.dropped ? chip("history without", `${turn.dropped} turns`, "warn") : null,
      turn.finish === "length" ? chip("", "cut at max tokens", "warn") : null,
      make("span", { class: "right" },
        make("span", { class: "anchor", title: `anchor ${turn.anchor}` }, colour, digest.toString(16).padStart(8, "0").slice(-6), earlier < i ? ` = turn ${earlier + 1}` : ""),
        turn.response_tokens === undefined ? null : make("span", {}, `${turn.prompt_tokens.toLocaleString("en")} → ${turn.response_tokens.toLocaleString("en")} ${turn.unit}`),
        turn.seconds === null ? null : make("span", { title: "wait for the response" }, duration(turn.seconds)),
        !turn.reward ? null : make("span", { title: "the benchmark's own reward of this turn" }, signed(turn.reward)))),
    make("div", { class: "body" }, picture(turn.image),
      make("div", { class: "words" },
        state.prompts && turn.prompt !== null && turn.prompt !== undefined ? block("Prompt", "prompt", longText(turn.prompt, 20000)) : null,
        block("Observation", "seen", seenText(turn.observation)),
        said ? block("Response", "", said) : [
          turn.thought ? block("Thought", "", make("div", { class: "thought" }, richText(turn.thought) || turn.thought)) : null,
          bare ? null : block("Response", "", richText(turn.said) || longText(turn.said))],
        make("div", { class: `act ${kind}` }, make("span", { class: "arrow" }, "→"), make("pre", {}, turn.action || "nothing: the response could not be read")))));
}

// Plain is a token the policy was sure of; the stronger the colour, the less probable it was.
function drawTokens(pieces) {
  return make("div", { class: "tokens mono" }, pieces.map(([text, logProb]) => {
    const token = make("span", { "data-tip": logProb === null ? "log-probability is not a number" : `p ${Math.exp(logProb).toPrecision(3)}   log p ${logProb}` }, text);
    token.style.background = `rgb(var(--heat) / ${logProb === null ? 1 : (0.72 * (1 - Math.exp(logProb))).toFixed(3)})`;
    return token;
  }));
}

// FNV-1a: anchors may be long, and a short name with a colour is enough to see that two are the same.
function hashText(text) {
  let hash = 0x811c9dc5;
  for (let i = 0; i < text.length; i++) hash = Math.imul(hash ^ text.charCodeAt(i), 0x01000193) >>> 0;
  return hash;
}

function toggle(key, label, letter) {
  return make("button", { title: `${label} (${letter})`, "aria-pressed": String(state[key]), onclick: () => flip(key) }, label);
}

function flip(key) {
  state[key] = !state[key];
  if (!state.body) return;
  const scroll = $("detail").scrollTop;
  drawEpisode();
  $("detail").scrollTop = scroll;
}

function goToTurn(turn) {
  if (!state.body || !state.body.turns.length) return;
  state.turn = Math.min(state.body.turns.length, Math.max(1, turn));
  for (const card of document.querySelectorAll("#detail .turn")) card.classList.toggle("here", card.id === `turn-${state.turn}`);
  document.querySelectorAll("#detail .strip > button").forEach((button, i) => button.setAttribute("aria-current", String(i + 1 === state.turn)));
  const card = $(`turn-${state.turn}`);
  card.scrollIntoView({ block: "start" });
  const strip = document.querySelector("#detail .strip"); // stays at the top, over what is scrolled
  $("detail").scrollTop += card.getBoundingClientRect().top - strip.getBoundingClientRect().bottom;
  strip.children[state.turn - 1].scrollIntoView({ block: "nearest", inline: "nearest" });
  writeAddress();
}

function closeEpisode() {
  $("episodes").classList.remove("reading");
  drawRows();
}

// ---------------------------------------------------------------- keys, tabs, theme

const KEYS = [
  ["j", "k", "next and previous episode (also ↓ ↑)"], ["l", "h", "next and previous turn (also → ←)"], ["g", "G", "first and last episode"],
  ["/", "\\", "search tasks, transcripts"], ["t", "", "token colours: plain is sure, strong is improbable"], ["p", "", "prompts"], ["m", "", "Markdown and LaTeX, or the text as it was written"], ["o", "e", "runs, episodes"], ["c", "", "curves"], ["r", "", "read the run again"], ["Esc", "", "back"], ["?", "", "this help"],
];
const PLAY_KEYS = [["←", "↑", "move, where these are the actions (also → ↓)"], ["i", "", "hint"], ["u", "", "undo"], ["n", "", "next task, after the end"]];
const ACTIONS = {
  j: () => moveInList(1), ArrowDown: () => moveInList(1), k: () => moveInList(-1), ArrowUp: () => moveInList(-1),
  l: () => goToTurn(state.turn + 1), ArrowRight: () => goToTurn(state.turn + 1), h: () => goToTurn(state.turn - 1), ArrowLeft: () => goToTurn(state.turn - 1),
  g: () => moveInList(-state.shown.length), G: () => moveInList(state.shown.length), m: () => flip("rich"), t: () => flip("colours"), p: () => flip("prompts"),
  "/": () => $("search").focus(), "\\": () => $("said").focus(), Escape: closeEpisode,
};

const TYPED = "input:not([type=checkbox]), textarea, select";

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = event.target.matches(TYPED);
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const everywhere = { "?": showHelp, o: () => showView("runs"), e: () => showView("episodes"), c: () => showView("curves"), r: () => reload().catch(showProblem) };
  const action = everywhere[event.key] || (state.view === "episodes" ? ACTIONS[event.key] : state.view === "runs" && event.key === "/" ? () => $("runs-filter").focus() : state.view === "play" ? playKey(event.key) : null);
  if (!action) return;
  event.preventDefault();
  action();
}

function showHelp() {
  $("help").replaceChildren(make("h2", {}, "Keys"), make("dl", {}, [...KEYS, ...(data.play ? PLAY_KEYS : [])].map(([one, two, what]) =>
    [make("dt", {}, make("kbd", {}, one), two ? " " : null, two ? make("kbd", {}, two) : null), make("dd", {}, what)])),
    make("button", { onclick: () => $("help").close() }, "Close"));
  $("help").showModal();
}

const VIEWS = ["runs", "episodes", "curves", "play"];

function showView(name) {
  const views = VIEWS.filter((view) => ({ runs: state.rows.length && data.sources.length, episodes: state.rows.length || data.play, curves: data.trainings.length, play: data.play })[view]);
  if (!views.includes(name)) return;
  state.view = name;
  for (const view of VIEWS) $(view).hidden = view !== name;
  $("tabs").replaceChildren(...(views.length > 1 ? views : []).map((view) =>
    make("button", { role: "tab", "aria-selected": String(view === name), onclick: () => showView(view) }, view[0].toUpperCase() + view.slice(1))));
  if (name === "episodes") {
    drawRows();
    openShown();
  }
  if (name === "runs" && !runs.drawn) drawRuns();
  if (name === "curves" && !$("curves").children.length) drawCurves();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
}

// An instruction that all tasks share says nothing: then the task itself.
function nameRow(row) {
  return (state.shared.has(row.env) ? row.task.replace(/^[^/]*\//, "") : row.instruction) || row.task;
}

function takeRows(rows) {
  const told = new Map();
  for (const row of rows) told.set(row.env, (told.get(row.env) || new Map()).set(row.task, row.instruction));
  state.shared = new Set([...told].filter(([, tasks]) => tasks.size > 3 && new Set(tasks.values()).size === 1).map(([env]) => env));
  for (const row of rows) row.hay = `${row.task} ${row.subtask} ${row.instruction}`.toLowerCase();
  state.rows = rows;
  applyFilters();
}

async function reload() {
  if (!data.token) return;
  Object.assign(data, await ask("/api/run"));
  known.clear();
  const open = state.rows.find((row) => row.i === state.at);
  const same = (row) => row && NAMES.every((key) => row[key] === open[key]);
  if (open && !same(data.episodes[open.i])) state.at = data.episodes.findIndex(same); // a file before its own has gone
  $("curves").replaceChildren();
  runs.drawn = false;
  state.rows = data.episodes;
  buildFilters();
  takeRows(data.episodes);
  if (filters.said) await searchTranscripts();
  showView(state.view || firstView());
}

// None while nothing has been played or measured.
const firstView = () => (data.play ? "play" : data.sources.length > 1 ? "runs" : state.rows.length ? "episodes" : data.trainings.length ? "curves" : "");

function showTip(event) {
  const text = event.target.dataset ? event.target.dataset.tip : undefined;
  if ($("tip")) $("tip").remove();
  if (text === undefined) return;
  const tip = make("div", { id: "tip" }, text);
  document.body.append(tip);
  const box = event.target.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(box.left, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${box.top - tip.offsetHeight - 5 < 0 ? box.bottom + 5 : box.top - tip.offsetHeight - 5}px`;
}

async function start() {
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  $("help-button").onclick = showHelp;
  document.addEventListener("keydown", onKey);
  document.addEventListener("mouseover", showTip);
  $("list").addEventListener("scroll", () => requestAnimationFrame(drawRows), { passive: true });
  addEventListener("resize", drawRows);
  if (data.token) {
    try {
      Object.assign(data, await ask("/api/run"));
    } catch (error) { // a damaged file of the run: read again as soon as it is mended
      Object.assign(data, { episodes: [], sources: [], trainings: [], panels: [], mark: "" });
      showProblem(error);
    }
  }
  $("title").textContent = data.title;
  state.rows = data.episodes;
  buildFilters();
  $("detail").replaceChildren(make("p", { class: "empty" }, "Choose an episode: ", make("kbd", {}, "j"), " is the first, ", make("kbd", {}, "?"), " shows all keys."));
  showView(firstView());
  takeRows(data.episodes);
  if (data.play) startPlay();
  addEventListener("hashchange", readAddress);
  if (location.hash) readAddress();
  if (data.token) setInterval(watchRun, 1000 * LIVE_SECONDS);
  document.body.dataset.ready = "true";
  if (state.at === -1 && !new URLSearchParams(location.hash.slice(1)).has("task")) openShown();
}
