"use strict";
// The server's side of the page: starting runs, the event stream, and everything that may go wrong on the way.

async function api(path, body) {
  let response;
  try {
    response = await fetch(path, body === undefined ? {} : { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) });
  } catch {
    throw new Error("the server does not answer; is msrnn play still running?");
  }
  let data = {};
  try { data = await response.json(); } catch { /* an answer without JSON has no reason to tell */ }
  if (!response.ok) throw new Error(data.error || `the server answered ${response.status}`);
  return data;
}

// One run on the server. `on` is told of events; a background tab lets go of its stream but keeps the run.
class Live {
  constructor(id, on) {
    this.id = id;
    this.on = on;
    this.last = 0;
    this.ended = false;
    this.open();
    this.visibility = () => (document.hidden ? this.park() : this.open());
    this.leave = () => { this.leaving = true; this.beacon("leave"); };
    document.addEventListener("visibilitychange", this.visibility);
    addEventListener("pagehide", this.leave);
  }

  open() {
    this.leaving = false;
    clearInterval(this.parked);
    if (this.stream || this.ended) return;
    this.stream = new EventSource(`/api/runs/${this.id}/events?from=${this.last}`);
    for (const name of ["meta", "piece", "question", "answer", "sources", "notice", "status"])
      this.stream.addEventListener(name, (event) => {
        if (event.lastEventId && name !== "status") this.last = Number(event.lastEventId);
        this.on(name, JSON.parse(event.data));
      });
    this.stream.onerror = () => this.failed();
  }

  // A browser gives a site six connections: tabs in the background do not use them up. A tab that is being closed is
  // hidden too, after it has said that it leaves: it must not hold its run.
  park() {
    if (this.ended || this.leaving) return;
    this.control("hold").catch(() => {});
    this.parked = setInterval(() => this.control("hold").catch(() => {}), 60000);
    this.stream.close();
    this.stream = null;
  }

  async failed() {
    if (this.ended || !this.stream) return;
    const closed = this.stream.readyState === EventSource.CLOSED;
    if (closed) { this.stream.close(); this.stream = null; }
    try {
      const response = await fetch(`/api/runs/${this.id}/slots?lane=0&layer=0`);
      if (response.status === 404 && /over/.test((await response.json()).error)) { this.close(); this.on("gone", {}); return; }
      if (closed) setTimeout(() => this.open(), 1000);
    } catch {
      this.on("lost", {});
      if (closed) setTimeout(() => this.open(), 2000);
    }
  }

  control(action, more = {}) {
    return api(`/api/runs/${this.id}/control`, { action, ...more });
  }

  async slots(lane, layer) {
    try {
      return await api(`/api/runs/${this.id}/slots?lane=${lane}&layer=${layer}`);
    } catch {
      return null;
    }
  }

  beacon(action) {
    if (!this.ended) navigator.sendBeacon(`/api/runs/${this.id}/control`, new Blob([JSON.stringify({ action })], { type: "application/json" }));
  }

  close() {
    this.ended = true;
    clearInterval(this.parked);
    document.removeEventListener("visibilitychange", this.visibility);
    removeEventListener("pagehide", this.leave);
    if (this.stream) this.stream.close();
    this.stream = null;
  }

  // The run itself ends, not only this page's view of it.
  stop() {
    if (this.ended) return;
    this.close();
    api(`/api/runs/${this.id}/stop`, {}).catch(() => {});
  }
}
