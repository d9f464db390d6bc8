"use strict";
// The text as lines of shaded tokens. Lines have one height, so only those in view exist; breaks are found by measuring.

const LINE = 28; // pixels
const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f\u200b-\u200f\u202a-\u202e\u2066-\u2069]/g;

function printable(text) {
  return text.replace(/\r/g, "").replace(/\t/g, "    ").replace(CONTROL, "␦");
}

// Where lines break, for a width; shared by the panes of all lanes.
class Layout {
  constructor(run) {
    this.run = run;
    this.context = document.createElement("canvas").getContext("2d");
    this.cache = new Map();
    this.reset(600, "16px sans-serif");
  }

  reset(width, font) {
    this.width = width;
    if (font !== this.font) this.cache.clear();
    this.font = this.context.font = font;
    this.lines = [[]]; // each a list of [token, text]
    this.lineOf = []; // the first line of each token
    this.x = 0;
    this.done = 0;
  }

  measure(text) {
    let width = this.cache.get(text);
    if (width === undefined) this.cache.set(text, (width = this.context.measureText(text).width));
    return width;
  }

  // Lay out the tokens that came since; true if there were any.
  extend() {
    if (this.done === this.run.head) return false;
    for (; this.done < this.run.head; this.done++) this.place(this.done, printable(this.run.tokens[this.done]));
    return true;
  }

  place(token, text) {
    const parts = text === "" ? ["·"] : text.split("\n");
    parts.forEach((part, i) => {
      const last = i === parts.length - 1;
      const shown = last ? part : part + "↵";
      if (shown || parts.length === 1) this.put(token, shown || "·");
      if (!last) this.newLine([]);
    });
  }

  put(token, text) {
    const width = this.measure(text);
    const line = this.lines[this.lines.length - 1];
    if (this.x + width > this.width && line.length > 0) {
      const start = this.wordStart(line, text);
      this.newLine(start < line.length ? line.splice(start) : []);
    }
    this.lines[this.lines.length - 1].push([token, text]);
    if (this.lineOf[token] === undefined) this.lineOf[token] = this.lines.length - 1;
    this.x += width;
  }

  // Where the word begins that would be cut in two by a break here; the line's end if none would.
  wordStart(line, text) {
    if (/^\s/.test(text)) return line.length;
    for (let i = line.length - 1; i > 0 && line.length - i < 12; i--) {
      if (/^\s/.test(line[i][1])) return i;
      if (/\s$/.test(line[i][1])) return i + 1;
    }
    return line.length;
  }

  newLine(words) {
    this.lines.push(words);
    this.x = 0;
    for (const [token, text] of words) {
      this.lineOf[token] = this.lines.length - 1;
      this.x += this.measure(text);
    }
  }
}

// One lane's pane.
class TextPane {
  constructor(app, lane, index) {
    this.app = app;
    this.lane = lane;
    this.element = document.createElement("div");
    this.element.className = "pane";
    this.title = document.createElement("h3");
    this.title.textContent = lane.policy;
    this.title.hidden = app.run.lanes.length < 2;
    this.box = document.createElement("div");
    this.box.className = "lines";
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "application");
    this.box.setAttribute("aria-roledescription", "text, token by token");
    this.box.setAttribute("aria-label", `The text under ${lane.policy}. Arrow keys move from token to token.`);
    this.space = document.createElement("div");
    this.space.className = "space";
    this.box.append(this.space);
    this.element.append(this.title, this.box);
    this.rows = new Map(); // line -> {element, spans}
    this.index = index;
    this.box.addEventListener("scroll", () => app.scrolled(this), { passive: true });
    this.box.addEventListener("wheel", () => app.setFollow(false), { passive: true });
    this.box.addEventListener("touchmove", () => app.setFollow(false), { passive: true });
    this.box.addEventListener("pointerover", (event) => this.point(event));
    this.box.addEventListener("pointerleave", () => app.hover(null));
    this.box.addEventListener("click", (event) => {
      const token = tokenOf(event.target);
      if (token !== null) app.select(token, this.index);
    });
    this.box.addEventListener("keydown", (event) => this.key(event));
  }

  point(event) {
    const token = tokenOf(event.target);
    this.app.hover(token === null ? null : { token, lane: this.index, x: event.clientX, y: event.clientY });
  }

  key(event) {
    const moves = { ArrowLeft: -1, ArrowRight: 1 };
    const { app } = this;
    const token = app.selected === null ? Math.max(0, app.shown - 1) : app.selected;
    let next = null;
    if (event.key in moves) next = app.selected === null ? token : token + moves[event.key];
    else if (event.key === "ArrowUp" || event.key === "ArrowDown") next = this.vertical(token, event.key === "ArrowUp" ? -1 : 1);
    if (next === null) return;
    event.preventDefault();
    app.setFollow(false);
    app.select(Math.max(0, Math.min(app.shown - 1, next)), this.index);
    this.reveal(app.selected);
  }

  vertical(token, step) {
    const layout = this.app.layout;
    for (let line = layout.lineOf[token] + step; line >= 0 && line < layout.lines.length; line += step)
      if (layout.lines[line].length) return layout.lines[line][0][0];
    return token;
  }

  reveal(token) {
    const top = this.app.layout.lineOf[token] * LINE;
    if (top < this.box.scrollTop || top > this.box.scrollTop + this.box.clientHeight - 2 * LINE)
      this.box.scrollTop = top - this.box.clientHeight / 2;
  }

  // Keep the newest shown line in view.
  follow() {
    const { layout, shown } = this.app;
    if (!shown) return;
    const bottom = (layout.lineOf[shown - 1] + 2) * LINE;
    const top = Math.max(0, Math.ceil((bottom - this.box.clientHeight) / LINE) * LINE); // whole lines
    if (Math.abs(this.box.scrollTop - top) > 1) this.box.scrollTop = top;
  }

  draw() {
    const { layout, shown } = this.app;
    const height = `${layout.lines.length * LINE}px`;
    if (this.space.style.height !== height) this.space.style.height = height;
    const first = Math.max(0, Math.floor(this.box.scrollTop / LINE) - 4);
    const last = Math.min(layout.lines.length - 1, Math.ceil((this.box.scrollTop + this.box.clientHeight) / LINE) + 4);
    for (const [line, row] of this.rows)
      if (line < first || line > last) { row.element.remove(); this.rows.delete(line); }
    for (let line = first; line <= last; line++) this.drawLine(line, layout.lines[line], shown);
  }

  drawLine(line, words, shown) {
    let row = this.rows.get(line);
    // the last line still grows and may lose its last word to the next one
    if (row && (row.spans.length !== words.length || (row.spans.length && row.spans[row.spans.length - 1].token !== words[words.length - 1][0]))) {
      row.element.remove();
      row = undefined;
    }
    if (!row) {
      row = this.makeRow(line, words);
      this.rows.set(line, row);
      this.space.append(row.element);
    }
    const { view } = this.lane;
    for (const span of row.spans) {
      const name = span.token >= shown ? "ahead" : `lv${view.level(span.token)}`;
      const full = name + span.kind + (span.token === this.app.selected ? " on" : "") + (span.token === shown - 1 ? " now" : "");
      if (full !== span.name) span.element.className = span.name = full;
    }
  }

  makeRow(line, words) {
    const element = document.createElement("div");
    element.className = "line";
    element.style.top = `${line * LINE}px`;
    const names = ["", " template", " user", " model"];
    const spans = words.map(([token, text]) => {
      const span = document.createElement("span");
      span.textContent = text; // never markup
      span.dataset.token = token;
      element.append(span);
      return { element: span, token, name: "", kind: names[this.app.run.kinds[token]] };
    });
    return { element, spans };
  }

  clear() {
    for (const row of this.rows.values()) row.element.remove();
    this.rows.clear();
  }
}

function tokenOf(element) {
  const token = element && element.dataset ? element.dataset.token : undefined;
  return token === undefined ? null : Number(token);
}
