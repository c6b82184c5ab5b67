"use strict";
// Metrics of trainings as small charts. Uses make() and data of page.js.

const SVG = "http://www.w3.org/2000/svg";
const SMOOTH = 5; // steps; the success of one step swings with the luck of its tasks
const LARGEST = 1e300; // an axis reaches twice as far
const SMALLEST = 1e-300; // a tenth of it still has a tenth
const LARGE = { width: 360, height: 190, left: 40, right: 8, top: 8, bottom: 20 };
const SMALL = { ...LARGE, width: 240, height: 120 };

function draw(tag, attributes, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const trainings = { left: new Set() };
const COLOURS = 8;

// One training has a chart for each panel; several have one for each metric, with a line for each training.
function drawCurves() {
  const chosen = data.trainings.filter((one) => !trainings.left.has(one.name));
  const boxes = data.trainings.length < 2 ? null : make("div", { class: "chips", id: "trainings" }, data.trainings.map((training, i) => {
    const mark = make("i");
    mark.style.background = `var(--c${i % COLOURS})`;
    return make("label", { class: "chip" }, make("input", { type: "checkbox", checked: !trainings.left.has(training.name), onchange: (event) => {
      trainings.left[event.target.checked ? "delete" : "add"](training.name);
      drawCurves();
    } }), mark, make("b", {}, training.name));
  }));
  $("curves").replaceChildren(make("section", { class: "inner" }, boxes, chosen.length ? drawTrainings(chosen) : null));
}

function drawTrainings(chosen) {
  const known = new Set(chosen.flatMap((training) => Object.keys(training.metrics)));
  const named = new Set(data.panels.flatMap((panel) => panel.series.map(([key]) => key)));
  const panels = data.panels.map((panel) => ({ ...panel, series: panel.series.filter(([key]) => known.has(key)) })).filter((panel) => panel.series.length);
  const others = [...known].filter((key) => !named.has(key)).sort();
  const grid = make("div", { class: "grid small" });
  const fill = (text) => grid.replaceChildren(...others.filter((key) => key.includes(text)).map((key) => drawMetric(chosen, key, key, SMALL)));
  const search = make("input", { type: "search", placeholder: `Filter ${others.length} more metrics`, "aria-label": "Filter metrics", oninput: (event) => fill(event.target.value) });
  fill("");
  const last = chosen.reduce((most, training) => Math.max(most, training.steps[training.steps.length - 1]), 0);
  const count = chosen.reduce((sum, training) => sum + training.steps.length, 0);
  return [
    make("h2", {}, chosen.length === 1 ? chosen[0].name : `${chosen.length} trainings`, make("small", {}, `${count} records to step ${last}`)),
    make("div", { class: "grid" }, chosen.length === 1
      ? panels.map((panel) => drawChart(panel.title, panel.series.map(([key, label], i) => readLine(chosen[0], key, label, i)), LARGE))
      : panels.flatMap((panel) => panel.series.map(([key, label]) => drawMetric(chosen, key, `${panel.title}: ${label}`, LARGE)))),
    others.length ? make("h2", {}, "All other metrics", search) : null, grid];
}

function readLine(training, key, label, colour) {
  const points = (training.metrics[key] || []).map((value, at) => [training.steps[at], value]).filter(([, value]) => value !== null && Math.abs(value) < LARGEST);
  return { label, points, steps: training.steps, colour: `var(--c${colour % COLOURS})`, smooth: key === "success/all" };
}

function drawMetric(chosen, key, title, frame) {
  if (chosen.length === 1) return drawChart(title, [readLine(chosen[0], key, "", 0)], frame);
  const lines = chosen.filter((training) => key in training.metrics).map((training) => readLine(training, key, training.name, data.trainings.indexOf(training)));
  return drawChart(title, lines, frame);
}

function drawChart(title, lines, frame) {
  const steps = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const all = lines.flatMap((line) => line.points);
  const [x0, x1] = extent(steps);
  let [y0, y1] = extent(all.map(([, value]) => value));
  if (y0 > 0 && y0 < 0.5 * y1) y0 = 0;
  const size = Math.max(Math.abs(y0), Math.abs(y1));
  if (y1 - y0 <= 1e-9 * size || size < SMALLEST) [y0, y1] = size < SMALLEST ? [0, 1] : [Math.min(0, 2 * y0), Math.max(0, 2 * y0)];
  const ticks = findTicks(y0, y1);
  y0 = Math.min(y0, ticks[0]);
  y1 = Math.max(y1, ticks[ticks.length - 1]);
  const x = (step) => frame.left + ((step - x0) / (x1 - x0 || 1)) * (frame.width - frame.left - frame.right);
  const y = (value) => frame.height - frame.bottom - ((value - y0) / (y1 - y0)) * (frame.height - frame.top - frame.bottom);
  const svg = draw("svg", { viewBox: `0 0 ${frame.width} ${frame.height}`, role: "img", "aria-label": title });
  for (const tick of ticks) {
    svg.append(draw("line", { class: "axis", x1: frame.left, x2: frame.width - frame.right, y1: y(tick), y2: y(tick) }),
      draw("text", { x: frame.left - 5, y: y(tick) + 3.5, "text-anchor": "end" }, tickText(tick)));
  }
  for (const [step, anchor] of [[x0, "start"], [x1, "end"]]) svg.append(draw("text", { x: x(step), y: frame.height - 5, "text-anchor": anchor }, String(step)));
  for (const line of lines) {
    const path = (points, kind) => { // as a style, since an attribute cannot hold a custom property
      const element = draw("path", { class: kind, d: points.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("") });
      element.style.stroke = line.colour;
      svg.append(element);
    };
    path(line.points, line.smooth ? "faint" : "");
    if (line.smooth) path(smooth(line.points), "");
    if (line.points.length < 30 && !line.smooth) for (const [step, value] of line.points) {
      const dot = draw("circle", { cx: x(step), cy: y(value), r: 2 });
      dot.style.fill = line.colour;
      svg.append(dot);
    }
  }
  const cursor = draw("line", { class: "cursor", y1: frame.top, y2: frame.height - frame.bottom, visibility: "hidden" });
  svg.append(cursor);
  const legend = make("div", { class: "legend" });
  const tell = (step) => legend.replaceChildren(...lines.map((line) => {
    const known = line.points.filter(([at]) => step === null || at <= step);
    const mark = make("i");
    mark.style.background = line.colour;
    return make("span", {}, line.label ? mark : null, line.label, " ", make("b", {}, known.length ? short(known[known.length - 1][1]) : "–"));
  }), ...(step === null ? [] : [make("span", {}, `step ${step}`)]));
  tell(null);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = x0 + ((((event.clientX - box.left) / box.width) * frame.width - frame.left) / (frame.width - frame.left - frame.right)) * (x1 - x0);
    const step = steps.reduce((best, at) => (Math.abs(at - wanted) < Math.abs(best - wanted) ? at : best));
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    cursor.setAttribute("visibility", "visible");
    tell(step);
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); tell(null); });
  return make("figure", { class: "chart" }, make("figcaption", {}, title), svg, legend);
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return low > high ? [0, 1] : [low, high];
}

function findTicks(low, high) {
  const rough = (high - low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= rough) || 10 * power;
  const ticks = [];
  for (let i = Math.floor(low / step + 1e-9); i * step <= high + step * 1e-6; i++) ticks.push(i * step);
  return ticks;
}

function tickText(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(2)).toExponential();
  if (size >= 1e4) return `${short(value / 1000)}k`;
  return short(value);
}

function smooth(points) {
  return points.map(([step], i) => {
    const window = points.slice(Math.max(0, i - SMOOTH + 1), i + 1);
    return [step, window.reduce((sum, [, value]) => sum + value, 0) / window.length];
  });
}
