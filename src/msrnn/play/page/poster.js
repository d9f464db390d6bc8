"use strict";
// A run as one picture: the map, both charts, and what they mean.

function poster(run, shown) {
  const colours = palette();
  const width = 1600, margin = 48, lanes = run.lanes.length;
  const rows = lanes > 1 ? 210 : 300;
  const mapTop = 150, mapStep = rows + 62;
  const chartTop = mapTop + lanes * mapStep + 20;
  const height = chartTop + 330;
  const canvas = document.createElement("canvas");
  const scale = 1.5;
  canvas.width = width * scale;
  canvas.height = height * scale;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = colours.card;
  context.fillRect(0, 0, width, height);
  const say = (text, x, y, size, weight = 400, colour = colours.ink) => {
    context.font = `${weight} ${size}px system-ui, sans-serif`;
    context.fillStyle = colour;
    context.textAlign = "left";
    context.textBaseline = "alphabetic";
    context.fillText(text, x, y);
  };
  say("What a bounded transformer keeps", margin, 64, 30, 650);
  say(`${run.meta.model} · ${countOf(shown)} tokens read · ${run.lanes.map((lane) => lane.policy).join(" and ")}`, margin, 96, 18, 400, colours.quiet);
  run.lanes.forEach((lane, i) => {
    const top = mapTop + i * mapStep;
    lane.view.move(shown);
    say(`${lane.policy}: one row a layer, one column a token; dark: still held`, margin, top - 12, 15, 600);
    drawMap(context, run, lane, [0, shown], shown, margin, top, width - 2 * margin, rows, colours, scale);
  });
  const half = (width - 3 * margin) / 2;
  say("Memory", margin, chartTop + 8, 15, 600);
  drawMemory(context, run, shown, { x: margin, y: chartTop + 20, width: half, height: 220 }, colours);
  key(context, memorySeries(run, shown, colours), margin + 52, chartTop + 262, say);
  if (run.lanes.some((lane) => lane.nllCount)) {
    const x = 2 * margin + half;
    say("Perplexity so far", x, chartTop + 8, 15, 600);
    drawPerplexity(context, run, shown, { x, y: chartTop + 20, width: half, height: 220 }, colours);
    key(context, perplexitySeries(run, shown, colours), x + 52, chartTop + 262, say);
  }
  say("drawn by msrnn play", margin, height - 24, 13, 400, colours.quiet);
  return canvas;
}

function key(context, series, x, y, say) {
  for (const one of series) {
    context.strokeStyle = one.colour;
    context.lineWidth = 2;
    context.setLineDash(one.dash);
    context.beginPath();
    context.moveTo(x, y - 5);
    context.lineTo(x + 28, y - 5);
    context.stroke();
    context.setLineDash([]);
    say(one.label, x + 36, y, 14);
    x += 60 + context.measureText(one.label).width;
  }
}

function savePng(run, shown) {
  return new Promise((resolve) => poster(run, shown).toBlob((blob) => { download(blob, "msrnn-run.png"); resolve(); }));
}

function download(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
