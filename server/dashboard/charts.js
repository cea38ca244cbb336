// The charts over time, the choice of their span, and the same numbers as a table.

import { Chart, Moment } from "./chart.js";
import { byId, h, memory, put } from "./dom.js";
import { clock, count, percent, seconds, short } from "./format.js";

const SPANS = [
  [300, "5 min"],
  [900, "15 min"],
  [3600, "1 hour"],
];
const SPAN = "radixkv.span";
const MOST_BUCKETS = 90;
const TABLE_ROWS = 12;

const rate = (name) => (bucket) => (bucket[name] === null ? null : bucket[name] / bucket.seconds);
const gauge = (name) => (bucket) => bucket[name];
const perSecond = (value) => (value === 0 ? "0" : `${short(value, 1)}/s`);
const whole = (value) => (value === null ? "–" : Number.isInteger(value) ? count(value) : value.toFixed(1));

export class Charts {
  #history;
  #onSpan;
  #charts;

  /** `onSpan` is called when another span is chosen. */
  constructor(history, onSpan) {
    this.#history = history;
    this.#onSpan = onSpan;
    const kept = Number(memory.get(() => localStorage, SPAN));
    this.spanS = SPANS.some(([span]) => span === kept) ? kept : 900;
    const moment = new Moment();
    this.#charts = definitions().map((one) => new Chart({ ...one, moment }));
    put(byId("charts-grid"), this.#charts.map((chart) => chart.element));
    this.#drawSpans();
    byId("charts-table").addEventListener("toggle", () => this.update());
  }

  get spanName() {
    return SPANS.find(([span]) => span === this.spanS)[1];
  }

  update() {
    const buckets = this.#history.buckets(this.spanS, MOST_BUCKETS);
    for (const chart of this.#charts) chart.update(buckets, this.#history.restarts);
    if (byId("charts-table").open) this.#drawTable();
  }

  #drawSpans() {
    put(
      byId("spans"),
      SPANS.map(([span, name]) =>
        h(
          "button",
          {
            type: "button",
            "aria-pressed": String(span === this.spanS),
            onclick: () => {
              this.spanS = span;
              memory.set(() => localStorage, SPAN, String(span));
              for (const button of byId("spans").children) {
                button.setAttribute("aria-pressed", String(button.textContent === name));
              }
              this.update();
              this.#onSpan();
            },
          },
          name,
        ),
      ),
    );
  }

  #drawTable() {
    const heads = [
      "until", "hit rate", "reused", "computed", "TTFT warm", "TTFT cold", "generated", "running",
      "waiting", "failed",
    ];
    const rows = this.#history.buckets(this.spanS, TABLE_ROWS).toReversed();
    put(
      byId("charts-table-body"),
      h("table", { class: "numbers" },
        h("caption", { class: "visually-hidden" }, `The last ${this.spanName}, latest first`),
        h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
        h("tbody", {}, rows.map((row) =>
          h("tr", {},
            h("th", { scope: "row" }, clock(row.end)),
            [
              percent(row.hitRate), short(row.hit), short(row.computed), seconds(row.ttftWarm),
              seconds(row.ttftCold), short(row.generated), whole(row.running), whole(row.waiting),
              count(row.failed),
            ].map((text, index) => h("td", { "data-label": heads[index + 1] }, text)),
          ),
        )),
      ),
    );
  }
}

function definitions() {
  return [
    {
      title: "Hit rate",
      note: "Prompt tokens found in the cache, of those looked up",
      format: percent,
      top: 1,
      series: [{ name: "reused", tone: "reused", value: gauge("hitRate") }],
    },
    {
      title: "Prompt tokens",
      note: "Reused and computed, each second",
      format: perSecond,
      stacked: true,
      series: [
        { name: "computed", tone: "computed", value: rate("computed") },
        { name: "reused", tone: "reused", value: rate("hit") },
      ],
    },
    {
      title: "Time to first token",
      note: "Median; warm: at least half of the prompt was cached",
      format: seconds,
      series: [
        { name: "cold", tone: "computed", value: gauge("ttftCold") },
        { name: "warm", tone: "reused", value: gauge("ttftWarm") },
      ],
    },
    {
      title: "Generated tokens",
      note: "Tokens of answers, each second",
      format: perSecond,
      series: [{ name: "generated", tone: "running", value: rate("generated") }],
    },
    {
      title: "Requests",
      note: "In the running batch, and waiting",
      format: whole,
      whole: true,
      stacked: true,
      series: [
        { name: "running", tone: "running", value: gauge("running") },
        { name: "waiting", tone: "waiting", value: gauge("waiting") },
      ],
    },
    {
      title: "KV pool",
      note: "Blocks by state; what is above them is free",
      format: (value) => short(value),
      stacked: true,
      top: (buckets) => {
        const last = buckets.findLast((bucket) => bucket.free_blocks !== null);
        const names = ["free_blocks", "evictable_blocks", "held_blocks", "pinned_blocks"];
        return last ? names.reduce((sum, name) => sum + last[name], 0) : null;
      },
      series: [
        { name: "pinned", tone: "pinned", value: gauge("pinned_blocks") },
        { name: "running", tone: "running", value: gauge("held_blocks") },
        { name: "evictable", tone: "reused", value: gauge("evictable_blocks") },
      ],
    },
  ];
}
