"use strict";
// Search within transcripts, what can be copied, and taking up what a run has written since. Uses make() and state of page.js.

const LIVE_SECONDS = 4;

// Episodes in which a response, an observation or a reflection has all the words; null where nothing is asked for.
async function searchTranscripts() {
  const text = filters.said.trim();
  let found = null;
  if (text && data.token) found = new Set((await ask("/api/search", { text })).episodes);
  else if (text) {
    const parts = text.toLowerCase().split(/\s+/);
    found = new Set();
    for (const row of state.rows) {
      const said = transcript(await unpack(`e${row.i}`)).toLowerCase();
      if (parts.every((part) => said.includes(part))) found.add(row.i);
    }
  }
  if (text !== filters.said.trim()) return; // something else is asked for meanwhile
  state.found = found;
  applyFilters();
}

// As one types, after a pause: a server reads all episodes.
let pause = 0;
function searchSoon() {
  clearTimeout(pause);
  pause = setTimeout(() => searchTranscripts().catch(showProblem), 300);
}

const transcript = (body) => [...body.turns.flatMap((turn) => [turn.observation, turn.thought, turn.said]), body.final_observation, body.reflection].join("\n");

function copyButton(label, read) {
  const button = make("button", { class: "copy", type: "button", title: "Copy", onclick: async () => {
    await navigator.clipboard.writeText(read());
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = label; }, 1500);
  } }, label);
  return button;
}

// The episode as JSON, without the pictures, which are drawn for the page.
function drawRaw(body) {
  const text = JSON.stringify(body, (key, value) => (key === "image" || key === "final_image" ? undefined : value), 2);
  return make("details", { class: "raw" }, make("summary", {}, "JSON"), copyButton("Copy JSON", () => text), longText(text, 20000));
}

// A TypeError is a server that was stopped: what is on the page stays.
function showProblem(error) {
  if (!(error instanceof TypeError)) $("progress").textContent = error.message;
}

async function watchRun() {
  if (document.hidden || $("help").open || document.activeElement.matches(TYPED)) return;
  try {
    const { mark, progress } = await ask("/api/mark");
    if (mark !== data.mark) await reload();
    $("progress").textContent = progress.join(" · ");
  } catch (error) { showProblem(error); }
}
