"use strict";
// What a run has published, as typed arrays; and the state of every token at any moment, rebuilt from them.
// Nothing here touches the page.

const NOBODY = 0xffff;
const ALIVE = 0x7fffffff;
const LEVELS = 8;

const KIND = { text: 0, template: 1, user: 2, model: 3 };

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

// Scores are bfloat16: the upper half of a float32.
const word32 = new Uint32Array(1), float32 = new Float32Array(word32.buffer);
function unpackScore(code) {
  word32[0] = code << 16;
  return float32[0];
}

function grown(array, length, fill) {
  if (length <= array.length) return array;
  const larger = new array.constructor(Math.max(length, array.length * 2, 1024));
  larger.set(array);
  if (fill) larger.fill(fill, array.length);
  return larger;
}

// One policy's evictions. Row r is one unit (a decider) of a layer; tokens are the outer index everywhere.
class Lane {
  constructor(about) {
    this.policy = about.policy;
    this.units = about.units;
    this.about = about;
    this.byAge = about.by_age;
    this.layers = about.units.length;
    this.rowStart = [];
    this.layerOf = [];
    about.units.forEach((count, layer) => {
      this.rowStart.push(this.layerOf.length);
      for (let unit = 0; unit < count; unit++) this.layerOf.push(layer);
    });
    this.rows = this.layerOf.length;
    this.deaths = new Int32Array(0); // [token * rows + row]: the step after which the token left
    this.deathScores = new Uint16Array(0);
    this.ages = new Uint16Array(0); // [step * rows + row]: how old the token was that left after the step
    this.stepwise = true; // false: several tokens may leave in one step, so ages do not say it
    this.scored = false;
    this.nll = new Float64Array(0); // sums
    this.nllCount = 0;
    this.bytes = []; // [tokens, bytes]
    this.view = new View(this);
  }

  add(start, count, message) {
    const rows = this.rows;
    this.deaths = grown(this.deaths, (start + count) * rows, ALIVE);
    this.deaths.fill(ALIVE, start * rows, (start + count) * rows);
    if (message.left) this.addSteps(start, count, message);
    if (message.deaths) this.addDeaths(start, count, message);
    if (message.nll) this.addNll(start, count, message.nll);
    if (message.bytes !== undefined) this.bytes.push([start + count, message.bytes]);
  }

  addSteps(start, count, message) {
    const rows = this.rows;
    const left = new Uint16Array(bytesOf(message.left).buffer);
    const scores = new Uint16Array(bytesOf(message.scores).buffer);
    this.scored = true;
    this.ages = grown(this.ages, (start + count) * rows, NOBODY);
    this.deathScores = grown(this.deathScores, (start + count) * rows);
    for (let row = 0; row < rows; row++) {
      for (let i = 0; i < count; i++) {
        const age = left[row * count + i];
        const step = start + i;
        this.ages[step * rows + row] = age;
        if (age === NOBODY) continue;
        this.deaths[(step - age) * rows + row] = step;
        this.deathScores[(step - age) * rows + row] = scores[row * count + i];
      }
    }
  }

  addDeaths(start, count, message) {
    const deaths = new Int32Array(bytesOf(message.deaths).buffer); // [rows, count]
    this.stepwise = false;
    for (let row = 0; row < this.rows; row++)
      for (let i = 0; i < count; i++) this.deaths[(start + i) * this.rows + row] = deaths[row * count + i];
  }

  addNll(start, count, text) {
    const nll = new Float32Array(bytesOf(text).buffer);
    this.nll = grown(this.nll, start + count + 1);
    for (let i = 0; i < count; i++)
      this.nll[start + i + 1] = this.nll[start + i] + (Number.isNaN(nll[i]) ? 0 : nll[i]);
    this.nllCount = start + count;
  }

  // Perplexity of the first `tokens` tokens, all but the very first of which were predicted.
  perplexity(tokens) {
    const n = Math.min(tokens, this.nllCount);
    return n < 2 ? NaN : Math.exp(this.nll[n] / (n - 1));
  }

  bytesAt(tokens) {
    let low = 0, high = this.bytes.length - 1;
    if (high < 0) return NaN;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.bytes[middle][0] < tokens) low = middle + 1;
      else high = middle;
    }
    return this.bytes[low][1];
  }

  // A unit's number in one of the policy's lists: KV heads of one layer may differ. 0 where it is not known.
  setting(name, layer, unit) {
    const values = (this.about[name] || [])[layer];
    return (Array.isArray(values) ? values[unit] : values) || 0;
  }

  // What became of a token, layer by layer: how many units hold it, when the last one dropped it, its score then.
  history(token, tokens) {
    const out = [];
    for (let layer = 0; layer < this.layers; layer++) {
      let held = 0, last = -1, score = NaN;
      for (let unit = 0; unit < this.units[layer]; unit++) {
        const index = token * this.rows + this.rowStart[layer] + unit;
        const death = this.deaths[index];
        if (death >= tokens) held++;
        else if (death > last) {
          last = death;
          if (this.scored) score = unpackScore(this.deathScores[index]);
        }
      }
      out.push({ layer, held, units: this.units[layer], last, score });
    }
    return out;
  }

  // The tokens that a unit holds when `tokens` tokens have been read.
  heldBy(layer, unit, tokens) {
    const row = this.rowStart[layer] + unit, out = [];
    for (let token = 0; token < tokens; token++) if (this.deaths[token * this.rows + row] >= tokens) out.push(token);
    return out;
  }
}

// Every token's state when `at` tokens have been read. Moving on is cheap; going back starts over.
class View {
  constructor(lane) {
    this.lane = lane;
    this.at = 0;
    this.held = new Uint8Array(0); // [token * layers + layer]: units that hold it
    this.drop = new Int32Array(0); // the step after which the last unit so far dropped it, -1 for none
  }

  move(tokens) {
    if (tokens === this.at) return;
    const { lane } = this;
    const layers = lane.layers;
    this.held = grown(this.held, tokens * layers);
    const before = this.drop.length;
    this.drop = grown(this.drop, tokens * layers);
    if (this.drop.length > before) this.drop.fill(-1, before);
    if (tokens < this.at || !lane.stepwise) this.rebuild(tokens);
    else this.advance(tokens);
    this.at = tokens;
  }

  advance(tokens) {
    const { lane, held, drop } = this;
    const { rows, layers, ages, layerOf, units } = lane;
    for (let step = this.at; step < tokens; step++) {
      for (let layer = 0; layer < layers; layer++) {
        held[step * layers + layer] = units[layer];
        drop[step * layers + layer] = -1;
      }
      for (let row = 0; row < rows; row++) {
        const age = ages[step * rows + row];
        if (age === NOBODY) continue;
        const index = (step - age) * layers + layerOf[row];
        held[index]--;
        drop[index] = step;
      }
    }
  }

  rebuild(tokens) {
    const { lane, held, drop } = this;
    const { rows, layers, deaths, layerOf } = lane;
    held.fill(0, 0, tokens * layers);
    drop.fill(-1, 0, tokens * layers);
    for (let token = 0; token < tokens; token++) {
      for (let row = 0; row < rows; row++) {
        const death = deaths[token * rows + row];
        const index = token * layers + layerOf[row];
        if (death >= tokens) held[index]++;
        else if (death > drop[index]) drop[index] = death;
      }
    }
  }

  // How many layers hold a token, where a layer whose heads differ counts in part.
  layersHolding(token) {
    const { lane, held } = this;
    let sum = 0;
    for (let layer = 0; layer < lane.layers; layer++) sum += held[token * lane.layers + layer] / lane.units[layer];
    return sum;
  }

  level(token) {
    const share = this.layersHolding(token) / this.lane.layers;
    return share === 0 ? 0 : Math.max(1, Math.round(share * LEVELS));
  }

  // The mean number of tokens that a layer holds.
  mean() {
    const { lane, held } = this;
    let sum = 0;
    const inverse = lane.units.map((count) => 1 / count);
    for (let index = 0, layer = 0; index < this.at * lane.layers; index++) {
      sum += held[index] * inverse[layer];
      if (++layer === lane.layers) layer = 0;
    }
    return sum / lane.layers;
  }
}

// A whole run: tokens, lanes, what full attention would take, questions and answers.
class Run {
  constructor(meta) {
    this.meta = meta;
    this.lanes = meta.lanes.map((about) => new Lane(about));
    this.full = new Lane({ policy: "full attention", units: [] });
    this.fullBytes = [];
    this.tokens = [];
    this.kinds = [];
    this.questions = [];
    this.slots = null;
  }

  get head() {
    return this.tokens.length;
  }

  addPiece(piece) {
    if (piece.start !== this.head) return; // a message that came twice
    const count = piece.tokens.length;
    for (const text of piece.tokens) {
      this.tokens.push(text);
      this.kinds.push(piece.kind);
    }
    piece.lanes.forEach((message, i) => this.lanes[i].add(piece.start, count, message));
    if (piece.full) this.full.add(piece.start, count, piece.full);
    if (piece.full_bytes !== undefined) this.fullBytes.push([piece.start + count, piece.full_bytes]);
  }

  fullBytesAt(tokens) {
    const last = this.fullBytes[this.fullBytes.length - 1];
    return last ? (last[1] * tokens) / last[0] : NaN;
  }

  handle(event, message) {
    if (event === "piece") this.addPiece(message);
    else if (event === "question") this.questions[message.number] = { ...message, answers: {}, sources: null };
    else if (event === "answer") {
      const answers = this.questions[message.number].answers;
      const answer = (answers[message.lane] = answers[message.lane] || { text: "", done: false });
      answer.text += message.text;
      answer.done = !!message.done;
    } else if (event === "sources") this.questions[message.number].sources = message;
  }
}

function countOf(number) {
  return Math.round(number).toLocaleString("en-US");
}

function humanBytes(count) {
  if (!Number.isFinite(count)) return "–";
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  while (count >= 1024 && unit < 3) { count /= 1024; unit++; }
  return unit === 0 ? `${count} B` : `${count.toFixed(count < 100 ? 1 : 0)} ${units[unit]}`;
}

function scoreText(score) {
  if (!Number.isFinite(score)) return "";
  if (score === 0) return "0";
  return Math.abs(score) >= 0.001 ? score.toPrecision(2) : score.toExponential(1);
}
