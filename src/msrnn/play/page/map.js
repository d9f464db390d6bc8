"use strict";
// The layer-by-token map of one lane: one column a token (or several), one row a layer; and the same for a picture.

const FLASH = 48; // steps for which a dropped token stays orange

function rgba(text) {
  const n = parseInt(text.slice(1), 16);
  return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
}

function word([r, g, b]) {
  return (255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r);
}

function blend(a, b, share) {
  return a.map((value, i) => value + (b[i] - value) * share);
}

// The colours of the page's theme, for canvases.
function palette(element = document.documentElement) {
  const style = getComputedStyle(element);
  const get = (name) => style.getPropertyValue(name).trim();
  const levels = [];
  for (let i = 0; i <= LEVELS; i++) levels.push(get(`--lv${i}`));
  return {
    levels, flash: get("--flash"), empty: get("--map-empty"), card: get("--card"), ink: get("--ink"),
    quiet: get("--quiet"), rule: get("--rule"), lanes: [get("--lane-a"), get("--lane-b")], full: get("--lane-full"),
  };
}

// Pixels of tokens [from, to) in `columns` columns: an ImageData of columns x layers.
function mapPixels(view, from, to, columns, shown, colours) {
  const { lane, held, drop } = view;
  const layers = lane.layers;
  const image = new ImageData(Math.max(1, columns), layers);
  const pixels = new Int32Array(image.data.buffer);
  const ramp = rampOf(colours);
  const span = to - from;
  for (let column = 0; column < columns; column++) {
    const first = from + Math.floor((column * span) / columns);
    const end = Math.max(first + 1, from + Math.floor(((column + 1) * span) / columns));
    if (first >= shown) { for (let l = 0; l < layers; l++) pixels[l * columns + column] = ramp.unread; continue; }
    const stop = Math.min(end, shown);
    for (let layer = 0; layer < layers; layer++) {
      let sum = 0, last = -1;
      for (let index = first * layers + layer; index < stop * layers; index += layers) {
        sum += held[index];
        if (drop[index] > last) last = drop[index];
      }
      const share = sum / ((stop - first) * lane.units[layer]);
      const age = last < 0 ? FLASH : shown - 1 - last;
      // a few held tokens among many dropped ones must stay visible
      let index = share === 0 ? 0 : Math.max(24, Math.round(share * 64));
      pixels[layer * columns + column] = age < FLASH && share < 0.999 && stop - first < 12
        ? word(blend(ramp.flash, ramp.base[index], age / FLASH)) : ramp.word[index];
    }
  }
  return image;
}

let rampCache = null;
function rampOf(colours) {
  const key = colours.levels.join() + colours.card;
  if (rampCache && rampCache.key === key) return rampCache;
  const base = [];
  const stops = [colours.empty, ...colours.levels.slice(1)].map(rgba);
  for (let i = 0; i <= 64; i++) {
    const at = (i / 64) * LEVELS, low = Math.min(LEVELS - 1, Math.floor(at));
    base.push(blend(stops[low], stops[low + 1], at - low));
  }
  return (rampCache = { key, base, word: base.map(word), flash: rgba(colours.flash), unread: word(rgba(colours.card)) });
}

const scratch = document.createElement("canvas");
function paintMap(context, view, from, to, shown, x, y, width, height, colours, ratio = 1) {
  const columns = Math.max(1, Math.min(to - from, Math.round(width * ratio)));
  scratch.width = columns;
  scratch.height = view.lane.layers;
  scratch.getContext("2d").putImageData(mapPixels(view, from, to, columns, shown, colours), 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(scratch, 0, 0, columns, view.lane.layers, x, y, width, height);
}

class MapPane {
  constructor(app, lane, index) {
    this.app = app;
    this.lane = lane;
    this.index = index;
    this.layer = 0;
    this.element = document.createElement("div");
    this.element.className = "map";
    const title = document.createElement("h3");
    title.textContent = lane.policy;
    title.hidden = app.run.lanes.length < 2;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.element.append(title, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => app.hover(null));
    this.canvas.addEventListener("click", (event) => {
      const at = this.at(event);
      if (at) { app.select(at.token, index); app.reveal(at.token); app.showLayer(index, at.layer); }
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get rowHeight() {
    const room = this.app.run.lanes.length > 1 ? 130 : 190;
    return Math.max(2, Math.min(12, Math.round(room / this.lane.layers)));
  }

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const [from, to] = this.app.span();
    const token = from + Math.floor(((event.clientX - box.left - GUTTER) / (box.width - GUTTER)) * (to - from));
    const layer = Math.floor((event.clientY - box.top) / this.rowHeight);
    if (token < from || token >= Math.min(to, this.app.shown) || layer < 0 || layer >= this.lane.layers) return null;
    return { token, layer };
  }

  point(event) {
    const at = this.at(event);
    this.app.hover(at && { token: at.token, layer: at.layer, lane: this.index, x: event.clientX, y: event.clientY });
  }

  key(event) {
    const { app } = this;
    const token = app.selected === null ? Math.max(0, app.shown - 1) : app.selected;
    const step = event.shiftKey ? 10 : 1;
    if (event.key === "ArrowLeft") app.select(Math.max(0, token - step), this.index);
    else if (event.key === "ArrowRight") app.select(Math.min(app.shown - 1, token + step), this.index);
    else if (event.key === "ArrowUp") this.layer = Math.max(0, this.layer - 1);
    else if (event.key === "ArrowDown") this.layer = Math.min(this.lane.layers - 1, this.layer + 1);
    else return;
    event.preventDefault();
    if (event.key === "ArrowUp" || event.key === "ArrowDown") app.showLayer(this.index, this.layer);
    app.setFollow(false);
    app.reveal(app.selected ?? token);
  }

  draw(colours) {
    const ratio = window.devicePixelRatio || 1;
    const width = this.canvas.parentElement.clientWidth, rows = this.rowHeight * this.lane.layers;
    const height = rows + 20;
    fit(this.canvas, width, height, ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    drawMap(context, this.app.run, this.lane, this.app.span(), this.app.shown, 0, 0, width, rows, colours, ratio);
    this.mark(context, width, rows, colours);
    const held = this.lane.view;
    const label = `Map of ${this.lane.layers} layers by ${countOf(this.app.shown)} tokens under ${this.lane.policy}.`;
    if (this.app.calm) this.canvas.setAttribute("aria-label", `${label} A layer holds ${countOf(held.mean())} tokens on average.`);
    else if (!this.canvas.hasAttribute("aria-label")) this.canvas.setAttribute("aria-label", label);
  }

  // A thin frame around the selected token's column and the chosen layer.
  mark(context, width, rows, colours) {
    const { selected } = this.app;
    const [from, to] = this.app.span();
    if (selected === null || selected < from || selected >= to) return;
    const scale = (width - GUTTER) / (to - from);
    context.strokeStyle = colours.ink;
    context.lineWidth = 1;
    context.strokeRect(GUTTER + (selected - from) * scale - 0.5, 0.5, Math.max(2, scale) + 1, rows - 1);
  }
}

const GUTTER = 30;

function fit(canvas, width, height, ratio) {
  const w = Math.round(width * ratio), h = Math.round(height * ratio);
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
  }
}

// The map with its axes: layers to the left, token numbers below.
function drawMap(context, run, lane, [from, to], shown, x, y, width, rows, colours, ratio) {
  const left = x + GUTTER, inner = width - GUTTER;
  paintMap(context, lane.view, from, to, shown, left, y, inner, rows, colours, ratio);
  context.fillStyle = colours.quiet;
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = rows / lane.layers > 9 ? 4 : lane.layers > 12 ? 10 : 5;
  for (let layer = 0; layer < lane.layers; layer += every)
    context.fillText(String(run.meta.layers[layer]), left - 6, y + Math.max(6, ((layer + 0.5) * rows) / lane.layers));
  context.textBaseline = "top";
  const count = Math.max(2, Math.floor(inner / 140));
  const step = niceStep((to - from) / count);
  for (let token = Math.ceil(from / step) * step; token < to; token += step) {
    const at = left + ((token - from) / (to - from)) * inner;
    context.textAlign = token === from ? "left" : at > left + inner - 24 ? "right" : "center";
    context.fillText(countOf(token), at, y + rows + 5);
  }
}

function niceStep(rough) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, rough)));
  for (const factor of [1, 2, 5, 10]) if (factor * power >= rough) return Math.max(1, factor * power);
  return power * 10;
}
