"use strict";

const SVG = "http://www.w3.org/2000/svg";
const groups = JSON.parse(document.getElementById("data").textContent);

// ---- Drawing -------------------------------------------------------------------------------------------------------

function draw(parent, name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  parent.append(node);
  return node;
}

function canvas(plot, height) {
  const width = plot.clientWidth;
  plot.replaceChildren();
  const svg = draw(plot, "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", plot.previousElementSibling.textContent);
  return { svg, width, height };
}

// A link to a method's row, with what it says on hover.
function rowLink(parent, one, title) {
  const link = draw(parent, "a", { href: `#row-${one.row}`, "data-row": one.row });
  draw(link, "title", {}, title);
  return link;
}

const colour = (method) => `var(--${method}, var(--ink))`;
const measure = document.createElement("canvas").getContext("2d");

function textWidth(text) {
  measure.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  return measure.measureText(text).width;
}

// Round values of a scale between two bounds, about `count` of them, and the decimals that they need.
function ticks(low, high, count) {
  // Values that differ in their last bits only have no steps between them that numbers could count.
  const raw = Math.max((high - low) / count, Math.max(Math.abs(low), Math.abs(high)) * 1e-9) || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((candidate) => candidate >= raw * 0.75);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const values = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high + step * 1e-6; number++) values.push(number * step);
  return { values, step, shown: (value) => value.toFixed(decimals) };
}

const scale = (low, high, from, to) => (value) => from + ((value - low) / (high - low || 1)) * (to - from);

// The rules and the scales of a chart with two axes, and what each is of.
function frame({ svg, height }, box, { x, y, xTicks, yTicks, below, above }) {
  for (const value of yTicks.values) {
    draw(svg, "line", { class: value ? "rule" : "base", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
    draw(svg, "text", { class: "axis", x: box.left - 8, y: y(value) + 4, "text-anchor": "end" }, yTicks.shown(value));
  }
  for (const value of xTicks.values) {
    draw(svg, "text", { class: "axis", x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, xTicks.shown(value));
  }
  draw(svg, "text", { class: "axis", x: 0, y: 14 }, above);
  draw(svg, "text", { class: "axis", x: box.right, y: height - 4, "text-anchor": "end" }, below);
}

// ---- Speed against memory ------------------------------------------------------------------------------------------

function drawMemory(plot, group) {
  const chart = canvas(plot, 320);
  const { svg, width, height } = chart;
  const box = { left: 44, right: width - 12, top: 30, bottom: height - 40 };
  const gib = Math.max(...group.methods.map((one) => one.gib)) * 1.08;
  const seconds = Math.max(...group.methods.map((one) => one.seconds)) * 1.08;
  const x = scale(0, gib, box.left, box.right), y = scale(0, seconds, box.bottom, box.top);
  const xTicks = ticks(0, gib, width < 420 ? 4 : 6), yTicks = ticks(0, seconds, 5);
  frame(chart, box, { x, y, xTicks, yTicks, below: group.memory, above: "seconds a step (lower left is better)" });

  const points = group.methods.map((one) => ({ one, x: x(one.gib), y: y(one.seconds) }));
  const taken = points.map((point) => [point.x - 6, point.y - 6, point.x + 6, point.y + 6]);
  for (const point of points) {
    const { one } = point;
    const link = rowLink(svg, one, `${one.label}: ${one.shown} s/step, ${one.gib.toFixed(2)} ${group.memory}`);
    draw(link, "circle", { class: "point", cx: point.x, cy: point.y, r: 4.5, fill: colour(one.method) });
    label(link, point, taken, box);
  }
}

// Write a point's label at the nearest free place around it, with a line to it if that is not beside it.
// Rectangles are [left, top, right, bottom]; `taken` are those of points and of labels so far.
function label(link, point, taken, box) {
  const width = textWidth(point.one.label);
  const clear = (rect) =>
    rect[0] >= 0 && rect[2] <= box.right + 10 && rect[1] >= box.top - 12 && rect[3] <= box.bottom &&
    !taken.some((other) => rect[0] < other[2] && rect[2] > other[0] && rect[1] < other[3] && rect[3] > other[1]);
  for (const far of [0, 18, 34, 50, 66, 84, 104, 126]) {
    for (const [dx, dy] of [[1, 0], [-1, 0], [0.3, -1], [-0.3, -1], [0.3, 1], [-0.3, 1], [1, -1], [1, 1], [-1, -1], [-1, 1]]) {
      if (far && !dy) continue;
      const left = point.x + (dy && Math.abs(dx) < 1 ? dx * 30 - width / 2 : dx > 0 ? 9 : -9 - width);
      const base = point.y + 4 + dy * (far || 16);
      const rect = [left - 2, base - 11, left + width + 3, base + 4];
      if (!clear(rect)) continue;
      taken.push(rect);
      draw(link, "text", { x: left, y: base }, point.one.label);
      if (far) {
        const end = { x: Math.min(Math.max(point.x, left), left + width), y: dy < 0 ? base + 4 : base - 11 };
        draw(link, "line", { class: "leader", x1: point.x, y1: point.y + dy * 5, x2: end.x, y2: end.y });
      }
      return;
    }
  }
  draw(link, "text", { x: Math.max(0, Math.min(point.x + 9, box.right - width)), y: point.y + 4 }, point.one.label);
}

// ---- Every counted step --------------------------------------------------------------------------------------------

function drawSpread(plot, group) {
  const narrow = plot.clientWidth < 560;
  const passHeight = 9;
  const rowHeight = (one) => one.passes.length * passHeight + 12 + (narrow ? 18 : 0);
  const methods = [...group.methods].sort((a, b) => a.seconds - b.seconds);
  const { svg, width, height } = canvas(plot, methods.reduce((sum, one) => sum + rowHeight(one), 46));
  const names = narrow ? 0 : Math.max(...methods.map((one) => textWidth(one.label))) + 16;
  const box = { left: names + 10, right: width - (narrow ? 10 : 130) };

  // Time is shown in percent of the method's own figure, so that a slow method's spread reads like a fast one's.
  const off = (one, seconds) => (seconds / one.seconds - 1) * 100;
  const all = methods.flatMap((one) => one.passes.flat().map((seconds) => Math.abs(off(one, seconds)))).sort((a, b) => a - b);
  const limit = Math.max(1, all[Math.floor(0.95 * (all.length - 1))] * 1.15);
  const xTicks = ticks(-limit, limit, narrow ? 4 : 8);
  const x = scale(-limit, limit, box.left, box.right);
  for (const value of xTicks.values) {
    const at = x(value);
    draw(svg, "line", { class: Math.abs(value) < 1e-9 ? "base" : "rule", x1: at, x2: at, y1: 8, y2: height - 36 });
    const shown = `${value > 1e-9 ? "+" : ""}${xTicks.shown(Math.abs(value) < 1e-9 ? 0 : value)}`;
    draw(svg, "text", { class: "axis", x: at, y: height - 22, "text-anchor": "middle" }, shown);
  }
  draw(svg, "text", { class: "axis", x: box.right, y: height - 4, "text-anchor": "end" }, "% from the method's median");

  let top = 10;
  for (const one of methods) {
    const link = rowLink(svg, one, `${one.label}: ${one.shown} s/step`);
    const middle = top + (narrow ? 18 : 0) + (one.passes.length * passHeight) / 2 + 2;
    const base = narrow ? top + 12 : middle + 4;
    draw(link, "text", { x: 0, y: base }, one.label);
    draw(link, "text", { x: width, y: base, "text-anchor": "end" }, `${one.shown} s`);
    one.passes.forEach((seconds, number) => {
      const y = middle + (number - (one.passes.length - 1) / 2) * passHeight;
      for (const value of seconds) step(link, one, off(one, value), limit, x, y, box);
      const at = Math.max(-limit, Math.min(limit, off(one, one.medians[number])));
      draw(link, "circle", { class: "pass", cx: x(at), cy: y, r: 3.5, fill: colour(one.method) });
    });
    top += rowHeight(one);
  }
}

// A tick for a step; an arrow at the edge, with its value on hover, for one that is far off.
function step(link, one, percent, limit, x, y, box) {
  const stroke = colour(one.method);
  if (Math.abs(percent) <= limit) {
    draw(link, "line", { class: "step", x1: x(percent), x2: x(percent), y1: y - 3.5, y2: y + 3.5, stroke });
    return;
  }
  const side = Math.sign(percent), edge = side > 0 ? box.right : box.left;
  const arrow = draw(link, "path", { class: "step", d: `M${edge},${y - 3} l${side * 5},3 l${-side * 5},3`, stroke, fill: "none" });
  draw(arrow, "title", {}, `${one.label}: a step ${percent > 0 ? "+" : ""}${percent.toFixed(0)} %`);
}

// ---- Losses --------------------------------------------------------------------------------------------------------

function drawLosses(plot, group) {
  const curves = distinctCurves(group.methods);
  if (!curves.length) {
    plot.textContent = "No method computes a loss.";
    return;
  }
  const widest = Math.max(...group.methods.map((one) => textWidth(one.label)));
  const beside = plot.clientWidth > 420;
  const chart = canvas(plot, 320);
  const { svg, width, height } = chart;
  const box = { left: 44, right: width - (beside ? widest + 30 : 10), top: 30, bottom: height - 40 };
  const flat = curves.flatMap((curve) => curve.losses);
  const low = Math.min(...flat), high = Math.max(...flat), pad = (high - low) * 0.06 || 0.5;
  const steps = Math.max(...curves.map((curve) => curve.losses.length));
  const x = scale(1, Math.max(2, steps), box.left + 6, box.right);
  const y = scale(low - pad, high + pad, box.bottom, box.top);
  if (group.warmup) {
    const end = x(group.warmup + 0.5);
    draw(svg, "rect", { class: "warmup", x: box.left, y: box.top, width: end - box.left, height: box.bottom - box.top });
    draw(svg, "text", { class: "axis", x: box.left + 4, y: box.top + 14 }, end - box.left > 60 ? "warm-up" : "");
  }
  const yTicks = ticks(low - pad, high + pad, 5), xTicks = ticks(1, steps, Math.min(6, steps));
  const wholeSteps = { values: xTicks.values.filter(Number.isInteger), shown: String };
  frame(chart, box, { x, y, xTicks: wholeSteps, yTicks, below: "optimizer step", above: "loss" });
  for (const curve of curves) {
    const path = curve.losses.map((loss, index) => `${index ? "L" : "M"}${x(index + 1).toFixed(2)},${y(loss).toFixed(2)}`).join("");
    const line = rowLink(svg, curve.methods[0], curve.methods.map((one) => one.label).join(", "));
    draw(line, "path", { class: "curve", d: path, stroke: colour(curve.methods[0].method) });
  }
  const named = curves.filter((curve) => curve.names.length);
  if (beside) nameCurves(svg, named, y, box);
  else legend(plot, named);
}

// Curves that are equal in every bit are one. Of several passes that differ, the first has the method's name.
function distinctCurves(methods) {
  const curves = new Map();  // losses as text -> their curve
  for (const one of methods) {
    one.losses.filter((losses) => losses.length).forEach((losses, pass) => {
      const key = JSON.stringify(losses);
      if (!curves.has(key)) curves.set(key, { losses, methods: [], names: [] });
      const curve = curves.get(key);
      if (!curve.methods.includes(one)) curve.methods.push(one);
      if (pass === 0) curve.names.push(one);
    });
  }
  return [...curves.values()];
}

// The names of each curve beside its end, one below the other, moved apart where they would overlap.
function nameCurves(svg, curves, y, box) {
  const line = 15;
  const blocks = curves.map((curve) => ({ names: curve.names, end: y(curve.losses.at(-1)), size: curve.names.length * line }))
    .sort((a, b) => a.end - b.end);
  let free = 4;
  for (const block of blocks) {
    block.top = Math.max(free, block.end - block.size / 2);
    free = block.top + block.size + 4;
  }
  let room = box.bottom + 30;
  for (const block of [...blocks].reverse()) {
    block.top = Math.min(block.top, room - block.size);
    room = block.top - 4;
  }
  for (const { names, end, top, size } of blocks) {
    const at = top + size / 2;
    draw(svg, "path", { class: "leader", d: `M${box.right + 2},${end} L${box.right + 12},${at}` });
    if (names.length > 1) draw(svg, "path", { class: "leader", d: `M${box.right + 14},${top + 3} v${size - 5}` });
    names.forEach((one, number) => {
      const link = rowLink(svg, one, one.label);
      draw(link, "text", { x: box.right + 19, y: top + number * line + 12, style: `fill: ${colour(one.method)}` }, one.label);
    });
  }
}

function legend(plot, curves) {
  const items = document.createElement("ul");
  items.className = "legend";
  for (const curve of curves) {
    const item = document.createElement("li");
    item.textContent = curve.names.map((one) => one.label).join(" = ");
    item.style.color = colour(curve.methods[0].method);
    items.append(item);
  }
  plot.append(items);
}

// ---- The page ------------------------------------------------------------------------------------------------------

function drawAll() {
  groups.forEach((group, number) => {
    const section = document.getElementById(`group-${number}`);
    if (section.hidden) return;
    for (const [name, drawing] of [["memory", drawMemory], ["losses", drawLosses], ["spread", drawSpread]]) {
      const figure = section.querySelector(`.${name}`);
      figure.hidden = !group.methods.length;
      const plot = figure.querySelector(".plot");
      if (plot.clientWidth >= 200) drawing(plot, group);  // narrower is a window being opened, or the figure is hidden
    }
  });
}

// Point at a method in one chart, and the others show it too.
function emphasise() {
  for (const section of document.querySelectorAll(".group")) {
    const show = (event) => {
      const row = event.target.closest("[data-row]")?.dataset.row;
      section.classList.toggle("busy", row !== undefined);
      for (const node of section.querySelectorAll("[data-row]")) node.classList.toggle("hot", node.dataset.row === row);
    };
    section.addEventListener("mouseover", show);
    section.addEventListener("focusin", show);
    section.addEventListener("mouseleave", show);
    section.addEventListener("focusout", () => section.classList.remove("busy"));
  }
}

function sortable(table) {
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction);
      const sign = direction === "ascending" ? 1 : -1;
      const rows = [...table.tBodies[0].rows];
      table.tBodies[0].append(...rows.sort((a, b) => order(a.cells[column], b.cells[column], sign)));
    });
  });
}

// Numbers by their value; what has none comes last in both directions.
function order(a, b, sign) {
  const isNumber = a.classList.contains("number");
  const [first, second] = [a, b].map((cell) => (isNumber ? cell.dataset.value : cell.textContent.trim()));
  if (!first || !second) return (first ? 0 : 1) - (second ? 0 : 1);
  return sign * (isNumber ? first - second : first.localeCompare(second, undefined, { numeric: true }));
}

// What a cell is found by: of a verdict, not the settings of the check, which are another row's.
const wordsOf = (cell) => (cell.matches(".verdict") ? cell.textContent.replace(/\([^)]*\)/g, "") : cell.textContent);

function filterable(table) {
  const words = document.getElementById("filter"), model = document.getElementById("model");
  const rows = [...table.tBodies[0].rows];
  const apply = () => {
    const wanted = words.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = [...row.querySelectorAll("th, td:not(.number), .none")].map(wordsOf).join(" ").toLowerCase();
      row.hidden = !((!model.value || row.dataset.model === model.value) && wanted.every((word) => text.includes(word)));
    }
    for (const section of document.querySelectorAll(".group")) {
      section.hidden = Boolean(model.value) && section.dataset.model !== model.value;
    }
    document.getElementById("count").value = `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows`;
  };
  words.addEventListener("input", apply);
  model.addEventListener("change", () => { apply(); drawAll(); });
  apply();
}

function switchable(button) {
  const prefersDark = matchMedia("(prefers-color-scheme: dark)");
  let chosen = null;
  try { chosen = localStorage.getItem("theme"); } catch { /* a page opened from a file may have no storage */ }
  const isDark = () => (chosen ? chosen === "dark" : prefersDark.matches);
  const apply = () => {
    document.documentElement.style.colorScheme = chosen ?? "";
    button.textContent = isDark() ? "Light" : "Dark";
  };
  button.addEventListener("click", () => {
    chosen = isDark() ? "light" : "dark";
    try { localStorage.setItem("theme", chosen); } catch { /* then it lasts until the page is closed */ }
    apply();
  });
  prefersDark.addEventListener("change", apply);
  apply();
}

function openTarget() {
  const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (target instanceof HTMLDetailsElement) {
    target.open = true;
    target.scrollIntoView();
  }
}

switchable(document.getElementById("theme"));
const methods = document.getElementById("methods");
if (methods) {
  sortable(methods);
  filterable(methods);
  drawAll();
  emphasise();
  let width = document.body.clientWidth;
  addEventListener("resize", () => {
    if (document.body.clientWidth === width) return;
    width = document.body.clientWidth;
    drawAll();
  });
}
addEventListener("hashchange", openTarget);
openTarget();
