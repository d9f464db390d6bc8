"use strict";
// What became of one token, one layer's slots, and questions with their answers.

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text; // never markup
  return element;
}

function tokenName(run, token) {
  const text = printable(run.tokens[token]).replace(/\n/g, "↵");
  return text.trim() === "" ? `“${text.replace(/ /g, "␣") || "·"}”` : `“${text}”`;
}

// A token's history under one policy: a line per layer.
function historyList(run, lane, token, shown) {
  const part = make("div", "history");
  const history = lane.history(token, shown);
  const holding = history.reduce((sum, one) => sum + one.held / one.units, 0);
  const share = Number.isInteger(holding) ? holding : holding.toFixed(1);
  const title = run.lanes.length > 1 ? `${lane.policy}: held by ${share} of ${lane.layers} layers` : `Held by ${share} of ${lane.layers} layers`;
  part.append(make("p", "held", title));
  if (holding === lane.layers) return part;
  const list = make("ol", "layers");
  for (const one of history) {
    const line = make("li", one.held === one.units ? "is-held" : one.held ? "is-part" : "is-gone");
    line.append(make("b", "", String(run.meta.layers[one.layer])));
    line.append(make("span", "", historyText(one)));
    if (one.last >= 0) line.append(make("i", "", scoreText(one.score)));
    list.append(line);
  }
  part.append(list);
  return part;
}

function historyText(one) {
  if (one.held === one.units) return "held";
  if (one.held) return `${one.held}/${one.units} heads`;
  return `left at ${countOf(one.last)}`;
}

function tokenCard(run, token, shown) {
  const card = make("div", "token-card");
  const ago = shown - 1 - token;
  const when = ago === 0 ? "the newest" : `${countOf(ago)} token${ago === 1 ? "" : "s"} ago`;
  card.append(make("p", "token-name", tokenName(run, token)), make("p", "quiet", `Token ${countOf(token)}, ${when}`));
  const lists = make("div", "lists");
  for (const lane of run.lanes) lists.append(historyList(run, lane, token, shown));
  card.append(lists);
  card.append(make("p", "quiet key", "layer · left after token · score then"));
  return card;
}

class Tip {
  constructor(element) {
    this.element = element;
    this.token = null;
  }

  show(run, at, shown) {
    if (!at) { this.element.hidden = true; this.token = null; return; }
    if (this.token !== at.token || this.shown !== shown) this.element.replaceChildren(tokenCard(run, at.token, shown));
    this.token = at.token;
    this.shown = shown;
    this.element.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = this.element;
    const x = Math.max(8, Math.min(at.x + 16, innerWidth - width - 8));
    const below = at.y + 20, y = below + height > innerHeight - 8 ? Math.max(8, at.y - height - 16) : below;
    this.element.style.left = `${x}px`;
    this.element.style.top = `${y}px`;
  }
}

const CHIPS = 600; // more slots than a person looks at

class SlotsPanel {
  constructor(app) {
    this.app = app;
    this.list = document.getElementById("slots");
    this.about = document.getElementById("slots-about");
    this.laneSelect = document.getElementById("slots-lane");
    this.layerInput = document.getElementById("slots-layer");
    this.unitSelect = document.getElementById("slots-unit");
    this.orderSelect = document.getElementById("slots-order");
    this.visible = false;
    this.busy = false;
    this.fetched = null;
    this.last = 0;
    new IntersectionObserver((entries) => { this.visible = entries[0].isIntersecting; if (this.visible) this.refresh(true); }).observe(this.list.parentElement);
    for (const control of [this.laneSelect, this.layerInput, this.unitSelect, this.orderSelect])
      control.addEventListener("change", () => { this.fetched = null; this.options(); this.refresh(true); });
  }

  start(run) {
    this.fetched = null;
    this.laneSelect.replaceChildren(...run.lanes.map((lane, i) => new Option(lane.policy, i)));
    document.getElementById("slots-lane-label").hidden = run.lanes.length < 2;
    this.layerInput.max = run.lanes[0].layers - 1;
    this.layerInput.value = Math.floor(run.lanes[0].layers / 2);
    this.options();
  }

  options() {
    const lane = this.lane, units = lane.units[this.layer];
    if (this.unitSelect.options.length !== units)
      this.unitSelect.replaceChildren(...Array.from({ length: units }, (_, i) => new Option(i, i)));
    document.getElementById("slots-unit-label").hidden = units < 2;
  }

  choose(lane, layer) {
    this.laneSelect.value = lane;
    this.layerInput.value = layer;
    this.fetched = null;
    this.options();
    this.refresh(true);
  }

  get lane() { return this.app.run.lanes[Number(this.laneSelect.value) || 0]; }
  get layer() { return Math.max(0, Math.min(this.lane.layers - 1, Math.round(Number(this.layerInput.value)) || 0)); }
  get unit() { return Math.min(Number(this.unitSelect.value) || 0, this.lane.units[this.layer] - 1); }

  // Scores exist for the newest moment only; the server has them, or the file.
  async refresh(now = false) {
    const { app } = this;
    if (!app.run || !this.visible) return;
    const newest = app.shown === app.run.head;
    if (newest && app.run.slots) this.fetched = app.run.slots[this.app.run.lanes.indexOf(this.lane)][this.layer];
    else if (newest && app.live && !this.busy && (now || performance.now() - this.last > 250)) await this.fetch();
    this.draw();
  }

  async fetch() {
    this.busy = true;
    this.last = performance.now();
    const lane = this.app.run.lanes.indexOf(this.lane), layer = this.layer;
    try {
      const data = await this.app.live.slots(lane, layer);
      if (data && lane === this.app.run.lanes.indexOf(this.lane) && layer === this.layer) this.fetched = data;
    } finally {
      this.busy = false;
    }
  }

  draw() {
    const { app } = this;
    const scores = new Map();
    const unit = this.fetched && this.fetched.units[this.unit];
    // between two answers of the server the newest scores are those of a few tokens ago
    const fresh = unit && app.shown - this.fetched.seen >= 0 && app.shown - this.fetched.seen <= 128;
    if (fresh) unit.positions.forEach((position, i) => scores.set(position, unit.scores[i]));
    let tokens = this.lane.heldBy(this.layer, this.unit, app.shown);
    const [capacity, first, last] = ["capacities", "first", "last"].map((name) => this.lane.setting(name, this.layer, this.unit));
    const known = tokens.filter((token) => scores.has(token) && token >= first && token <= app.shown - last); // free in the next step
    const lowest = this.lane.byAge || !known.length ? null : known.reduce((a, b) => (scores.get(b) < scores.get(a) ? b : a));
    if (this.orderSelect.value === "score") tokens.sort((a, b) => (scores.get(a) ?? Infinity) - (scores.get(b) ?? Infinity) || a - b);
    const count = capacity ? `${countOf(tokens.length)} of ${countOf(capacity)} slots in use` : `${countOf(tokens.length)} tokens held`;
    const safe = [first && `the first ${countOf(first)}`, last && `the newest ${countOf(last)}`].filter(Boolean).join(" or ");
    const rule = this.lane.byAge ? "this policy drops by age, whatever the score" : `the lowest score leaves next${safe && `, but none of ${safe}`}`;
    this.about.textContent = fresh ? `${count} after token ${countOf(this.fetched.seen - 1)}; bar: score, ${rule}.` : `${count}. Scores are shown at the newest token.`;
    const more = tokens.length - CHIPS;
    tokens = tokens.slice(0, CHIPS);
    this.chips(tokens, scores, lowest, more);
  }

  chips(tokens, scores, lowest, more) {
    const { run } = this.app;
    const negative = tokens.some((token) => scores.get(token) < 0);
    const logs = tokens.map((token) => (negative ? scores.get(token) || 0 : Math.log(scores.get(token) || 1e-9)));
    const low = Math.min(...logs.filter(Number.isFinite)), high = Math.max(...logs);
    const list = this.list;
    while (list.children.length > tokens.length + (more > 0 ? 1 : 0)) list.lastChild.remove();
    tokens.forEach((token, i) => {
      let chip = list.children[i];
      if (!chip || !chip.firstChild.nextSibling) {
        const fresh = make("li", "chip");
        fresh.append(make("span"), make("i"));
        chip ? chip.replaceWith(fresh) : list.append(fresh);
        chip = fresh;
      }
      const text = tokenName(run, token).slice(1, -1).trim() || "␣";
      if (chip.firstChild.textContent !== text) chip.firstChild.textContent = text;
      chip.className = token === lowest ? "chip lowest" : "chip";
      chip.dataset.token = token;
      chip.title = `Token ${countOf(token)}${scores.has(token) ? `, score ${scoreText(scores.get(token))}` : ""}`;
      chip.lastChild.style.width = scores.has(token) ? `${8 + 92 * ((logs[i] - low) / (high - low || 1))}%` : "0";
    });
    if (more > 0) {
      const rest = make("li", "more", `and ${countOf(more)} more`);
      list.children[tokens.length] ? list.children[tokens.length].replaceWith(rest) : list.append(rest);
    }
  }
}

class AnswersPanel {
  constructor(app) {
    this.app = app;
    this.element = document.getElementById("answers");
    this.cards = [];
  }

  clear() {
    this.element.replaceChildren();
    this.cards = [];
  }

  update(number) {
    const { run } = this.app;
    const question = run.questions[number];
    let card = this.cards[number];
    if (!card) {
      card = this.cards[number] = make("article", "question");
      card.append(make("h3", "", question.text), make("p", "quiet", `Asked after ${countOf(question.seen)} tokens`));
      card.answers = make("div", "answer-list");
      card.sources = make("div", "sources");
      card.append(card.answers, card.sources);
      this.element.prepend(card);
    }
    this.answers(card, question);
    if (question.sources && !card.sources.firstChild) this.sources(card, question);
  }

  answers(card, question) {
    const { run } = this.app;
    const names = [...run.lanes.map((lane, i) => [`lane${i}`, lane.policy]), ["full", "full attention"]];
    for (const [key, label] of names) {
      const answer = question.answers[key];
      if (!answer) continue;
      let box = card.answers.querySelector(`[data-lane="${key}"]`);
      if (!box) {
        box = make("div", "answer");
        box.dataset.lane = key;
        box.append(make("h4", "", label), make("p"));
        card.answers.append(box);
      }
      box.lastChild.textContent = answer.text.trim() + (answer.done ? "" : " ▍");
      if (answer.done && !answer.text.trim()) box.lastChild.textContent = "(no answer)";
    }
  }

  sources(card, question) {
    const { run } = this.app;
    const how = question.sources.by === "attention" ? "where full attention looked while it answered" : "passages that share words with question and answers";
    card.sources.append(make("h4", "", `Sources: ${how}`));
    if (!question.sources.passages.length) card.sources.append(make("p", "quiet", "None were located."));
    for (const passage of question.sources.passages) card.sources.append(this.passage(run, passage, question.seen));
  }

  // A passage once per policy, shaded as it was when the question was asked.
  passage(run, passage, seen) {
    const box = make("div", "passage");
    for (const lane of run.lanes) {
      let sum = 0;
      const line = make("p", "passage-text");
      for (let token = passage.start; token < passage.end; token++) {
        const history = lane.history(token, seen);
        const share = history.reduce((total, one) => total + one.held / one.units, 0) / lane.layers;
        sum += share;
        const level = share === 0 ? 0 : Math.max(1, Math.round(share * LEVELS));
        const span = make("span", `lv${level}`, printable(run.tokens[token]).replace(/\n/g, " "));
        span.dataset.token = token;
        line.append(span);
      }
      const mean = sum / (passage.end - passage.start);
      const verdict = mean < 0.005 ? "forgotten by every layer" : `held by ${Math.max(1, Math.round(mean * 100))} % of the layers`;
      const name = run.lanes.length > 1 ? `${lane.policy}: ` : "";
      const jump = make("button", "jump", `Token ${countOf(passage.start)}`);
      jump.type = "button";
      jump.addEventListener("click", () => { this.app.select(passage.start, 0); this.app.reveal(passage.start); });
      const head = make("p", "verdict", `${name}${verdict}`);
      head.prepend(jump, " ");
      box.append(head, line);
    }
    return box;
  }
}
