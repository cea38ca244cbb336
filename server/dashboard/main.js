// Puts the page together: what is asked for how often, and what is said when there is no answer.

import { Api } from "./api.js";
import { Charts } from "./charts.js";
import { byId, memory, setText } from "./dom.js";
import { Feeds } from "./feeds.js";
import { clock, coarse } from "./format.js";
import { concerns, drawConcerns, drawHeadline } from "./headline.js";
import { History } from "./history.js";
import { Misses } from "./misses.js";
import { drawPins, drawPool } from "./pool.js";
import { RequestTable, SessionTable } from "./tables.js";
import { TreeView } from "./tree.js";

const THEME = "radixkv.theme";
const WORDS = {
  down: "The server can't be reached",
  key: "This needs the API key",
  refused: "The server refuses to show this",
  missing: "This server doesn't have it",
  failed: "The server could not tell",
};
const STATES = { ok: "serving", idle: "serving", stuck: "stuck in a step", dead: "engine failed", draining: "shutting down" };

const api = new Api();
const history = new History();
const feeds = new Feeds(onAttempt);
const charts = new Charts(history, drawOverview);
const tree = new TreeView(() => feeds.refresh("tree"));
const misses = new Misses(api);
const requestTable = new RequestTable((id) => {
  byId("misses").scrollIntoView();
  misses.explain(id);
});
const sessionTable = new SessionTable((id) => {
  byId("tree").scrollIntoView();
  tree.showSession(id);
}, () => feeds.refresh("sessions"));

let downSince = null;

feeds.add({ name: "health", everyS: 2, patienceS: 3, load: () => api.get("../health", { acceptStatus: 503 }), show: drawOverview });
feeds.add({
  name: "timeline",
  everyS: 2.5,
  load: () => api.get(history.path),
  show: (report) => {
    history.add(report);
    charts.update();
    drawOverview();
  },
});
feeds.add({
  name: "cache",
  everyS: 2,
  load: async () => {
    const [cache, engine] = await Promise.allSettled([api.get("cache"), api.get("engine")]);
    if (cache.status === "rejected") throw cache.reason;
    return { ...cache.value, engine: engine.status === "fulfilled" ? engine.value : null };
  },
  show: (report) => {
    drawPool(report, report.engine);
    drawOverview();
  },
});
feeds.add({
  name: "requests",
  everyS: 1.5,
  load: () => api.get("requests"),
  show: (report) => {
    requestTable.update(report);
    drawOverview();
  },
});
feeds.add({ name: "pins", everyS: 5, section: byId("pool"), load: () => api.get("cache/pins"), show: drawPins });
feeds.add({ name: "tree", everyS: 5, section: byId("tree"), load: () => api.get(tree.path), show: (report) => tree.update(report) });
feeds.add({ name: "misses", everyS: 4, section: byId("misses"), load: () => api.get("cache/misses?limit=100"), show: (list) => misses.update(list) });
feeds.add({ name: "sessions", everyS: 4, section: byId("sessions"), load: () => api.get(sessionTable.path), show: (list) => sessionTable.update(list) });

/** Tell what became of an attempt, next to what it would have brought. */
function onAttempt(feed) {
  if (feed.problem?.kind === "key") askForKey(feed.problem.message);
  const note = document.querySelector(`[data-note="${feed.name}"]`);
  const { problem } = feed;
  if (note) {
    note.hidden = problem === null;
    if (problem) {
      const since = feed.loadedAt === null ? "" : ` Shown is what was known at ${clock(feed.loadedAt)}.`;
      const why = problem.kind === "down" || problem.kind === "key" ? "" : `: ${problem.message}`;
      setText(note, `${WORDS[problem.kind] ?? problem.message}${why}.`.replace(/\.\.$/, ".") + since);
    }
  }
  for (const element of document.querySelectorAll(`[data-feed="${feed.name}"]`)) {
    element.classList.toggle("is-stale", problem !== null && feed.loadedAt !== null);
    element.classList.toggle("is-missing", problem !== null && feed.loadedAt === null);
  }
  if (feed.name === "health") onHealth(feed);
}

function onHealth({ problem, data, loadedAt }) {
  const status = byId("status");
  const stale = byId("stale");
  if (problem) {
    downSince ??= loadedAt;
    setText(status, "not reachable");
    document.title = "(!) RadixKV";
    status.className = "status bad";
    const since = downSince === null ? "" : ` What is shown is stale since ${clock(downSince)}.`;
    setText(stale, `The server can't be reached; it may be restarting. Trying again.${since}`);
    stale.hidden = false;
    return;
  }
  stale.hidden = true;
  setText(status, STATES[data.status] ?? data.status);
  status.className = `status ${data.status === "ok" ? "good" : data.status === "draining" ? "warn" : "bad"}`;
  if (downSince !== null) {
    downSince = null;
    feeds.refresh(); // it is back, so nobody waits for the end of their patience
  }
}

function drawOverview() {
  const get = (name) => feeds.get(name)?.data ?? null;
  const health = get("health");
  const cache = get("cache");
  drawHeadline(history, charts.spanS, charts.spanName, cache, health);
  if (health && !feeds.get("health").problem) drawConcerns(concerns(history, cache, health, get("requests")));
  if (cache) {
    setText(byId("model"), cache.model);
    setText(byId("uptime"), `up ${coarse(cache.uptime_s)}`);
  }
}

function askForKey(message) {
  const form = byId("key-form");
  if (api.hasKey) setText(byId("key-note"), `${message}.`.replace(/\.\.$/, "."));
  if (!form.hidden) return;
  form.hidden = false;
  byId("key-input").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const input = byId("key-input");
  api.useKey(input.value.trim());
  input.value = "";
  byId("key-form").hidden = true;
  byId("key-forget").hidden = false;
  feeds.refresh();
});

byId("key-forget").hidden = !api.hasKey;
byId("key-forget").addEventListener("click", () => {
  api.useKey(null);
  location.reload(); // with what was shown
});

byId("pause").addEventListener("click", ({ currentTarget }) => {
  feeds.paused = !feeds.paused;
  currentTarget.setAttribute("aria-pressed", String(feeds.paused));
  setText(currentTarget, feeds.paused ? "Go on" : "Pause");
  if (!feeds.paused) feeds.refresh();
});

const theme = byId("theme");
theme.value = document.documentElement.dataset.theme ?? "auto";
theme.addEventListener("change", () => {
  const chosen = theme.value === "auto" ? null : theme.value;
  if (chosen) document.documentElement.dataset.theme = chosen;
  else delete document.documentElement.dataset.theme;
  memory.set(() => localStorage, THEME, chosen);
});

feeds.start();
