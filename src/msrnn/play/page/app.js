"use strict";
// The page: one run, one playhead, and the views that follow it. Views are drawn at most once a frame, if anything changed.

const $ = (id) => document.getElementById(id);

class App {
  constructor() {
    this.run = null;
    this.live = null;
    this.status = null;
    this.position = 0; // the playhead, in tokens; moves smoothly between messages
    this.shown = 0; // whole tokens shown
    this.playing = true;
    this.atHead = true; // the playhead goes where the newest token is
    this.follow = true;
    this.zoom = 0; // tokens in the map's view, 0: all
    this.selected = null;
    this.hovered = null;
    this.dirty = true;
    this.calm = true;
    this.tip = new Tip($("tip"));
    this.slots = new SlotsPanel(this);
    this.answers = new AnswersPanel(this);
    this.texts = [];
    this.maps = [];
    this.bind();
    this.setTheme(this.stored("theme") || "auto");
    requestAnimationFrame((now) => this.frame(now));
  }

  // runs

  show(run) {
    this.run = run;
    this.position = this.shown = 0;
    this.selected = this.hovered = null;
    this.zoom = run.meta.kind === "text" && run.meta.total > 3000 ? 1500 : 0;
    this.layout = new Layout(run);
    this.texts = run.lanes.map((lane, i) => new TextPane(this, lane, i));
    this.maps = run.lanes.map((lane, i) => new MapPane(this, lane, i));
    $("texts").replaceChildren(...this.texts.map((pane) => pane.element));
    $("texts").classList.toggle("two", run.lanes.length > 1);
    $("maps").replaceChildren(...this.maps.map((pane) => pane.element));
    $("legend-layers").textContent = run.lanes[0].layers;
    $("about").textContent = `${run.meta.model} · ${run.lanes.map((lane) => lane.policy).join(" vs. ")}`;
    $("perplexity-card").hidden = false;
    $("stage").hidden = false;
    $("intro").hidden = true;
    $("say-form").hidden = run.meta.kind !== "chat";
    $("token").replaceChildren(make("p", "quiet", "Point at a token, or move through the text with the arrow keys."));
    this.answers.clear();
    this.slots.start(run);
    this.setFollow(true);
    this.atHead = true;
    this.resize();
    $("zoom-fit").setAttribute("aria-pressed", String(this.zoom === 0));
  }

  get head() { return this.run ? this.run.head : 0; }

  // The tokens that the map shows: [from, to).
  span() {
    const total = Math.max(this.run.meta.kind === "chat" ? this.head : Math.max(this.run.meta.total || 0, this.head), 1);
    if (!this.zoom || this.zoom >= total) return [0, total];
    const anchor = this.follow || this.selected === null ? this.shown : this.selected + this.zoom / 2;
    const to = Math.round(Math.max(this.zoom, Math.min(total, anchor + this.zoom * 0.02)));
    return [to - this.zoom, to];
  }

  // the playhead

  frame(now) {
    requestAnimationFrame((next) => this.frame(next));
    const passed = Math.min(0.25, (now - (this.before || now)) / 1000);
    this.before = now;
    if (!this.run) return;
    this.advance(passed);
    if (this.dirty) this.draw(now);
  }

  advance(seconds) {
    const head = this.head;
    if (this.position > head) this.position = head;
    if (this.playing && this.position < head) {
      const speed = Number($("speed").value);
      const behind = head - this.position;
      // at full speed, and when the server is ahead, gaps between messages are evened out
      const rate = speed ? speed + (this.live && this.atHead ? Math.max(0, behind - speed * 0.6) * 1.5 : 0) : Math.max(60, behind * 2.5);
      this.position = Math.min(head, this.position + rate * seconds);
    }
    const shown = Math.floor(this.position);
    if (shown !== this.shown) { this.shown = shown; this.dirty = true; }
    if (shown === head && this.playing) {
      this.atHead = true;
      if (this.finished && head) { this.playing = false; this.showControls(); }
    }
  }

  seek(tokens, atHead = false) {
    this.position = Math.max(0, Math.min(this.head, tokens));
    this.atHead = atHead;
    this.dirty = true;
  }

  setFollow(follow) {
    this.follow = follow;
    $("follow").setAttribute("aria-pressed", String(follow));
    this.dirty = true;
  }

  async setPlaying(playing) {
    this.playing = playing;
    if (playing && this.finished && this.shown >= this.head) { this.seek(0); this.setFollow(true); }
    this.showControls();
    if (this.live && !this.finished) await this.tell(playing ? "play" : "pause");
  }

  async step() {
    if (this.playing) await this.setPlaying(false);
    if (this.shown < this.head) this.seek(this.shown + 1);
    else if (this.live && !this.finished) { this.stepping = true; await this.tell("step"); }
  }

  get finished() { return !this.status || ["done", "failed", "stopped"].includes(this.status.state); }

  async tell(action, more) {
    try {
      await this.live.control(action, more);
      return true;
    } catch (error) {
      this.alert(error.message);
      return false;
    }
  }

  // drawing

  draw(now) {
    this.dirty = false;
    const { run, shown } = this;
    this.calm = shown === this.head && (!this.playing || this.finished);
    for (const lane of run.lanes) lane.view.move(shown);
    this.layout.extend();
    this.colours = this.colours || palette();
    for (const pane of this.maps) pane.draw(this.colours);
    for (const pane of this.texts) { if (this.follow) pane.follow(); pane.draw(); }
    if (this.calm || !(now - this.slow < 150)) this.drawSlowly(now);
    else this.dirty = true;
    const time = $("time");
    time.max = this.head;
    if (document.activeElement !== time || this.playing) time.value = shown;
    const total = run.meta.kind === "text" && run.meta.total ? ` of ${countOf(run.meta.total)}` : "";
    $("clock").textContent = `${countOf(shown)}${total} tokens`;
    $("live").disabled = shown === this.head;
  }

  // What nobody needs sixty times a second.
  drawSlowly(now) {
    const { run, shown } = this;
    this.slow = now;
    drawChart($("memory"), drawMemory, run, shown, this.colours);
    const scored = run.lanes.some((lane) => lane.nllCount > 1);
    $("perplexity-card").hidden = !scored && shown > 2;
    if (scored) drawChart($("perplexity"), drawPerplexity, run, shown, this.colours);
    this.figures();
    this.slots.refresh();
    if (this.selected !== null) this.showToken();
    if (this.hovered) this.tip.show(run, this.hovered.token < shown ? this.hovered : null, shown);
    $("save-png").disabled = $("save-html").disabled = !shown;
  }

  figures() {
    const { run, shown } = this;
    const parts = (list, id) => {
      const box = $(id);
      box.replaceChildren(...list.map(([label, value, className]) => {
        const part = make("span", `part ${className}`);
        part.append(make("b", "", value), " ", label);
        return part;
      }));
      return list.map(([label, value]) => `${value} ${label}`).join(", ");
    };
    const names = run.lanes.length > 1 ? run.lanes.map((lane) => lane.policy) : ["bounded"];
    const memory = run.lanes.map((lane, i) => [names[i], humanBytes(lane.bytesAt(shown)), `lane-${i}`]).filter(([, value]) => value !== "–");
    if (run.fullBytes.length) memory.push(["full", humanBytes(Math.round(run.fullBytesAt(shown))), "lane-full"]);
    $("memory").setAttribute("aria-label", `Memory after ${countOf(shown)} tokens: ${parts(memory, "memory-now")}`);
    const show = (lane) => lane.perplexity(shown).toFixed(2);
    const quality = run.lanes.map((lane, i) => [names[i], show(lane), `lane-${i}`]);
    if (run.full.nllCount) quality.push([shown > run.full.nllCount ? `full, up to ${countOf(run.full.nllCount)} tokens` : "full", show(run.full), "lane-full"]);
    if (shown > 2) $("perplexity").setAttribute("aria-label", `Perplexity after ${countOf(shown)} tokens: ${parts(quality, "perplexity-now")}`);
  }

  resize() {
    if (!this.run) return;
    const pane = this.texts[0].box;
    const style = getComputedStyle(pane);
    this.layout.reset(Math.max(120, pane.clientWidth - 28), `${style.fontSize} ${style.fontFamily}`);
    for (const text of this.texts) text.clear();
    this.dirty = true;
  }

  // tokens

  hover(at) {
    this.hovered = at;
    this.tip.show(this.run, at && at.token < this.shown ? at : null, this.shown);
  }

  select(token, lane) {
    this.selected = token;
    this.showToken();
    this.dirty = true;
  }

  showToken() {
    if (this.selected >= this.shown) return;
    const key = `${this.selected} ${this.shown}`;
    if (key === this.tokenKey) return;
    this.tokenKey = key;
    $("token").replaceChildren(tokenCard(this.run, this.selected, this.shown));
  }

  reveal(token) {
    this.setFollow(false);
    this.layout.extend();
    for (const pane of this.texts) pane.reveal(token);
    this.dirty = true;
  }

  showLayer(lane, layer) { this.slots.choose(lane, layer); }

  scrolled(pane) {
    for (const other of this.texts) if (other !== pane && Math.abs(other.box.scrollTop - pane.box.scrollTop) > 1) other.box.scrollTop = pane.box.scrollTop;
    this.dirty = true;
  }

  setZoom(factor) {
    const [from, to] = this.span();
    const size = Math.round((to - from) * factor);
    const total = Math.max(this.run.meta.total || 0, this.head);
    this.zoom = factor === 0 || size >= total ? 0 : Math.max(60, size);
    $("zoom-fit").setAttribute("aria-pressed", String(this.zoom === 0));
    this.dirty = true;
  }

  // controls

  bind() {
    $("play").addEventListener("click", () => this.setPlaying(!this.playing));
    $("step").addEventListener("click", () => this.step());
    $("time").addEventListener("input", () => { if (this.playing) this.playing = false; this.seek(Number($("time").value)); this.showControls(); this.setFollow(true); });
    $("live").addEventListener("click", () => { this.seek(this.head, true); this.setFollow(true); });
    $("speed").addEventListener("change", () => { if (this.live && !this.finished) this.tell("speed", { speed: Number($("speed").value) || null }); });
    $("follow").addEventListener("click", () => this.setFollow(!this.follow));
    $("zoom-in").addEventListener("click", () => this.setZoom(0.5));
    $("zoom-out").addEventListener("click", () => this.setZoom(2));
    $("zoom-fit").addEventListener("click", () => this.setZoom(0));
    $("save-png").addEventListener("click", () => savePng(this.run, this.shown));
    $("theme").addEventListener("click", () => this.setTheme({ auto: "light", light: "dark", dark: "auto" }[document.documentElement.dataset.theme]));
    $("help-open").addEventListener("click", () => $("help").showModal());
    $("help").querySelector("button").addEventListener("click", (event) => { event.preventDefault(); $("help").close(); });
    $("alert-close").addEventListener("click", () => this.alert(""));
    addEventListener("keydown", (event) => this.key(event));
    addEventListener("scroll", () => this.hover(null), { passive: true });
    new ResizeObserver(() => this.resize()).observe($("texts"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.recolour());
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
    if (event.key === "Escape") { this.hover(null); return; }
    if (/^(INPUT|TEXTAREA|SELECT)$/.test(event.target.tagName)) return;
    if (event.key === "?") { $("help").showModal(); return; }
    if (!this.run) return;
    if (event.key === " " && !/^(BUTTON|SUMMARY)$/.test(event.target.tagName)) this.setPlaying(!this.playing);
    else if (event.key === ".") this.step();
    else if (event.key === "End") { this.seek(this.head, true); this.setFollow(true); }
    else return;
    event.preventDefault();
  }

  showControls() {
    const label = this.playing ? "Pause" : "Play";
    $("play").textContent = this.playing ? "❚❚" : "▶";
    $("play").setAttribute("aria-label", label);
    $("play").title = `${label} (space)`;
  }

  alert(text) {
    $("alert-text").textContent = text;
    $("alert").hidden = !text;
  }

  stored(name, value) {
    try {
      if (value !== undefined) localStorage.setItem(`msrnn-${name}`, value);
      return localStorage.getItem(`msrnn-${name}`);
    } catch {
      return null; // a file opened from disk may have no storage
    }
  }

  setTheme(theme) {
    document.documentElement.dataset.theme = theme;
    this.stored("theme", theme);
    $("theme").textContent = { auto: "◐", light: "☀", dark: "☾" }[theme];
    $("theme").setAttribute("aria-label", `Colours: ${{ auto: "as the system", light: "light", dark: "dark" }[theme]}`);
    this.recolour();
  }

  recolour() {
    this.colours = null;
    this.dirty = true;
  }
}

// A page with a server: the form, the run in the address, the stream.
class LivePage {
  constructor(app) {
    this.app = app;
    this.caughtUp = false;
    this.kinds = [
      ["tova", "TOVA"], ["tova-head", "TOVA, each head on its own"], ["h2o", "H2O"], ["fade", "Fade"],
      ["window", "Window (newest only)"], ["window+4", "Window + first 4"],
    ];
    this.bind();
    this.begin();
  }

  async begin() {
    try {
      this.info = await api("/api/info");
    } catch (error) {
      this.app.alert(error.message);
      return;
    }
    $("source").value = this.info.example;
    $("question").value = "Where did Mara put the brass key?";
    $("model").value = this.info.model || "";
    $("model-choice").hidden = !this.info.model_change;
    this.sourceChanged();
    for (const fields of document.querySelectorAll("fieldset.policy")) this.fill(fields);
    const match = /^#run=([\w-]+)$/.exec(location.hash);
    if (match) this.attach(match[1]);
    this.waitForModel();
  }

  // The model loads while the page is read.
  async waitForModel() {
    while (!this.info.model_ready) {
      $("model-state").textContent = "Loading the model…";
      await new Promise((resolve) => setTimeout(resolve, 700));
      try { this.info = await api("/api/info"); } catch { return; }
    }
    $("model-state").textContent = "";
    if (this.info.model_error) this.app.alert(this.info.model_error);
  }

  fill(fields) {
    const [kind, capacity, profile, text] = ["kind", "capacity", "profile", "policy-text"].map((name) => fields.querySelector(`.${name}`));
    kind.replaceChildren(...this.kinds.map(([value, label]) => new Option(label, value)), new Option("as written below", ""));
    profile.replaceChildren(new Option("none: the same in every layer", ""), ...this.info.profiles.map((name) => new Option(name, name)));
    profile.closest("label").hidden = !this.info.profiles.length;
    const write = () => {
      if (!kind.value) return;
      text.value = `${kind.value}:${capacity.value || 256}${profile.value ? `,profile=${profile.value}` : ""}`;
    };
    const read = () => {
      const match = /^\s*([a-z0-9+-]+):(\d+)(?:,profile=(.*))?\s*$/.exec(text.value);
      const known = match && this.kinds.some(([value]) => value === match[1]) && (!match[3] || this.info.profiles.includes(match[3]));
      kind.value = known ? match[1] : "";
      if (known) { capacity.value = match[2]; profile.value = match[3] || ""; }
    };
    for (const control of [kind, capacity, profile]) control.addEventListener("input", write);
    text.addEventListener("input", read);
    text.value = fields.dataset.lane === "1" ? "window+4:256" : this.info.policy;
    read();
  }

  bind() {
    const { app } = this;
    $("form").addEventListener("submit", (event) => { event.preventDefault(); this.start(); });
    $("use-example").addEventListener("click", () => { $("source").value = this.info.example; this.sourceChanged(); });
    $("open-file").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => { if ($("file").files[0]) this.open($("file").files[0]); $("file").value = ""; });
    $("source").addEventListener("input", () => this.sourceChanged());
    $("source").addEventListener("paste", (event) => this.paste(event));
    $("second").addEventListener("change", () => { document.querySelector('fieldset[data-lane="1"]').hidden = !$("second").checked; });
    for (const radio of document.getElementsByName("kind")) radio.addEventListener("change", () => this.kindChanged());
    $("save-html").addEventListener("click", () => this.saveHtml());
    $("ask-form").addEventListener("submit", (event) => { event.preventDefault(); this.send("ask", $("question")); });
    $("say-form").addEventListener("submit", (event) => { event.preventDefault(); this.send("say", $("say")); });
    for (const name of ["dragover", "drop"]) document.addEventListener(name, (event) => {
      if (![...event.dataTransfer.types].includes("Files")) return;
      event.preventDefault();
      if (name === "drop" && event.dataTransfer.files[0]) { $("setup").open = true; this.open(event.dataTransfer.files[0]); }
    });
    addEventListener("hashchange", () => {
      const match = /^#run=([\w-]+)$/.exec(location.hash);
      if (match && (!app.live || app.live.id !== match[1])) this.attach(match[1]);
    });
  }

  get kind() { return document.querySelector('input[name="kind"]:checked').value; }

  kindChanged() {
    $("text-source").hidden = this.kind === "chat";
    $("chat-source").hidden = this.kind !== "chat";
    if (this.kind === "chat") $("speed").value = "";
  }

  sourceChanged() {
    const length = $("source").value.length;
    $("source-size").textContent = length ? `${countOf(length)} characters, about ${countOf(length / 4.2)} tokens` : "";
    if (!this.speedChosen) $("speed").value = length > 20000 ? "" : "60";
  }

  // A browser takes most of a minute to type a long text into a field, line by line; put in at once it takes none.
  paste(event) {
    const text = event.clipboardData.getData("text/plain"), source = $("source");
    if (text.length < 10000) return;
    event.preventDefault();
    source.setRangeText(text, source.selectionStart, source.selectionEnd, "end");
    this.sourceChanged();
  }

  // A file is read here, in the browser; it is sent as text and never stored.
  async open(file) {
    const limit = this.info.limits.characters;
    if (file.size > 4 * limit) { this.app.alert(`${file.name} has ${countOf(file.size)} bytes; the playground takes texts of ${countOf(limit)} characters.`); return; }
    const bytes = new Uint8Array(await file.arrayBuffer());
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    } catch {
      text = "\u0000";
    }
    if (text.includes("\u0000")) { this.app.alert(`${file.name} is not a text file in UTF-8; nothing was read.`); return; }
    if (!text.trim()) { this.app.alert(`${file.name} is empty; nothing was read.`); return; }
    $("source").value = text;
    document.querySelector('input[name="kind"][value="text"]').checked = true;
    this.kindChanged();
    this.sourceChanged();
    this.app.alert("");
  }

  async start() {
    const policies = [...document.querySelectorAll("fieldset.policy")].filter((fields) => !fields.hidden).map((fields) => fields.querySelector(".policy-text").value.trim());
    const speed = Number($("speed").value) || null;
    const model = $("model").value.trim() || null;
    const request = { kind: this.kind, text: this.kind === "chat" ? "" : $("source").value, policies, full: $("full").checked, model, speed };
    if (request.text.length > this.info.limits.characters) {
      this.app.alert(`The text has ${countOf(request.text.length)} characters, the playground takes ${countOf(this.info.limits.characters)}; cut it, or read it all with msrnn trace.`);
      return;
    }
    $("start").disabled = true;
    this.app.alert("");
    try {
      const { id } = await api("/api/runs", request);
      this.attach(id, true);
    } catch (error) {
      this.app.alert(error.message); // the form and the run before are as they were
    } finally {
      $("start").disabled = false;
    }
  }

  // Watch a run. The one before stays on the page until the new one has begun.
  attach(id, fresh = false) {
    const { app } = this;
    if (this.next) this.next.stop();
    const live = new Live(id, (event, message) => this.handle(live, event, message));
    this.next = live;
    this.caughtUp = fresh;
    if (!fresh) $("model-state").textContent = "Catching up…";
  }

  handle(live, event, message) {
    const { app } = this;
    if (live !== this.next && live !== app.live) return;
    if (event === "status") this.statusChanged(live, message);
    else if (event === "gone") this.gone(live);
    else if (event === "lost") this.say("The connection is lost; trying again…");
    else if (event === "meta") this.begun(live, message);
    else if (live !== app.live) return;
    else if (event === "notice") app.alert(message.text);
    else {
      app.run.handle(event, message);
      if (message.number !== undefined) this.app.answers.update(message.number);
      app.dirty = true;
    }
  }

  begun(live, meta) {
    const { app } = this;
    if (app.live === live) return;
    if (app.live) app.live.stop();
    app.live = live;
    this.next = null;
    history.replaceState(null, "", `#run=${live.id}`);
    $("setup").open = false;
    app.show(new Run(meta));
    app.playing = true;
    app.showControls();
    if (meta.kind === "chat") $("say").focus();
    else $("play").focus({ preventScroll: true });
  }

  statusChanged(live, status) {
    const { app } = this;
    if (status.state === "failed") {
      live.close();
      app.alert(status.error);
      if (live === this.next) this.next = null;
      $("model-state").textContent = "";
      if (live === app.live) { app.status = status; this.say("Stopped by an error"); }
      return;
    }
    if (live !== app.live) {
      $("model-state").textContent = this.waiting(status) || { loading: "Loading the model…", queued: "Starting…" }[status.state] || "";
      return;
    }
    if (!app.status || !this.caughtUp) {
      app.playing = !status.paused;
      app.showControls();
      if (status.speed !== undefined && !this.caughtUp) $("speed").value = status.speed === null ? "" : String(status.speed);
    }
    $("model-state").textContent = "";
    app.status = status;
    if (!this.caughtUp && app.head >= status.seen) { this.caughtUp = true; app.seek(app.head, true); }
    if (app.stepping && app.head > app.shown) { app.stepping = false; app.seek(app.head); }
    const rate = status.rate >= 10 ? Math.round(status.rate) : status.rate;
    const texts = {
      reading: `Reading${rate ? `, ${rate} tokens/s` : ""}`, paused: "Paused", done: "All read", ready: "Your turn",
      answering: "Answering…", loading: "Loading the model…", queued: "Starting…", stopped: "Ended",
    };
    this.say(this.waiting(status) || texts[status.state] || "");
    app.dirty = true;
  }

  waiting(status) {
    if (!status.place || ["done", "paused", "ready"].includes(status.state)) return "";
    return status.place === 1 ? "Waiting: 1 run is before yours" : `Waiting: ${status.place} runs are before yours`;
  }

  gone(live) {
    if (live === this.next) this.next = null;
    if (location.hash) history.replaceState(null, "", location.pathname);
    $("model-state").textContent = "";
    this.app.status = { state: "stopped" };
    this.say("Ended");
    this.app.alert("That run has ended on the server. What is on the page stays; start again to go on.");
    $("setup").open = true;
  }

  say(text) { if ($("status").textContent !== text) $("status").textContent = text; }

  async send(action, input) {
    const text = input.value.trim();
    if (!this.app.live) { this.app.alert("That run has ended; start again to ask."); return; }
    if ((await this.app.tell(action, { text })) && action === "say") input.value = "";
  }

  async saveHtml() {
    try {
      const response = await fetch(`/api/runs/${this.app.live.id}/export`);
      if (!response.ok) throw new Error((await response.json()).error);
      download(await response.blob(), "msrnn-run.html");
    } catch (error) {
      this.app.alert(`The run could not be saved: ${error.message}`);
    }
  }
}

// A saved file: everything is here already, and plays from the beginning.
function openRecording(app, recording) {
  $("speed").options[4].remove();
  $("speed").add(new Option("1,000 tokens/s", "1000"));
  const run = new Run(recording.meta);
  for (const piece of recording.pieces) run.addPiece(piece);
  run.slots = recording.slots;
  app.show(run);
  app.playing = false;
  app.seek(run.head, true);
  app.showControls();
  for (const [event, message] of recording.answers) {
    run.handle(event, message);
    if (message.number !== undefined) app.answers.update(message.number);
  }
  $("ask-card").hidden = !run.questions.length;
  $("status").textContent = "Saved run";
}

const app = new App();
const saved = $("recording");
if (saved) openRecording(app, JSON.parse(saved.textContent));
else new LivePage(app);
