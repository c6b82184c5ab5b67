"use strict";
// The stage of `spear play --browser`. Uses make(), ask() and drawTurns() of page.js.

const game = { now: null, hint: "", thought: "", draft: "", last: Promise.resolve() };
const ARROWS = { ArrowUp: "up", ArrowDown: "down", ArrowLeft: "left", ArrowRight: "right" };
const LISTED = 300; // buttons for actions; more of them are found by typing

async function startPlay() {
  await perform("look");
}

// One after the other: two quick keys must not overtake each other on the way.
function perform(verb, content = {}) {
  game.last = game.last.then(() => performNow(verb, content)).catch(showProblem);
  return game.last;
}

async function performNow(verb, content) {
  const before = game.now ? game.now.recorded : 0;
  let problem = "";
  try {
    const { hint, ...now } = await ask(`/api/play/${verb}`, content);
    game.hint = hint === null ? "" : hint || "The expert knows nothing that wins from here.";
    game.now = now;
    if (verb === "act") game.draft = game.thought = "";
  } catch (error) {
    problem = error.message;
  }
  drawStage(problem);
  if (game.now && game.now.recorded > before) {
    Object.assign(data, await ask("/api/run"));
    known.clear();
    takeRows(data.episodes);
  }
}

function drawStage(problem) {
  const now = game.now;
  if (!now) {
    $("play").replaceChildren(make("p", { class: "empty" }, problem));
    return;
  }
  const options = make("div", { class: "options" });
  const fill = () => options.replaceChildren(...matching().slice(0, LISTED).map((action, i) =>
    make("button", { class: i === 0 && game.draft ? "chosen" : "", onclick: () => perform("act", { action, thought: game.thought }) }, action)));
  const input = make("textarea", { id: "action", rows: 1, value: game.draft, placeholder: now.actions.length ? "Action: Tab completes, Enter plays" : "Action: Shift+Enter breaks the line",
    "aria-label": "Action", oninput: () => { game.draft = input.value; input.rows = Math.min(12, input.value.split("\n").length); fill(); }, onkeydown: (event) => typeAction(event, input, fill) });
  const thought = make("textarea", { rows: 1, value: game.thought, placeholder: "Thought (optional, recorded)", "aria-label": "Thought", oninput: () => { game.thought = thought.value; } });
  const button = (label, verb, main) => make("button", { class: main ? "main" : "", disabled: verb === "undo" && (now.done || !now.turns.length), onclick: () => perform(verb) }, label);
  fill();
  $("play").replaceChildren(make("div", { class: "inner" },
    make("div", { class: "head" }, make("div", { class: "path" }, `${now.env} · ${now.task}`), make("h2", {}, now.instruction),
      make("div", { class: "chips" }, chip("turn", `${now.turn} of ${now.max_turns}`), chip("subtask", now.subtask),
        Object.entries(now.reward_terms).map(([name, value]) => chip(words(name), signed(value))))),
    problem ? make("div", { class: "note" }, problem) : null,
    make("div", { class: "stage" }, picture(now.image), make("div", { class: "words" },
      block("Observation", "seen", make("pre", {}, now.observation || " ")),
      now.done ? verdict(now) : [thought, input, options],
      game.hint ? make("div", { class: "note" }, "Hint: ", make("span", { class: "mono" }, game.hint)) : null,
      make("div", { class: "buttons" }, now.done ? button("Next task (n)", "next", true) : button("Hint (i)", "hint"),
        now.done ? null : button("Undo (u)", "undo"), button("Restart", "restart"), now.done ? null : button("Next task", "next")))),
    drawTurns({ turns: now.turns, final_observation: "", final_image: null })));
  if (!now.done && !isBoard()) input.focus({ preventScroll: true });
}

function verdict(now) {
  return make("div", { class: "chips" }, now.fault ? chip("fault", now.fault, "warn") : chip("", now.won ? "won" : "not won", now.won ? "good" : "bad"),
    chip("score", short(now.score)), chip("reward", signed(now.reward)), chip("", now.fault ? "not recorded" : "recorded: see Episodes"));
}

function matching() {
  const text = game.draft.toLowerCase();
  const begins = game.now.actions.filter((action) => action.toLowerCase().startsWith(text));
  return begins.length ? begins : game.now.actions.filter((action) => action.toLowerCase().includes(text));
}

const isBoard = () => game.now.actions.length > 0 && game.now.actions.every((action) => Object.values(ARROWS).includes(action));

function typeAction(event, input, fill) {
  if (event.key === "Tab" && !event.shiftKey && game.draft && matching().length) {
    event.preventDefault();
    input.value = game.draft = matching()[0];
    fill();
  } else if (event.key === "Enter" && !event.shiftKey && input.value.trim()) {
    event.preventDefault();
    perform("act", { action: input.value.trim(), thought: game.thought });
  }
}

function playKey(key) {
  if (!game.now) return null;
  if (!game.now.done && isBoard() && ARROWS[key]) return () => perform("act", { action: ARROWS[key], thought: game.thought });
  if (key === "u" && !game.now.done && game.now.turns.length) return () => perform("undo");
  if (key === "n" && game.now.done) return () => perform("next");
  if (key === "i" && !game.now.done) return () => perform("hint");
  return null;
}
