// A small chart of values over time, in SVG. All charts of a page share one moment to look at.

import { h, put, setText, svg } from "./dom.js";
import { clock } from "./format.js";

const HEIGHT = 132;
const EDGE = { top: 8, right: 10, bottom: 20, left: 52 };
const STEPS = [1, 2, 2.5, 5, 10];

/** The moment that the charts show the values of; null stands for the latest. */
export class Moment extends EventTarget {
  index = null;

  set(index) {
    if (index === this.index) return;
    this.index = index;
    this.dispatchEvent(new Event("change"));
  }
}

/**
 * A chart. `series` are `{name, tone, value(bucket)}`; with `stacked` they are areas on top of each
 * other, else lines. `format` writes a value; `top`, if given, is the upper end of the axis, as a
 * number or as a function of the buckets; with `whole` its ticks are whole numbers.
 */
export class Chart {
  #buckets = [];
  #restarts = [];
  #width = 0;

  constructor({ title, note, series, format, moment, stacked = false, top = null, whole = false }) {
    Object.assign(this, { title, series, format, moment, stacked, top, whole });
    this.readouts = series.map(() => h("b"));
    this.when = h("span", { class: "chart-when" });
    this.svg = svg("svg", { class: "chart-plot", role: "img", tabindex: "0", height: HEIGHT });
    this.cursor = svg("line", { class: "chart-cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    this.element = h(
      "figure",
      { class: "chart" },
      h(
        "figcaption",
        {},
        h("div", { class: "chart-head" }, h("h3", { title: note }, title), this.when),
        h(
          "ul",
          { class: "legend" },
          series.map((one, index) =>
            h("li", {}, h("i", { class: `swatch ${one.tone}` }), `${one.name} `, this.readouts[index]),
          ),
        ),
      ),
      this.svg,
    );
    this.svg.addEventListener("pointermove", (event) => this.#point(event));
    this.svg.addEventListener("pointerdown", (event) => this.#point(event));
    this.svg.addEventListener("pointerleave", () => moment.set(null));
    this.svg.addEventListener("keydown", (event) => this.#key(event));
    this.svg.addEventListener("blur", () => moment.set(null));
    moment.addEventListener("change", () => this.#read());
    new ResizeObserver(([entry]) => {
      const width = Math.round(entry.contentRect.width);
      if (width && width !== this.#width) {
        this.#width = width;
        this.#draw();
      }
    }).observe(this.element);
  }

  update(buckets, restarts) {
    this.#buckets = buckets;
    this.#restarts = restarts;
    if (this.#width) this.#draw();
  }

  #draw() {
    const buckets = this.#buckets;
    const rows = this.series.map((one) => buckets.map((bucket) => one.value(bucket)));
    const drawn = this.stacked ? stack(rows) : rows;
    const known = drawn.flat().filter((value) => value !== null);
    const given = typeof this.top === "function" ? this.top(buckets) : this.top;
    const { top, ticks } = axis(given ?? Math.max(0, ...known), given !== null, this.whole);
    const inner = this.#width - EDGE.left - EDGE.right;
    this.x = (index) => EDGE.left + ((index + 0.5) / buckets.length) * inner;
    this.y = (value) => HEIGHT - EDGE.bottom - (value / top) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${this.#width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.#width);
    put(
      this.svg,
      ticks.map((value) => this.#tick(value)),
      this.#times(),
      this.#restarts.map((time) => this.#restart(time)),
      this.stacked ? this.#areas(drawn) : this.#lines(rows),
      known.length ? [] : [this.#nothing()],
      this.cursor,
    );
    this.#read();
  }

  #tick(value) {
    const y = this.y(value);
    return svg(
      "g",
      { class: "chart-tick" },
      svg("line", { x1: EDGE.left, x2: this.#width - EDGE.right, y1: y, y2: y }),
      svg("text", { x: EDGE.left - 6, y: y + 4, "text-anchor": "end" }, this.format(value)),
    );
  }

  #times() {
    const buckets = this.#buckets;
    if (!buckets.length) return [];
    const wanted = Math.max(2, Math.min(5, Math.floor(this.#width / 90)));
    return Array.from({ length: wanted }, (_, number) => {
      const index = Math.round((number / (wanted - 1)) * (buckets.length - 1));
      const anchor = number === 0 ? "start" : number === wanted - 1 ? "end" : "middle";
      const x = anchor === "start" ? EDGE.left : this.x(index) + (anchor === "end" ? 4 : 0);
      const label = clock(buckets[index].end, buckets[0].seconds < 5);
      return svg("text", { class: "chart-time", x, y: HEIGHT - 4, "text-anchor": anchor }, label);
    });
  }

  #restart(time) {
    const index = this.#buckets.findIndex((bucket) => bucket.end >= time);
    if (index < 0) return null;
    const x = this.x(index);
    return svg(
      "g",
      { class: "chart-restart" },
      svg("title", {}, `the server restarted at ${clock(time)}`),
      svg("line", { x1: x, x2: x, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }),
    );
  }

  #nothing() {
    const middle = EDGE.left + (this.#width - EDGE.left - EDGE.right) / 2;
    return svg(
      "text",
      { class: "chart-nothing", x: middle, y: HEIGHT / 2, "text-anchor": "middle" },
      "nothing in this time",
    );
  }

  #areas(levels) {
    const parts = [];
    levels.forEach((upper, index) => {
      const lower = index ? levels[index - 1] : upper.map((value) => (value === null ? null : 0));
      for (const run of runs(upper)) {
        // A bucket is as wide as it is, so that one alone can be seen too.
        const half = (this.x(1) - this.x(0)) / 2;
        const wide = run.length === 1 ? [-half, half] : [0];
        const there = run.flatMap((at) => wide.map((dx) => `${this.x(at) + dx},${this.y(upper[at])}`));
        const back = run
          .toReversed()
          .flatMap((at) => wide.toReversed().map((dx) => `${this.x(at) + dx},${this.y(lower[at])}`));
        const points = [...there, ...back].join(" ");
        parts.push(svg("polygon", { class: `area ${this.series[index].tone}`, points }));
      }
    });
    return parts;
  }

  #lines(rows) {
    return rows.flatMap((values, index) => {
      const tone = this.series[index].tone;
      const at = (place) => `${this.x(place)},${this.y(values[place])}`;
      const all = [...values.keys()].filter((place) => values[place] !== null);
      const parts = [];
      // Where nothing is known in between, a faint line only leads the eye.
      for (let i = 1; i < all.length; i += 1) {
        if (all[i] - all[i - 1] > 1) {
          parts.push(svg("polyline", { class: `line faint ${tone}`, points: `${at(all[i - 1])} ${at(all[i])}` }));
        }
      }
      for (const run of runs(values)) {
        if (run.length > 1) parts.push(svg("polyline", { class: `line ${tone}`, points: run.map(at).join(" ") }));
        else parts.push(svg("circle", { class: `dot ${tone}`, cx: this.x(run[0]), cy: this.y(values[run[0]]), r: 2.5 }));
      }
      return parts;
    });
  }

  #read() {
    const buckets = this.#buckets;
    const chosen = this.moment.index;
    const shown = chosen !== null && chosen < buckets.length;
    this.cursor.classList.toggle("on", shown);
    if (shown && this.x) {
      this.cursor.setAttribute("x1", this.x(chosen));
      this.cursor.setAttribute("x2", this.x(chosen));
    }
    const texts = this.series.map((one) => {
      const value = shown
        ? one.value(buckets[chosen])
        : (buckets.map((bucket) => one.value(bucket)).findLast((known) => known !== null) ?? null);
      return value === null ? "–" : this.format(value);
    });
    texts.forEach((text, index) => setText(this.readouts[index], text));
    setText(this.when, shown ? clock(buckets[chosen].end) : "latest");
    const said = this.series.map((one, index) => `${one.name} ${texts[index]}`).join(", ");
    const when = shown ? `at ${clock(buckets[chosen].end)}` : "latest";
    this.svg.setAttribute("aria-label", `${this.title}, ${when}: ${said}. Arrow keys move in time.`);
  }

  #point(event) {
    const box = this.svg.getBoundingClientRect();
    const inner = box.width - EDGE.left - EDGE.right;
    const part = (event.clientX - box.left - EDGE.left) / inner;
    const last = this.#buckets.length - 1;
    this.moment.set(Math.max(0, Math.min(last, Math.floor(part * this.#buckets.length))));
  }

  #key(event) {
    const last = this.#buckets.length - 1;
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    const now = this.moment.index ?? last;
    let next = null;
    if (step !== undefined) next = Math.max(0, Math.min(last, now + step));
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else if (event.key !== "Escape") return;
    event.preventDefault();
    this.moment.set(next);
  }
}

/** Return the upper end of an axis that starts at 0, and its ticks. */
function axis(highest, exact, whole) {
  if (!(highest > 0)) return { top: 1, ticks: [0] };
  if (whole && !exact && highest <= 2) return { top: Math.ceil(highest), ticks: [0, Math.ceil(highest)] };
  if (exact) return { top: highest, ticks: [0, highest / 2, highest] };
  const scale = 10 ** Math.floor(Math.log10(highest / 2));
  const step = STEPS.map((one) => one * scale).find((one) => highest / one <= 2) ?? 10 * scale;
  const even = whole ? 2 * Math.max(1, Math.ceil(step / 2)) : step;
  const top = Math.ceil(highest / even - 1e-9) * even;
  return { top, ticks: whole || top / step > 1.5 ? [0, top / 2, top] : [0, top] };
}

/** Return each row with the rows before it added. */
function stack(rows) {
  const sums = rows[0].map(() => 0);
  return rows.map((row) =>
    row.map((value, index) => {
      if (value === null) return null;
      sums[index] += value;
      return sums[index];
    }),
  );
}

/** Return the runs of neighbouring places where a value is known. */
function runs(values) {
  const found = [];
  values.forEach((value, index) => {
    if (value === null) return;
    if (index && values[index - 1] !== null) found.at(-1).push(index);
    else found.push([index]);
  });
  return found;
}
