// The page to try a model: an input, dials, and the answer at every size.
"use strict";

const byId = (id) => document.getElementById(id);
const STEPS = 100; // of a dial that is a limit
const state = { model: null, body: null, type: null, asked: 0, drawn: false };

function si(value) {
  const units = [[1e9, " G"], [1e6, " M"], [1e3, " k"]];
  for (const [factor, prefix] of units) if (value >= factor) return (value / factor).toPrecision(3) + prefix;
  return Number(value.toPrecision(3)).toString();
}
const percent = (value) => (100 * value).toFixed(1) + "%";
const plain = (value) => Number(value.toPrecision(4)).toString();

// --- asking the server -------------------------------------------------------------------------

async function predict(query) {
  const reply = await fetch("/predict?" + new URLSearchParams(query), {
    method: "POST", body: state.body, headers: { "content-type": state.type },
  });
  const answer = await reply.json();
  if (!reply.ok) throw new Error(answer.error);
  return answer;
}

function readDials() {
  const by = byId("by").value;
  const query = { [by]: dialValue() };
  if (state.model.has_robustness) query.robustness = byId("robustness").value;
  return query;
}

async function ask() {
  if (!state.model || state.body === null) return;
  const turn = ++state.asked;
  const query = readDials();
  const extra = state.model.has_robustness ? { robustness: query.robustness } : {};
  try {
    const others = state.model.sizes.map((s) => predict({ size: s.size, ...extra }));
    const [answer, ...all] = await Promise.all([predict(query), ...others]);
    if (turn !== state.asked) return; // a newer question is on its way
    byId("problem").textContent = "";
    showAnswer(answer);
    showAll(answer, all);
  } catch (problem) {
    if (turn !== state.asked) return;
    byId("problem").textContent = problem.message;
  }
}

let timer = null;
function askSoon() {
  clearTimeout(timer);
  timer = setTimeout(ask, 30);
}

// --- showing answers ---------------------------------------------------------------------------

function className(index) {
  const names = state.model.task.classes;
  const name = names.length ? names[index] : String(index);
  return name === " " ? "space" : name === "\n" ? "line break" : name;
}

function sentence(prediction) {
  if (Array.isArray(prediction.label)) return prediction.label.flat(3).slice(0, 12).map(className).join(" ");
  if ("label" in prediction) return className(prediction.label);
  const numbers = [raw(prediction)].flat(4).slice(0, 4).map((value) => Number(value.toPrecision(4)));
  return numbers.join(", ");
}

function raw(prediction) {
  return "output" in prediction ? prediction.output : prediction.probability;
}

function confidence(prediction) {
  if (!("confidence" in prediction)) return null;
  const values = [prediction.confidence].flat(4);
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function showAnswer(answer) {
  const prediction = answer.predictions[0];
  byId("label").textContent = sentence(prediction);
  const sure = confidence(prediction);
  byId("confidence").textContent = sure === null ? "" : percent(sure) + " sure";
  showBars(prediction);
  showFacts(answer);
}

function showBars(prediction) {
  let pairs = prediction.top || [];
  if (prediction.probabilities) pairs = prediction.probabilities.map((p, i) => [i, p]);
  if (pairs.length > 12) pairs = [...pairs].sort((a, b) => b[1] - a[1]).slice(0, 10);
  const bars = byId("bars");
  if (!pairs.length && raw(prediction) !== undefined) {
    const raw = document.createElement("pre");
    raw.className = "raw";
    raw.textContent = JSON.stringify(raw(prediction), null, 1).slice(0, 4000);
    bars.replaceChildren(raw);
    return;
  }
  while (bars.children.length > pairs.length || bars.querySelector("pre")) bars.lastChild.remove();
  while (bars.children.length < pairs.length) {
    const row = document.createElement("div");
    row.className = "class-row";
    const track = document.createElement("span");
    track.className = "track";
    const fill = document.createElement("i");
    fill.className = "grow";
    track.append(fill);
    row.append(document.createElement("span"), track, document.createElement("span"));
    bars.append(row);
  }
  const longest = Math.max(1, ...pairs.map(([index]) => className(index).length));
  bars.style.setProperty("--name", Math.min(longest, 12) + 1 + "ch");
  pairs.forEach(([index, value], i) => {
    const row = bars.children[i];
    row.classList.toggle("best", index === prediction.label);
    row.children[0].textContent = className(index);
    row.children[0].title = className(index);
    row.children[1].firstChild.style.width = (100 * value).toFixed(2) + "%";
    row.children[2].textContent = percent(value);
  });
}

function showFacts(answer) {
  const largest = state.model.sizes[0];
  const facts = [
    ["Size", plain(answer.size), `chosen of ${state.model.sizes.length}`],
    ["Parameters", si(answer.params), percent(answer.params / largest.params) + " of the largest"],
    ["MACs", si(answer.macs), percent(answer.macs / largest.macs) + " of the largest"],
    ["Measured", answer.ms.toPrecision(3) + " ms", "one example on this server"],
    ["This answer", answer.batch.ms.toPrecision(3) + " ms", `in a batch of ${answer.batch.examples}`],
  ];
  if (answer.robustness !== null) facts.push(["Robustness", plain(answer.robustness), "0 accurate, 1 robust"]);
  byId("facts").replaceChildren(...facts.map(([name, value, note]) => {
    const box = document.createElement("div");
    const [dt, dd, small] = ["dt", "dd", "small"].map((tag) => document.createElement(tag));
    dt.textContent = name;
    dd.textContent = value;
    small.textContent = note;
    dd.append(small);
    box.append(dt, dd);
    return box;
  }));
}

function showAll(answer, all) {
  const rows = state.model.sizes.map((sized, i) => {
    const row = document.createElement("tr");
    row.classList.toggle("chosen", sized.size === answer.size);
    if (sized.size === answer.size) row.setAttribute("aria-current", "true");
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = plain(sized.size);
    row.append(head);
    const own = all[i].predictions[0];
    const sure = confidence(own);
    const cells = [si(sized.params), si(sized.macs), sized.ms.toPrecision(3), sentence(own),
      sure === null ? "–" : percent(sure)];
    for (const text of cells) {
      const cell = document.createElement("td");
      cell.textContent = text;
      row.append(cell);
    }
    return row;
  });
  byId("all").tBodies[0].replaceChildren(...rows);
}

// --- dials -------------------------------------------------------------------------------------

const FIELDS = { latency: "ms", params: "params", macs: "macs" };
const NAMES = { size: "At most this size", latency: "At most, in ms", params: "At most, in parameters", macs: "At most, in MACs" };

function dialValue() {
  const by = byId("by").value;
  const position = Number(byId("dial").value);
  const sizes = state.model.sizes;
  if (by === "size") return sizes[sizes.length - 1 - position].size;
  const values = sizes.map((s) => s[FIELDS[by]]);
  const low = Math.min(...values) * 1.001, high = Math.max(...values) * 1.001;
  const value = low * Math.pow(high / low, position / STEPS);
  return by === "latency" ? Number(value.toPrecision(6)) : Math.ceil(value);
}

function setDial() {
  const dial = byId("dial");
  const last = byId("by").value === "size" ? state.model.sizes.length - 1 : STEPS;
  dial.max = last;
  dial.value = last;
  showDials();
}

function showDials() {
  const by = byId("by").value;
  const value = dialValue();
  byId("dial-name").textContent = NAMES[by];
  byId("dial-value").textContent = by === "size" ? plain(value) : by === "latency" ? value.toPrecision(3) + " ms" : si(value);
  byId("dial").setAttribute("aria-valuetext", byId("dial-value").textContent);
  byId("robustness-value").textContent = byId("robustness").value;
}

// --- images ------------------------------------------------------------------------------------

function background() { return state.model.input.background === "dark" ? "#000" : "#fff"; }
function ink() { return state.model.input.background === "dark" ? "#fff" : "#000"; }

function clearDrawing() {
  const canvas = byId("draw");
  const pen = canvas.getContext("2d");
  pen.fillStyle = background();
  pen.fillRect(0, 0, canvas.width, canvas.height);
  state.drawn = false;
}

function findInk(canvas) {
  // the box around all that was drawn
  const { width, height } = canvas;
  const pixels = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const empty = state.model.input.background === "dark" ? 0 : 255;
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    if (Math.abs(pixels[4 * (y * width + x)] - empty) > 30) {
      left = Math.min(left, x); right = Math.max(right, x);
      top = Math.min(top, y); bottom = Math.max(bottom, y);
    }
  }
  return right < 0 ? null : { left, top, width: right - left + 1, height: bottom - top + 1 };
}

function shrinkDrawing() {
  const { width, height } = state.model.input;
  const seen = byId("seen");
  const pen = seen.getContext("2d");
  pen.imageSmoothingQuality = "high";
  pen.fillStyle = background();
  pen.fillRect(0, 0, width, height);
  const canvas = byId("draw");
  const box = byId("center").checked ? findInk(canvas) : null;
  if (!box) {
    pen.drawImage(canvas, 0, 0, width, height);
    return;
  }
  // handwriting fills five sevenths of MNIST's images, and all of small ones
  const share = Math.min(width, height) >= 20 ? 5 / 7 : 1;
  const scale = share * Math.min(width, height) / Math.max(box.width, box.height);
  const [w, h] = [box.width * scale, box.height * scale];
  pen.drawImage(canvas, box.left, box.top, box.width, box.height, (width - w) / 2, (height - h) / 2, w, h);
}

function sendDrawing() {
  shrinkDrawing();
  byId("seen").toBlob((blob) => {
    state.body = blob;
    state.type = "image/png";
    askSoon();
  }, "image/png");
}

function drawWithPointer(canvas) {
  const pen = canvas.getContext("2d");
  let last = null;
  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [(event.clientX - box.left) * canvas.width / box.width, (event.clientY - box.top) * canvas.height / box.height];
  };
  const stroke = (to) => {
    pen.strokeStyle = ink();
    pen.lineWidth = canvas.width / 14;
    pen.lineCap = pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(...(last || to));
    pen.lineTo(...to);
    pen.stroke();
    last = to;
    state.drawn = true;
    sendDrawing();
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    last = null;
    stroke(place(event));
  });
  canvas.addEventListener("pointermove", (event) => { if (last && event.buttons) stroke(place(event)); });
  for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, () => { last = null; });

  // with the keyboard: arrows move, and draw while space is held down
  let cursor = [canvas.width / 2, canvas.height / 2], down = false;
  const moves = { ArrowLeft: [-10, 0], ArrowRight: [10, 0], ArrowUp: [0, -10], ArrowDown: [0, 10] };
  canvas.addEventListener("keydown", (event) => {
    if (event.key === " ") { event.preventDefault(); if (!down) { down = true; last = null; stroke(cursor); } return; }
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    cursor = [0, 1].map((i) => Math.max(10, Math.min(canvas.width - 10, cursor[i] + move[i])));
    if (down) stroke(cursor);
  });
  canvas.addEventListener("keyup", (event) => { if (event.key === " ") { down = false; last = null; } });
  canvas.addEventListener("blur", () => { down = false; last = null; });
}

function drawSample() {
  // something to start with: a seven
  const canvas = byId("draw");
  const pen = canvas.getContext("2d");
  const s = canvas.width / 280;
  pen.strokeStyle = ink();
  pen.lineWidth = canvas.width / 14;
  pen.lineCap = pen.lineJoin = "round";
  pen.beginPath();
  pen.moveTo(80 * s, 75 * s);
  pen.lineTo(200 * s, 75 * s);
  pen.lineTo(125 * s, 215 * s);
  pen.stroke();
  sendDrawing();
}

async function sendFile(file) {
  if (!file) return;
  state.body = file;
  state.type = file.type;
  const { width, height } = state.model.input;
  const pen = byId("seen").getContext("2d");
  try {
    const image = await createImageBitmap(file);
    pen.drawImage(image, 0, 0, width, height);
  } catch {
    pen.clearRect(0, 0, width, height); // the server says what is wrong with it
  }
  ask();
}

function setMode(mode) {
  for (const name of ["draw", "upload"]) {
    byId("mode-" + name).setAttribute("aria-pressed", String(name === mode));
    byId(name + "-area").classList.toggle("hidden", name !== mode);
  }
  if (mode === "draw") sendDrawing();
}

function startImages() {
  const { width, height } = state.model.input;
  byId("image-input").classList.remove("hidden");
  byId("seen").width = width;
  byId("seen").height = height;
  byId("seen-text").textContent = `What the model sees: ${width} × ${height} pixels`;
  clearDrawing();
  drawWithPointer(byId("draw"));
  byId("clear").addEventListener("click", () => { clearDrawing(); sendDrawing(); });
  byId("center").addEventListener("change", sendDrawing);
  byId("mode-draw").addEventListener("click", () => setMode("draw"));
  byId("mode-upload").addEventListener("click", () => setMode("upload"));
  byId("file").addEventListener("change", (event) => sendFile(event.target.files[0]));
  drawSample();
}

// --- texts and numbers -------------------------------------------------------------------------

function startText() {
  const { unit, length } = state.model.input;
  byId("text-input").classList.remove("hidden");
  byId("text-label").textContent = `A text; the model reads ${length} ${unit}`;
  const send = () => {
    state.body = JSON.stringify({ text: byId("text").value });
    state.type = "application/json";
    askSoon();
  };
  byId("text").addEventListener("input", send);
  byId("text").value = unit === "characters" ? "To be, or not to be, that is the questio" : "what a lovely day";
  send();
}

function startNumbers() {
  const { shapes, dtypes } = state.model;
  byId("numbers-input").classList.remove("hidden");
  byId("numbers-label").textContent = `Numbers as JSON, of shape ${shapes.map((s) => "[" + s.join(", ") + "]").join(" and ")}`;
  const area = byId("numbers");
  const send = () => {
    state.type = "application/json";
    state.body = `{"inputs": ${area.value}}`;
    askSoon();
  };
  const draw = (shape, dtype) => {
    if (!shape.length) return dtype.startsWith("int") ? 0 : Number((2 * Math.random() - 1).toFixed(3));
    return Array.from({ length: shape[0] }, () => draw(shape.slice(1), dtype));
  };
  const fill = () => {
    const arrays = shapes.map((shape, i) => draw(shape, dtypes[i]));
    area.value = JSON.stringify(shapes.length > 1 ? arrays.map((a) => [a]) : arrays[0]);
    send();
  };
  area.addEventListener("input", send);
  byId("random").addEventListener("click", fill);
  fill();
}

// --- start -------------------------------------------------------------------------------------

async function start() {
  state.model = await (await fetch("/model")).json();
  const { model } = state;
  byId("title").textContent = `${model.name} · ${model.method}`;
  document.title = `Fedquilt: ${model.name}`;
  byId("size-head").textContent = model.size_name;
  byId("robustness-dial").classList.toggle("hidden", !model.has_robustness);
  byId("warnings").replaceChildren(...model.warnings.map((text) => {
    const item = document.createElement("li");
    item.textContent = text;
    return item;
  }));
  byId("by").addEventListener("change", () => { setDial(); askSoon(); });
  byId("dial").addEventListener("input", () => { showDials(); askSoon(); });
  byId("robustness").addEventListener("input", () => { showDials(); askSoon(); });
  setDial();
  ({ image: startImages, text: startText, numbers: startNumbers })[model.input.kind]();
}

start().catch((problem) => { byId("problem").textContent = problem.message; });
