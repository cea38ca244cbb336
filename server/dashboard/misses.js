// Why prompts missed: in words, with both texts side by side.

import { byId, h, put } from "./dom.js";
import { ago, coarse, count, percent } from "./format.js";
import { isMarking, redraw } from "./tables.js";
import { commonLength, detour, kindOfDifference, messageLength, visible } from "./texts.js";

const REASONS = {
  diverged: "differs",
  evicted: "evicted",
  other_namespace: "another namespace",
  never_seen: "new",
  below_block: "new, short",
  disabled: "caching is off",
  complete: "all reused",
};
// What somebody can do something about, whatever the prompt.
const NOTABLE = new Set(["evicted", "other_namespace", "disabled"]);
const SHOWN = 12;

export class Misses {
  #api;
  #data = [];
  #filter = "notable";
  #shown = SHOWN;
  #begun = false; // the first miss has been opened for whoever comes here

  constructor(api) {
    this.#api = api;
    for (const button of byId("misses-filter").children) {
      button.addEventListener("click", () => {
        this.#filter = button.dataset.filter;
        this.#draw();
      });
    }
    byId("explain-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.explain(byId("explain-id").value);
    });
    byId("try-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try();
    });
  }

  update({ data }) {
    this.#data = data;
    if (!isMarking(byId("misses-list"))) this.#draw();
  }

  /** Explain one request, or a session's last turn, and show it. */
  async explain(id) {
    const name = id.trim();
    if (!name) return;
    byId("explain-id").value = name;
    await this.#answer(() => this.#api.get(`cache/explain/${encodeURIComponent(name)}`));
    byId("explain-answer").scrollIntoView({ block: "nearest" });
  }

  async #try() {
    const prompt = byId("try-text").value;
    const salt = byId("try-salt").value;
    if (!prompt) return;
    const body = byId("try-chat").checked
      ? { messages: [{ role: "user", content: prompt }] }
      : { prompt };
    if (salt) body.cache_salt = salt;
    await this.#answer(() => this.#api.post("cache/explain", body));
  }

  async #answer(ask) {
    const place = byId("explain-answer");
    put(place, h("p", { class: "quiet" }, "Looking…"));
    try {
      put(place, card(await ask(), { open: true }));
    } catch (problem) {
      put(place, h("p", { class: "problem" }, sentence(problem.message)));
    }
  }

  #draw() {
    const notable = this.#data.filter(isNotable);
    const chosen = this.#filter === "notable" ? notable : this.#data;
    const numbers = { notable: notable.length, all: this.#data.length };
    for (const button of byId("misses-filter").children) {
      const { filter } = button.dataset;
      button.setAttribute("aria-pressed", String(filter === this.#filter));
      button.lastElementChild.textContent = count(numbers[filter]);
    }
    const groups = this.#filter === "notable" ? alike(chosen) : chosen.map((one) => [one]);
    const shown = groups.slice(0, this.#shown);
    const open = new Set(
      [...byId("misses-list").querySelectorAll("details[open]")].map((one) => one.dataset.request),
    );
    redraw(
      byId("misses-list"),
      shown.length
        ? shown.map((group, index) => {
            const isOpen = group.some((one) => open.has(one.request));
            return card(group[0], { open: isOpen || (index === 0 && !this.#begun), others: group.slice(1) });
          })
        : h("p", { class: "quiet" }, this.#data.length
            ? "None of the latest misses stands out: what they computed was new."
            : "No request has missed yet."),
      groups.length > shown.length
        ? h("button", { type: "button", "data-focus": "more", onclick: () => { this.#shown += SHOWN; this.#draw(); } }, `${count(groups.length - shown.length)} more`)
        : null,
    );
    this.#begun ||= shown.length > 0;
  }
}

/** Return misses in groups of what seems to have the same cause, the latest first in each. */
function alike(misses) {
  const groups = new Map();
  for (const one of misses) {
    const { prompt, cached } = one.window ?? { prompt: { before: "", after: "" }, cached: { after: "" } };
    const kind = kindOfDifference(prompt.before, prompt.after, cached.after);
    const letters = prompt.before.replace(/[^\p{L}]+/gu, "").slice(-12); // numbers move the window
    const key = JSON.stringify([one.reason, one.namespace, kind, letters]);
    groups.set(key, [...(groups.get(key) ?? []), one]);
  }
  return [...groups.values()];
}

/** Return one explanation as a card that opens; it stands for `others`, too. */
function card(one, { open, others = [] }) {
  const cached = one.cached_tokens ?? one.hit.tokens;
  const rate = one.prompt_tokens ? cached / one.prompt_tokens : 0;
  const tone = isNotable(one) ? "waiting" : "plain";
  return h(
    "details",
    { class: "miss", open, "data-request": one.request ?? "" },
    h("summary", { "data-focus": one.request ?? "" },
      h("span", { class: `chip ${tone}` }, REASONS[one.reason] ?? one.reason),
      h("span", { class: "miss-sum" },
        h("b", {}, `${count(cached)} of ${count(one.prompt_tokens)} tokens reused`),
        h("span", { class: "quiet" }, ` ${percent(rate)}`,
          one.created ? ` · ${ago(one.created)}` : "",
          one.namespace === "default" ? "" : ` · ${one.namespace}`),
        others.length ? h("span", { class: "miss-more" }, ` and ${count(others.length)} more like it`) : null),
      h("span", { class: "meter wide", "aria-hidden": "true" }, h("i", { class: "reused", style: { width: `${100 * rate}%` } })),
    ),
    h("div", { class: "miss-body" },
      h("p", {}, one.message),
      advice(one).map((text) => h("p", { class: "advice" }, text)),
      others.length ? h("p", {}, `These ${count(others.length + 1)} requests computed ${count(computed([one, ...others]))} prompt tokens.`) : null,
      one.window ? sides(one) : null,
      one.request ? h("p", { class: "quiet" }, "Request ", h("code", { class: "wrap" }, one.request)) : null,
    ),
  );
}

/**
 * Whether a miss may be worth a look. That prompts part is natural, since each has its own question;
 * it is not if they go on alike, or if most of a prompt with a shared beginning is computed.
 */
function isNotable(one) {
  if (NOTABLE.has(one.reason) || one.history?.rewritten_messages?.length) return true;
  if (one.reason !== "diverged" || !one.window) return false;
  const { prompt, cached } = one.window;
  const alike = detour(prompt.after, cached.after) !== null;
  const late = one.hit.whole_blocks > 0 && 2 * one.hit.tokens < one.prompt_tokens;
  return alike || late || kindOfDifference(prompt.before, prompt.after, cached.after) !== null;
}

/** Return what could be done about a miss. */
function advice(one) {
  const texts = [];
  const { window: seen, history } = one;
  if (one.reason === "diverged" && seen) {
    const kind = kindOfDifference(seen.prompt.before, seen.prompt.after, seen.cached.after);
    if (kind === "white space") texts.push("The two seem to differ in white space only: something renders the same text in two ways.");
    else if (kind === "upper and lower case") texts.push("The two seem to differ in upper and lower case only.");
    else if (kind) texts.push(`They part at what looks like ${kind}. If it changes with every request, move it behind what stays the same: everything after it is computed anew.`);
    else if (detour(seen.prompt.after, seen.cached.after)) texts.push("After it both go on alike, and all of that is computed anew: move what differs behind what stays the same.");
  }
  if (one.reason === "evicted" && one.evicted) {
    texts.push(one.evicted.by === "flush"
      ? `Somebody flushed the cache ${coarse(one.evicted.seconds_ago)} before.`
      : "The pool had no room to keep it. A larger pool, a tier below it, or a pin would have.");
  }
  if (one.reason === "other_namespace") texts.push("Requests share KV only with the same API key and the same cache_salt.");
  if (history?.message) texts.push(history.message);
  return texts;
}

function sides({ window: { prompt, cached } }) {
  const same = cached.after ? commonLength(prompt.after, cached.after) : 0;
  const rest = [prompt, cached].map(({ after }) => after.slice(same));
  const around = detour(...rest) ?? rest.map((text) => Math.max(1, messageLength(text)));
  return h("div", { class: "sides" },
    side("This prompt", prompt, same, around[0], "ends here"),
    side("In the cache", cached, same, around[1], "nothing follows"));
}

/** Return one side: alike up to `same`, different for `length`, and then alike again. */
function side(name, { before, after }, same, length, nothing) {
  const different = after.slice(same, same + length);
  return h("section", { class: "side" },
    h("h4", {}, name),
    h("pre", { tabindex: "0", "aria-label": name },
      h("span", { class: "same" }, visible(before + after.slice(0, same))),
      different ? h("mark", {}, visible(different)) : null,
      after.length > same + length ? h("span", {}, visible(after.slice(same + length))) : null,
      after.length > same ? null : h("span", { class: "quiet" }, `[${nothing}]`)));
}

const computed = (misses) => misses.reduce((sum, one) => sum + (one.computed_tokens ?? 0), 0);

const sentence = (text) => (/[.!?]$/.test(text) ? text : `${text}.`);
