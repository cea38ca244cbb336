// The sessions, and the requests that run or ran lately.

import { byId, h, put, td } from "./dom.js";
import { ago, bytes, count, head, lasting, percent, seconds } from "./format.js";

const PAGE = matchMedia("(max-width: 640px)").matches ? 8 : 25;
const PHASES = [
  ["queue", "waiting"],
  ["prefill", "computed"],
  ["decode", "running"],
];

/** Replace what is in `element`; give the focus back to what has the same `data-focus`. */
export function redraw(element, ...children) {
  const name = element.contains(document.activeElement)
    ? document.activeElement.dataset.focus
    : undefined;
  put(element, ...children);
  if (name !== undefined) {
    element.querySelector(`[data-focus="${CSS.escape(name)}"]`)?.focus({ preventScroll: true });
  }
}

/** Whether somebody is marking text there, which drawing anew would undo. */
export function isMarking(element) {
  const selection = document.getSelection();
  return selection !== null && !selection.isCollapsed && element.contains(selection.anchorNode);
}

export class SessionTable {
  #data = [];
  #total = 0;
  #sort = "last_used_at";
  #down = true;
  #shown = PAGE;
  #onTree;
  #onOrder;

  /** `onTree(id)` shows a session in the tree; `onOrder` is called when others are wanted. */
  constructor(onTree, onOrder) {
    this.#onTree = onTree;
    this.#onOrder = onOrder;
    byId("sessions-filter").addEventListener("input", () => this.#draw());
  }

  /** Where to ask, relative to the page: the server sends the first of many in this order. */
  get path() {
    return `sessions?limit=200&order=${this.#sort === "tokens" && this.#down ? "tokens" : "last_used"}`;
  }

  update({ data, total }) {
    this.#data = data;
    this.#total = total ?? data.length;
    if (!isMarking(byId("sessions-rows"))) this.#draw();
  }

  #draw() {
    const now = Date.now() / 1000;
    const columns = [
      ["id", "session", (one) => [h("code", { title: one.id }, head(one.id)), one.busy ? h("span", { class: "chip running" }, "answering") : null]],
      ["namespace", "namespace", (one) => h("code", { class: "wrap" }, one.namespace)],
      ["turns", "turns", (one) => count(one.turns)],
      ["tokens", "tokens", (one) => count(one.tokens)],
      ["cached_tokens", "still cached", (one) => share(one.cached_tokens, one.tokens)],
      ["private_blocks", "own blocks", (one) => count(one.private_blocks)],
      ["bytes", "KV", (one) => bytes(one.bytes)],
      ["last_used_at", "last used", (one) => ago(one.last_used_at, now)],
      ["expires_at", "expires", (one) => ago(one.expires_at, now)],
      ["pinned_until", "pinned", (one) => (one.pinned_until ? lasting(one.pinned_until, now) : "no")],
    ];
    const wanted = byId("sessions-filter").value.trim().toLowerCase();
    const found = this.#data.filter((one) =>
      `${one.id} ${one.namespace} ${one.tenant ?? ""}`.toLowerCase().includes(wanted));
    found.sort((a, b) => compare(a[this.#sort], b[this.#sort]) * (this.#down ? -1 : 1));
    const rows = found.slice(0, this.#shown);
    const says = [`${count(this.#total)} in all`];
    if (wanted) says.push(`${count(found.length)} match`);
    if (this.#data.length < this.#total) says.push(`${count(this.#data.length)} of them are here`);
    redraw(
      byId("sessions-rows"),
      h("p", { class: "quiet" }, says.join(" · ")),
      found.length
        ? h("div", { class: "scroll" }, h("table", { class: "rows sessions" },
            h("thead", {}, h("tr", {}, columns.map(([key, name]) => this.#head(key, name)), h("td"))),
            h("tbody", {}, rows.map((one) =>
              h("tr", {},
                columns.map(([, name, cell]) => td(name, cell(one))),
                td("", h("button",
                  { type: "button", class: "small", "data-focus": one.id, "aria-label": `Show ${one.id} in the tree`, onclick: () => this.#onTree(one.id) },
                  "in the tree")),
              ))),
          ))
        : h("p", { class: "quiet" }, wanted ? "No session matches." : "There is no session. Stateless chats have none and are cached all the same."),
      found.length > rows.length
        ? h("button", { type: "button", "data-focus": "more", onclick: () => { this.#shown += 4 * PAGE; this.#draw(); } }, `${count(found.length - rows.length)} more`)
        : null,
    );
  }

  #head(key, name) {
    const chosen = key === this.#sort;
    const sort = chosen ? (this.#down ? "descending" : "ascending") : null;
    const turn = () => {
      this.#down = chosen ? !this.#down : true;
      this.#sort = key;
      this.#draw();
      if (this.#data.length < this.#total) this.#onOrder();
    };
    return h("th", { scope: "col", "aria-sort": sort },
      h("button", { type: "button", class: "sorter", "data-focus": `sort ${key}`, onclick: turn },
        name, h("span", { "aria-hidden": "true" }, chosen ? (this.#down ? " ↓" : " ↑") : "")));
  }
}

export class RequestTable {
  #onWhy;
  #shown = PAGE;
  #last = { live: [], recent: [] };

  /** `onWhy(id)` explains what a request found in the cache. */
  constructor(onWhy) {
    this.#onWhy = onWhy;
  }

  update(report) {
    this.#last = report;
    const element = byId("requests-rows");
    if (isMarking(element)) return;
    const { live, recent } = report;
    const shown = recent.slice(0, this.#shown);
    const long = usualLongest([...live, ...shown].map((one) => one.total_s ?? 0));
    redraw(
      element,
      h("h3", {}, "Now"),
      live.length
        ? this.#table(live, long)
        : h("p", { class: "quiet" }, "No request runs or waits."),
      h("h3", {}, "Lately"),
      recent.length
        ? this.#table(shown, long)
        : h("p", { class: "quiet" }, "No request has ended yet."),
      recent.length > shown.length
        ? h("button", { type: "button", "data-focus": "more", onclick: () => { this.#shown += 4 * PAGE; this.update(this.#last); } }, `${count(recent.length - shown.length)} more`)
        : null,
    );
  }

  #table(requests, long) {
    const heads = ["request", "state", "prompt", "answer", "time", "arrived", ""];
    const now = Date.now() / 1000;
    return h("div", { class: "scroll" }, h("table", { class: "rows requests" },
      h("thead", {}, h("tr", {}, heads.map((name) => (name ? h("th", { scope: "col" }, name) : h("td"))))),
      h("tbody", {}, requests.map((one) =>
        h("tr", {},
          [
            [h("code", { title: one.id }, head(one.id, 16)), h("span", { class: "quiet" }, ` ${one.api ?? ""}`), where(one)],
            state(one),
            [count(one.prompt_tokens), " ", share(one.cached_tokens, one.prompt_tokens)],
            [count(one.output_tokens), one.itl_s ? h("span", { class: "quiet" }, ` ${seconds(one.itl_s)} each`) : null],
            times(one, long),
            ago(one.arrived_at, now),
            one.state === "waiting" ? null : h("button",
              { type: "button", class: "small", "data-focus": one.id, "aria-label": `Why ${one.id} found what it found`, onclick: () => this.#onWhy(one.id) },
              "why?"),
          ].map((cell, index) => td(heads[index], cell)),
        ))),
    ));
  }
}

function where(one) {
  const parts = [one.namespace && one.namespace !== "default" ? one.namespace : null, one.session_id ? head(one.session_id) : null];
  const text = parts.filter(Boolean).join(" · ");
  return text ? h("div", { class: "quiet wrap" }, text) : null;
}

function state(one) {
  const name = one.state === "finished" ? (one.finish_reason ?? "finished") : one.state;
  const tone = { waiting: "waiting", prefill: "computed", decode: "running", failed: "bad", aborted: "quiet" }[one.state] ?? "plain";
  const again = one.preemptions ? h("div", { class: "quiet" }, `preempted ${count(one.preemptions)} ×`) : null;
  return [h("span", { class: `chip ${tone}` }, name), again];
}

/** Return a little bar with the part that was reused. */
function share(part, whole) {
  if (part === null || part === undefined) return h("span", { class: "quiet" }, "–");
  const rate = whole ? part / whole : 0;
  return h("span", { class: "share", title: `${count(part)} of ${count(whole)} tokens` },
    h("span", { class: "meter", "aria-hidden": "true" }, h("i", { class: "reused", style: { width: `${100 * Math.min(1, rate)}%` } })),
    whole ? percent(rate) : "–");
}

/** Return what all but the longest tenth stay below, so that one long request dwarfs no others. */
function usualLongest(seconds) {
  const sorted = seconds.toSorted((a, b) => a - b);
  return Math.max(0.001, sorted[Math.ceil(0.9 * sorted.length) - 1] ?? 0);
}

/** Return a request's time as a bar: queue, prefill, decode; and the same in words. */
function times(one, long) {
  const queue = one.queue_s ?? one.total_s ?? 0;
  const first = one.ttft_s ?? one.total_s ?? queue;
  const parts = [queue, Math.max(0, first - queue), Math.max(0, (one.total_s ?? first) - first)];
  const full = Math.max(long, parts[0] + parts[1] + parts[2]);
  const words = [`TTFT ${seconds(one.ttft_s)}`];
  if (queue > 0.005) words.unshift(`queue ${seconds(queue)}`);
  words.push(`total ${seconds(one.total_s)}`);
  return h("div", { class: "times" },
    h("div", { class: "phases", "aria-hidden": "true" }, PHASES.map(([name, tone], index) =>
      h("i", { class: tone, title: `${name} ${seconds(parts[index])}`, style: { width: `${(100 * parts[index]) / full}%` } }))),
    h("span", { class: "quiet" }, words.join(" · ")));
}

function compare(a, b) {
  if (typeof a === "string" || typeof b === "string") return String(a ?? "").localeCompare(String(b ?? ""));
  return Number(a ?? 0) - Number(b ?? 0);
}
