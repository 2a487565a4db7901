// Interactive plots of figures as data: lines, bars, boxes, grids and densities, drawn as SVG.
// Hover or arrow keys read values, dragging or + and - zoom, buttons hide series, and every plot
// has its table. No library, no other host.
"use strict";
const FedquiltPlots = (function () {
  const NS = ["http", "//www.w3.org/2000/svg"].join(":"); // the name of SVG, not an address that is read
  const COLORS = 8;
  const colors = new Map(); // the same name has the same color in all plots
  const HEIGHT = 300;

  function colorOf(name) {
    if (!colors.has(name)) colors.set(name, (colors.size % COLORS) + 1);
    return `var(--series-${colors.get(name)})`;
  }

  function svg(tag, attributes = {}, ...children) {
    const element = document.createElementNS(NS, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function html(tag, attributes = {}, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  }

  function format(value) {
    if (value === null || value === undefined || !Number.isFinite(value)) return "–";
    const size = Math.abs(value);
    if (size >= 1e9) return Number((value / 1e9).toPrecision(4)) + " G";
    if (size >= 1e6) return Number((value / 1e6).toPrecision(4)) + " M";
    if (size >= 1e4) return Number((value / 1e3).toPrecision(4)) + " k";
    if (size !== 0 && size < 1e-3) return value.toExponential(2);
    return String(Number(value.toPrecision(4)));
  }

  // --- scales ----------------------------------------------------------------------------------

  function niceTicks(low, high, count) {
    const span = high - low || Math.abs(high) || 1;
    const raw = span / count;
    const power = Math.pow(10, Math.floor(Math.log10(raw)));
    const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= raw) || raw;
    const ticks = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-6; v += step) {
      ticks.push(Math.abs(v) < step * 1e-6 ? 0 : v);
    }
    return ticks;
  }

  function logTicks(low, high) {
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p++) {
      for (const f of [1, 2, 5]) {
        const v = f * Math.pow(10, p);
        if (v >= low * 0.999 && v <= high * 1.001) ticks.push(v);
      }
    }
    return ticks.length > 8 ? ticks.filter((v) => /^1/.test(v.toExponential())) : ticks;
  }

  function makeScale(low, high, from, to, isLog) {
    const f = isLog ? Math.log : (v) => v;
    const [a, b] = [f(low), f(high)];
    const scale = (v) => from + ((f(v) - a) / (b - a || 1)) * (to - from);
    scale.invert = (p) => {
      const v = a + ((p - from) / (to - from || 1)) * (b - a);
      return isLog ? Math.exp(v) : v;
    };
    return scale;
  }

  function extent(values) {
    let [low, high] = [Infinity, -Infinity];
    for (const v of values) if (Number.isFinite(v)) { low = Math.min(low, v); high = Math.max(high, v); }
    return low > high ? [0, 1] : [low, high];
  }

  function pad([low, high], share = 0.06) {
    const margin = (high - low || Math.abs(high) || 1) * share;
    return [low - margin, high + margin];
  }

  function shorten(text, length) {
    const line = String(text).replace(/\n/g, ", ");
    return line.length > length ? line.slice(0, length - 1) + "…" : line;
  }

  // --- the plot --------------------------------------------------------------------------------

  class Plot {
    constructor(container, figure) {
      this.hidden = new Set();
      this.zoom = null;
      this.isLog = null;
      this.cursor = null;
      this.build(container);
      this.update(figure);
      new ResizeObserver(() => this.draw()).observe(this.stage);
    }

    build(container) {
      this.root = html("figure", { class: "plot card" });
      this.title = html("h3");
      this.tools = html("div", { class: "plot-tools", role: "group" });
      this.stage = html("div", { class: "plot-stage" });
      this.note = html("div", { class: "plot-note", "aria-live": "polite" });
      this.caption = html("figcaption", { class: "quiet" });
      this.details = html("details", {}, html("summary", {}, "Data as a table"));
      this.table = html("div", { class: "scroll", tabindex: "0", role: "region" });
      this.details.append(this.table);
      this.details.addEventListener("toggle", () => this.fillTable());
      this.root.append(this.title, this.tools, this.stage, this.note, this.caption, this.details);
      container.append(this.root);
    }

    update(figure) {
      const text = JSON.stringify(figure);
      if (text === this.text) return;
      this.text = text;
      this.figure = figure;
      this.title.textContent = figure.title;
      this.caption.textContent = figure.caption || "";
      this.tools.setAttribute("aria-label", "Options of " + figure.title);
      this.table.setAttribute("aria-label", "Data of " + figure.title);
      this.kind = KINDS[figure.kind];
      this.fillTools();
      this.fillTable();
      this.draw();
    }

    names() { return this.kind.names(this.figure); }

    fillTools() {
      const focused = this.tools.contains(document.activeElement) ? document.activeElement.dataset.key : null;
      const buttons = [];
      const names = this.names();
      for (const name of names.length > 1 ? names : []) {
        const swatch = html("span", { class: "swatch" });
        swatch.style.background = colorOf(name);
        const button = html("button", { type: "button", class: "legend", "data-key": "s:" + name }, swatch, shorten(name, 40));
        button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
        button.title = "Show or hide " + name;
        button.addEventListener("click", () => {
          if (this.hidden.has(name)) this.hidden.delete(name); else this.hidden.add(name);
          button.setAttribute("aria-pressed", String(!this.hidden.has(name)));
          this.draw();
        });
        buttons.push(button);
      }
      if (this.kind === KINDS.lines && this.canBeLog()) {
        const log = html("button", { type: "button", class: "small", "data-key": "log" }, "Log x");
        log.setAttribute("aria-pressed", String(this.usesLog()));
        log.addEventListener("click", () => {
          this.isLog = !this.usesLog();
          this.zoom = null;
          log.setAttribute("aria-pressed", String(this.isLog));
          this.draw();
        });
        buttons.push(log);
      }
      this.reset = html("button", { type: "button", class: "small", "data-key": "reset" }, "Reset zoom");
      this.reset.addEventListener("click", () => { this.zoom = null; this.draw(); });
      buttons.push(this.reset);
      this.tools.replaceChildren(...buttons);
      if (focused) buttons.find((b) => b.dataset.key === focused)?.focus();
    }

    xs() { return Object.values(this.figure.curves).flatMap((curve) => curve.map((p) => p[0])); }
    canBeLog() { const [low, high] = extent(this.xs()); return low > 0 && high > 2 * low; }
    usesLog() {
      if (this.isLog !== null) return this.isLog;
      const [low, high] = extent(this.xs());
      return !this.figure.is_linear && low > 0 && high > 20 * low;
    }

    draw() {
      const width = Math.floor(this.stage.clientWidth);
      if (width < 40) return;
      const focused = this.stage.contains(document.activeElement);
      this.reset.classList.toggle("hidden", this.zoom === null);
      this.note.textContent = "";
      const drawing = this.kind.draw(this, width);
      drawing.setAttribute("tabindex", "0");
      drawing.setAttribute("role", "img");
      drawing.setAttribute("aria-label", this.describe());
      this.stage.replaceChildren(drawing);
      if (focused) drawing.focus();
    }

    describe() {
      const names = this.names();
      const listed = names.slice(0, 6).join(", ") + (names.length > 6 ? " and others" : "");
      const how = this.kind.keys ? " Arrow keys read values, plus and minus zoom, Escape shows all." : "";
      return `${this.figure.title}. ${listed ? "Series: " + listed + ". " : ""}The data are in the table below.${how}`;
    }

    fillTable() {
      if (!this.details.open) return;
      const { header, rows } = this.kind.table(this.figure);
      const head = html("tr", {}, ...header.map((cell) => html("th", { scope: "col" }, cell)));
      const body = rows.slice(0, 2000).map((row) => html("tr", {},
        html("th", { scope: "row" }, row[0]), ...row.slice(1).map((cell) => html("td", {}, cell))));
      this.table.replaceChildren(html("table", {}, html("thead", {}, head), html("tbody", {}, ...body)));
    }

    say(text) { this.note.textContent = text; }
  }

  function axes(plot, width, height, box, y, options) {
    const group = svg("g", { class: "axes", "aria-hidden": "true" });
    for (const tick of options.yTicks) {
      const at = y(tick);
      group.append(svg("line", { x1: box.left, x2: box.right, y1: at, y2: at, class: "rule" }));
      group.append(svg("text", { x: box.left - 6, y: at + 4, "text-anchor": "end" }, format(tick)));
    }
    if (options.x) {
      for (const tick of options.xTicks) {
        const at = options.x(tick);
        group.append(svg("line", { x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4, class: "tick" }));
        group.append(svg("text", { x: at, y: box.bottom + 17, "text-anchor": "middle" }, format(tick)));
      }
    }
    group.append(svg("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "tick" }));
    if (options.xLabel) group.append(svg("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle", class: "label" }, shorten(options.xLabel, Math.floor(width / 7))));
    if (options.yLabel) group.append(svg("text", { x: 4, y: 12, class: "label" }, shorten(options.yLabel, Math.floor(width / 7))));
    return group;
  }

  function canvas(width, height) {
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
  }

  // --- lines -----------------------------------------------------------------------------------

  function shownCurves(plot) {
    return Object.entries(plot.figure.curves).filter(([name, curve]) => curve.length && !plot.hidden.has(name));
  }

  function drawLines(plot, width) {
    const { figure } = plot;
    const height = HEIGHT;
    const box = { left: 52, right: width - 12, top: 24, bottom: height - 40 };
    const picture = canvas(width, height);
    const curves = shownCurves(plot);
    const isLog = plot.usesLog() && plot.canBeLog();
    const all = curves.flatMap(([, curve]) => curve);
    let [low, high] = extent(all.map((p) => p[0]));
    if (low === high) [low, high] = isLog ? [low / 2, high * 2] : pad([low, high]);
    const [x0, x1] = plot.zoom || (isLog ? [low * 0.95, high * 1.05] : pad([low, high], 0.02));
    const x = makeScale(x0, x1, box.left, box.right, isLog);
    const inside = all.filter((p) => p[0] >= x0 && p[0] <= x1);
    const [y0, y1] = pad(extent((inside.length ? inside : all).map((p) => p[1])));
    const y = makeScale(y0, y1, box.bottom, box.top, false);
    const xTicks = (isLog ? logTicks(x0, x1) : niceTicks(x0, x1, Math.max(3, width / 110))).filter((t) => t >= x0 && t <= x1);
    const yTicks = niceTicks(y0, y1, 5).filter((t) => t >= y0 && t <= y1);
    picture.append(axes(plot, width, height, box, y, { x, xTicks, yTicks, xLabel: figure.x, yLabel: figure.y }));
    const id = "clip" + (++drawLines.count);
    picture.append(svg("clipPath", { id }, svg("rect", { x: box.left - 5, y: box.top - 8, width: box.right - box.left + 10, height: box.bottom - box.top + 14 })));
    const layer = svg("g", { "clip-path": `url(#${id})` });
    for (const [name, curve] of curves) {
      const color = colorOf(name);
      const points = curve.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`);
      if (figure.is_joined) {
        const line = svg("polyline", { points: points.join(" "), fill: "none", "stroke-width": 2 });
        line.style.stroke = color;
        layer.append(line);
      }
      if (!figure.is_joined || curve.length <= 60) {
        for (const point of points) {
          const [cx, cy] = point.split(",");
          const dot = svg("circle", { cx, cy, r: 3 });
          dot.style.fill = color;
          layer.append(dot);
        }
      }
    }
    picture.append(layer);
    addReading(plot, picture, { box, x, y, curves, isLog, range: [x0, x1] });
    return picture;
  }
  drawLines.count = 0;

  function addReading(plot, picture, view) {
    const { box, x, y, curves } = view;
    const marks = svg("g", { class: "marks", "aria-hidden": "true" });
    const brush = svg("rect", { class: "brush", y: box.top, height: box.bottom - box.top, width: 0, x: 0 });
    picture.append(marks, brush);

    function read(at) {
      // of every series the point that is nearest to this x
      const texts = [];
      marks.replaceChildren(svg("line", { x1: x(at), x2: x(at), y1: box.top, y2: box.bottom, class: "cursor" }));
      for (const [name, curve] of curves) {
        const point = curve.reduce((best, p) => Math.abs(p[0] - at) < Math.abs(best[0] - at) ? p : best);
        if (Math.abs(x(point[0]) - x(at)) > 24) continue;
        const ring = svg("circle", { cx: x(point[0]), cy: y(point[1]), r: 5, fill: "none", "stroke-width": 2 });
        ring.style.stroke = colorOf(name);
        marks.append(ring);
        texts.push(`${name}: ${format(point[1])}`);
      }
      const xs = `${plot.figure.x} ${format(at)}`;
      plot.say(texts.length ? `${xs}: ${texts.slice(0, 8).join(", ")}${texts.length > 8 ? ", …" : ""}` : "");
    }

    const stops = () => [...new Set(curves.flatMap(([, c]) => c.map((p) => p[0])))]
      .filter((v) => v >= view.range[0] && v <= view.range[1]).sort((a, b) => a - b);
    const where = (event) => {
      const frame = picture.getBoundingClientRect();
      const at = (event.clientX - frame.left) * (picture.viewBox.baseVal.width / frame.width);
      return Math.max(box.left, Math.min(box.right, at));
    };
    const nearest = (value) => {
      const list = stops();
      return list.length ? list.reduce((a, b) => Math.abs(x(b) - x(value)) < Math.abs(x(a) - x(value)) ? b : a) : value;
    };
    let start = null;
    picture.addEventListener("pointerdown", (event) => { start = where(event); picture.setPointerCapture(event.pointerId); });
    picture.addEventListener("pointermove", (event) => {
      const at = where(event);
      if (start !== null && Math.abs(at - start) > 4) {
        brush.setAttribute("x", Math.min(at, start));
        brush.setAttribute("width", Math.abs(at - start));
      }
      if (curves.length) read(nearest(x.invert(at)));
    });
    picture.addEventListener("pointerup", (event) => {
      const at = where(event);
      const from = start;
      start = null;
      if (from !== null && Math.abs(at - from) > 12) {
        plot.zoom = [x.invert(Math.min(at, from)), x.invert(Math.max(at, from))];
        plot.draw();
      }
    });
    picture.addEventListener("pointercancel", () => { start = null; brush.setAttribute("width", 0); });
    picture.addEventListener("pointerleave", () => { if (start === null) marks.replaceChildren(); });
    picture.addEventListener("dblclick", () => { plot.zoom = null; plot.draw(); });
    picture.addEventListener("keydown", (event) => {
      const list = stops();
      if (!list.length) return;
      let i = plot.cursor === null ? -1 : list.indexOf(nearest(plot.cursor));
      const moves = { ArrowRight: 1, ArrowLeft: -1 };
      if (event.key in moves) i = Math.max(0, Math.min(list.length - 1, i + moves[event.key]));
      else if (event.key === "Home") i = 0;
      else if (event.key === "End") i = list.length - 1;
      else if (event.key === "Escape") { plot.zoom = null; plot.draw(); return; }
      else if (event.key === "+" || event.key === "=" || event.key === "-") {
        const middle = x(list[Math.max(i, 0)]);
        const half = (box.right - box.left) * (event.key === "-" ? 1 : 0.25);
        plot.zoom = [x.invert(middle - half), x.invert(middle + half)];
        if (event.key === "-" && plot.zoom[0] <= view.range[0] && plot.zoom[1] >= view.range[1] && half > box.right) plot.zoom = null;
        plot.draw();
        return;
      } else return;
      event.preventDefault();
      plot.cursor = list[i];
      read(list[i]);
    });
  }

  function tableOfLines(figure) {
    const names = Object.keys(figure.curves);
    const rows = new Map();
    if (!figure.is_joined) {
      return { header: ["series", figure.x, figure.y], rows: names.flatMap((n) => figure.curves[n].map(([a, b]) => [n, format(a), format(b)])) };
    }
    for (const name of names) for (const [a, b] of figure.curves[name]) {
      if (!rows.has(a)) rows.set(a, {});
      rows.get(a)[name] = b;
    }
    const sorted = [...rows.entries()].sort((a, b) => a[0] - b[0]);
    return { header: [figure.x, ...names], rows: sorted.map(([a, values]) => [format(a), ...names.map((n) => n in values ? format(values[n]) : "–")]) };
  }

  // --- bars ------------------------------------------------------------------------------------

  function drawBars(plot, width) {
    const { figure } = plot;
    const names = Object.keys(figure.series).filter((n) => !plot.hidden.has(n));
    const labels = figure.labels;
    const slot = Math.max(14, (width - 64) / Math.max(labels.length, 1));
    const isUpright = slot < 70 && labels.length > 1;
    const below = isUpright ? 110 : 40;
    const height = HEIGHT + (isUpright ? 60 : 0);
    const full = Math.max(width, 64 + slot * labels.length);
    const box = { left: 52, right: full - 12, top: 24, bottom: height - below };
    const picture = canvas(full, height);
    const tops = names.flatMap((n) => figure.series[n].map((v, i) => v + ((figure.spread || {})[n] || [])[i] || v));
    const y1 = Math.max(0, ...tops) * 1.06 || 1;
    const y0 = Math.min(0, ...tops);
    const y = makeScale(y0, y1, box.bottom, box.top, false);
    picture.append(axes(plot, full, height, box, y, { yTicks: niceTicks(y0, y1, 5), yLabel: figure.y }));
    const step = (box.right - box.left) / Math.max(labels.length, 1);
    const bar = Math.min(40, (0.8 * step) / Math.max(names.length, 1));
    labels.forEach((label, i) => {
      const middle = box.left + (i + 0.5) * step;
      names.forEach((name, k) => {
        const value = figure.series[name][i];
        if (!Number.isFinite(value)) return;
        const left = middle - (bar * names.length) / 2 + k * bar;
        const rect = svg("rect", { x: left, width: Math.max(bar - 1, 1), y: Math.min(y(value), y(0)), height: Math.max(0.5, Math.abs(y(0) - y(value))) }, svg("title", {}, `${name}, ${label}: ${format(value)}`));
        rect.style.fill = colorOf(name);
        rect.addEventListener("pointerenter", () => plot.say(`${label}: ${name} ${format(value)}`));
        picture.append(rect);
        const spread = ((figure.spread || {})[name] || [])[i];
        if (spread) picture.append(svg("line", { x1: left + bar / 2, x2: left + bar / 2, y1: y(value - spread), y2: y(value + spread), class: "whisker" }));
      });
      const text = svg("text", isUpright
        ? { transform: `translate(${middle + 4},${box.bottom + 8}) rotate(90)`, class: "name" }
        : { x: middle, y: box.bottom + 17, "text-anchor": "middle", class: "name" }, shorten(label, isUpright ? 16 : Math.max(4, Math.floor(step / 7))));
      picture.append(text);
    });
    return picture;
  }

  // --- boxes -----------------------------------------------------------------------------------

  function drawBoxes(plot, width) {
    const panels = Object.entries(plot.figure.panels);
    const isStacked = width < 560;
    const own = isStacked ? width : width / panels.length;
    const height = HEIGHT;
    const picture = canvas(width, isStacked ? height * panels.length : height);
    panels.forEach(([label, boxes], i) => {
      const [dx, dy] = isStacked ? [0, i * height] : [i * own, 0];
      const names = Object.keys(boxes).filter((n) => boxes[n] && !plot.hidden.has(n));
      const box = { left: 52, right: own - 12, top: 24, bottom: height - 40 };
      const group = svg("g", { transform: `translate(${dx},${dy})` });
      const [y0, y1] = pad(extent(names.flatMap((n) => [boxes[n].low, boxes[n].high])));
      const y = makeScale(y0, y1, box.bottom, box.top, false);
      group.append(axes(plot, own, height, box, y, { yTicks: niceTicks(y0, y1, 5).filter((t) => t >= y0), yLabel: label }));
      const step = (box.right - box.left) / Math.max(names.length, 1);
      names.forEach((name, k) => {
        const b = boxes[name];
        const middle = box.left + (k + 0.5) * step;
        const half = Math.min(28, step * 0.3);
        const part = svg("g", {}, svg("title", {}, `${name}: median ${format(b.median)}, from ${format(b.low)} to ${format(b.high)}`));
        part.append(svg("line", { x1: middle, x2: middle, y1: y(b.low), y2: y(b.high), class: "whisker" }));
        const rect = svg("rect", { x: middle - half, width: 2 * half, y: y(b.upper), height: Math.max(1, y(b.lower) - y(b.upper)), "fill-opacity": 0.35, "stroke-width": 1.5 });
        rect.style.fill = rect.style.stroke = colorOf(name);
        part.append(rect);
        const line = svg("line", { x1: middle - half, x2: middle + half, y1: y(b.median), y2: y(b.median), "stroke-width": 2.5 });
        line.style.stroke = colorOf(name);
        part.append(line);
        part.addEventListener("pointerenter", () => plot.say(`${name}, ${label}: median ${format(b.median)}, middle half ${format(b.lower)} to ${format(b.upper)}, all ${format(b.low)} to ${format(b.high)}, ${b.count} clients`));
        group.append(part, svg("text", { x: middle, y: box.bottom + 17, "text-anchor": "middle", class: "name" }, shorten(name, Math.max(4, Math.floor(step / 7)))));
      });
      picture.append(group);
    });
    return picture;
  }

  // --- grids -----------------------------------------------------------------------------------

  function shade(value, low, high) {
    // from the color of the card to the accent: light and dark pages have their own
    const share = Math.round(8 + 92 * Math.max(0, Math.min(1, (value - low) / (high - low || 1))));
    return `color-mix(in srgb, var(--accent) ${share}%, var(--card))`;
  }

  function drawGrid(plot, width) {
    const { figure } = plot;
    const names = Math.min(140, 12 + 6.4 * Math.max(...figure.rows.map((r) => Math.min(r.length, 20)), 1));
    const above = figure.bands && figure.bands.length ? 34 : 12;
    const cell = Math.max(9, (width - names - 12) / Math.max(figure.columns.length, 1));
    const tall = Math.max(14, Math.min(26, 320 / Math.max(figure.rows.length, 1)));
    const full = Math.max(width, names + 12 + cell * figure.columns.length);
    const bottom = above + tall * figure.rows.length;
    const picture = canvas(full, bottom + 56);
    const [low, high] = [figure.low ?? 0, figure.high ?? 100];
    figure.rows.forEach((row, i) => {
      picture.append(svg("text", { x: names - 6, y: above + (i + 0.7) * tall, "text-anchor": "end", class: "name" }, shorten(row, 20)));
      figure.columns.forEach((column, j) => {
        const value = figure.values[i][j];
        const rect = svg("rect", { x: names + j * cell, y: above + i * tall, width: Math.max(1, cell - 1), height: Math.max(1, tall - 1) }, svg("title", {}, `${row}, ${figure.x} ${column}: ${format(value)} ${figure.unit}`));
        rect.style.fill = shade(value, low, high);
        rect.addEventListener("pointerenter", () => plot.say(`${row}, ${figure.x} ${column}: ${format(value)} ${figure.unit}`));
        picture.append(rect);
      });
    });
    const every = Math.ceil(28 / cell);
    figure.columns.forEach((column, j) => {
      if (j % every === 0) picture.append(svg("text", { x: names + (j + 0.5) * cell, y: bottom + 14, "text-anchor": "middle", class: "name" }, shorten(column, 6)));
    });
    let start = 0;
    for (const [name, count] of figure.bands || []) {
      picture.append(svg("text", { x: names + (start + count / 2) * cell, y: 14, "text-anchor": "middle", class: "name" }, shorten(name, Math.max(3, Math.floor((count * cell) / 6)))));
      start += count;
      if (start < figure.columns.length) picture.append(svg("line", { x1: names + start * cell - 0.5, x2: names + start * cell - 0.5, y1: above - 14, y2: bottom, class: "cursor" }));
    }
    picture.append(svg("text", { x: names + 2, y: bottom + 34, class: "label" }, `${figure.x} · ${figure.unit}, ${format(low)} to ${format(high)}`));
    const bar = svg("g", { "aria-hidden": "true" });
    for (let k = 0; k < 20; k++) {
      const rect = svg("rect", { x: names + 2 + k * 8, y: bottom + 40, width: 8, height: 8 });
      rect.style.fill = shade(k, 0, 19);
      bar.append(rect);
    }
    picture.append(bar);
    return picture;
  }

  const namesOf = (field) => (figure) => Object.keys(figure[field]);
  const KINDS = {
    lines: { draw: drawLines, names: namesOf("curves"), table: tableOfLines, keys: true },
    bars: {
      draw: drawBars, names: namesOf("series"),
      table: (f) => ({ header: ["", ...Object.keys(f.series)], rows: f.labels.map((l, i) => [shorten(l, 80), ...Object.values(f.series).map((v) => format(v[i]))]) }),
    },
    boxes: {
      draw: drawBoxes,
      names: (f) => [...new Set(Object.values(f.panels).flatMap((p) => Object.keys(p)))],
      table: (f) => ({
        header: ["", "run", "clients", "lowest", "lower quarter", "median", "upper quarter", "highest"],
        rows: Object.entries(f.panels).flatMap(([label, boxes]) => Object.entries(boxes).filter(([, b]) => b).map(([n, b]) => [label, n, String(b.count), ...[b.low, b.lower, b.median, b.upper, b.high].map(format)])),
      }),
    },
    grid: {
      draw: drawGrid, names: () => [],
      table: (f) => ({ header: ["", ...f.columns], rows: f.rows.map((r, i) => [r, ...f.values[i].map(format)]) }),
    },
  };

  return { Plot, colorOf };
})();
