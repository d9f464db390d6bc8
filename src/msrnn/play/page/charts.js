"use strict";
// Two small line charts over tokens read: bytes and perplexity. Lines differ in colour and in dashes.

// series: [{label, colour, dash, points: [[x, y], ...]}]; drawn into a rectangle of a context.
function drawLines(context, series, box, options, colours) {
  const { x, y, width, height } = box;
  const left = x + 52, top = y + 8, inner = { width: width - 60, height: height - 30 };
  const all = series.flatMap((one) => one.points);
  const right = Math.max(options.right || 1, 1);
  const { low, high, ticks } = scaleOf(all, options);
  const px = (value) => left + (value / right) * inner.width;
  const py = (value) => top + inner.height - ((options.map(value) - low) / (high - low || 1)) * inner.height;
  context.font = "11px system-ui, sans-serif";
  context.lineWidth = 1;
  context.setLineDash([]);
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const tick of ticks) {
    context.strokeStyle = colours.rule;
    context.beginPath();
    context.moveTo(left, Math.round(py(tick)) + 0.5);
    context.lineTo(left + inner.width, Math.round(py(tick)) + 0.5);
    context.stroke();
    context.fillStyle = colours.quiet;
    context.fillText(options.format(tick), left - 6, py(tick));
  }
  context.textBaseline = "top";
  context.textAlign = "left";
  context.fillText("0", left, top + inner.height + 6);
  context.textAlign = "right";
  context.fillText(`${countOf(right)} tokens`, left + inner.width, top + inner.height + 6);
  context.save();
  context.beginPath();
  context.rect(left, y, inner.width + 2, top - y + inner.height + 2);
  context.clip();
  for (const one of series) drawLine(context, one, px, py);
  context.restore();
}

function drawLine(context, one, px, py) {
  if (!one.points.length) return;
  context.strokeStyle = one.colour;
  context.lineWidth = 2;
  context.setLineDash(one.dash);
  context.beginPath();
  one.points.forEach(([a, b], i) => (i ? context.lineTo(px(a), py(b)) : context.moveTo(px(a), py(b))));
  context.stroke();
  context.setLineDash([]);
}

function scaleOf(points, options) {
  // a mean over few tokens says little and would stretch the axis: the first part of the text does not count
  const from = options.zero ? 0 : Math.min(options.right * 0.5, Math.max(2 * WARM_UP, options.right * 0.06));
  const values = points.filter(([tokens]) => tokens >= from).map(([, value]) => options.map(value)).filter(Number.isFinite);
  let low = options.zero ? 0 : Math.min(...values), high = Math.max(...values);
  if (!values.length) return { low: 0, high: 1, ticks: [] };
  if (high - low < 1e-9) { high += Math.abs(high) * 0.5 + 1e-9; if (!options.zero) low -= Math.abs(low) * 0.1; }
  return { low, high: high + (high - low) * 0.06, ticks: options.ticks(low, high) };
}

function byteTicks(low, high) {
  const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(high, 1)) / 10));
  const step = niceStep2(high / unit / 4) * unit;
  const ticks = [];
  for (let tick = 0; tick <= high; tick += step) ticks.push(tick);
  return ticks;
}

function niceStep2(rough) {
  const power = 2 ** Math.floor(Math.log2(Math.max(rough, 1 / 1024)));
  return rough > power ? power * 2 : power;
}

// Perplexity is drawn on a logarithmic axis.
function perplexityTicks(low, high) {
  const ticks = [];
  for (let power = 0; power < 7; power++)
    for (const factor of high - low < 0.7 ? [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8] : high - low < 2 ? [1, 1.5, 2, 3, 5, 7] : [1, 2, 5]) {
      const value = Math.round(factor * 10 ** power * 10) / 10;
      if (Math.log(value) >= low - 1e-9 && Math.log(value) <= high + 1e-9) ticks.push(value);
    }
  return ticks.length ? ticks : [Math.round(Math.exp((low + high) / 2) * 10) / 10];
}

// At most `count` points of a function of the number of tokens.
function sampled(tokens, start, count, value) {
  const points = [], step = Math.max(1, (tokens - start) / count);
  for (let at = start; at < tokens; at += step) points.push([Math.floor(at), value(Math.floor(at))]);
  if (tokens >= start) points.push([tokens, value(tokens)]);
  return points.filter(([, y]) => Number.isFinite(y));
}

function memorySeries(run, shown, colours) {
  const series = [{ label: "full attention", colour: colours.full, dash: [2, 3], points: sampled(shown, 0, 60, (n) => run.fullBytesAt(n)) }];
  run.lanes.forEach((lane, i) => series.push({
    label: lane.policy, colour: colours.lanes[i], dash: i ? [7, 4] : [], points: sampled(shown, 1, 60, (n) => lane.bytesAt(n)),
  }));
  return series;
}

const WARM_UP = 16;

function perplexitySeries(run, shown, colours) {
  const series = run.lanes.map((lane, i) => ({
    label: lane.policy, colour: colours.lanes[i], dash: i ? [7, 4] : [],
    points: sampled(Math.min(shown, lane.nllCount), WARM_UP, 160, (n) => lane.perplexity(n)),
  }));
  if (run.full.nllCount) series.unshift({
    label: "full attention", colour: colours.full, dash: [2, 3],
    points: sampled(Math.min(shown, run.full.nllCount), WARM_UP, 160, (n) => run.full.perplexity(n)),
  });
  return series;
}

function drawMemory(context, run, shown, box, colours) {
  const options = { zero: true, map: (v) => v, ticks: byteTicks, format: (v) => (v ? humanBytes(v).replace(".0 ", " ") : "0"), right: shown };
  drawLines(context, memorySeries(run, shown, colours), box, options, colours);
}

function drawPerplexity(context, run, shown, box, colours) {
  const options = { zero: false, map: (v) => Math.log(v), ticks: perplexityTicks, format: String, right: shown };
  drawLines(context, perplexitySeries(run, shown, colours), box, options, colours);
}

function drawChart(canvas, draw, run, shown, colours) {
  const ratio = window.devicePixelRatio || 1, width = canvas.parentElement.clientWidth - 2 * 14, height = 130;
  fit(canvas, width, height, ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  draw(context, run, shown, { x: 0, y: 0, width, height }, colours);
}
