// What the server sampled, put together across restarts, and summed into the buckets of a chart.

const KEPT_S = 3600;
const COUNTED = [
  "looked_up", "hit", "computed", "generated", "finished", "failed", "rejected", "preempted",
  "evicted", "cold", "warm",
];
const GAUGES = [
  "running", "waiting", "free_blocks", "evictable_blocks", "held_blocks", "pinned_blocks",
  "kv_utilisation",
];

export class History {
  #rows = [];
  #next = 0;
  run = null;
  intervalS = 5;
  restarts = []; // when the server began anew, in seconds since 1970

  /** Where to ask for what is not here yet, relative to the page. */
  get path() {
    return this.run === null
      ? "timeline"
      : `timeline?first=${this.#next}&run=${encodeURIComponent(this.run)}`;
  }

  get rows() {
    return this.#rows;
  }

  /** Take in an answer of `/admin/timeline`. */
  add(report) {
    if (this.run !== null && report.run !== this.run) this.restarts.push(report.started);
    this.run = report.run;
    this.intervalS = report.interval_s;
    this.#next = report.next;
    const names = Object.keys(report.samples);
    report.samples.time.forEach((time, index) => {
      const row = Object.fromEntries(names.map((name) => [name, report.samples[name][index]]));
      if (this.#rows.length === 0 || time > this.#rows.at(-1).time) this.#rows.push(row);
    });
    const oldest = (this.#rows.at(-1)?.time ?? 0) - KEPT_S;
    while (this.#rows.length && this.#rows[0].time < oldest) this.#rows.shift();
    this.restarts = this.restarts.filter((time) => time > oldest);
  }

  /**
   * Return the last `spanS` seconds as at most `most` buckets of equal width.
   *
   * Counted columns are summed, gauges averaged, medians weighted by how many requests they stand
   * for. A bucket without samples has null everywhere.
   */
  buckets(spanS, most) {
    const end = this.#rows.at(-1)?.time ?? Date.now() / 1000;
    const width = Math.ceil(spanS / most / this.intervalS) * this.intervalS || 1;
    const total = Math.max(1, Math.round(spanS / width));
    const first = end - total * width;
    const parts = Array.from({ length: total }, () => []);
    for (const row of this.#rows) {
      const index = Math.min(total - 1, Math.ceil((row.time - first) / width) - 1);
      if (index >= 0) parts[index].push(row);
    }
    return parts.map((rows, index) => summary(rows, first + index * width, width));
  }

  /** Return the last `spanS` seconds as one bucket. */
  total(spanS) {
    const end = this.#rows.at(-1)?.time ?? 0;
    const rows = this.#rows.filter((row) => row.time > end - spanS);
    return summary(rows, end - spanS, spanS);
  }
}

function summary(rows, start, widthS) {
  const bucket = { start, end: start + widthS, seconds: widthS, samples: rows.length };
  for (const name of COUNTED) {
    bucket[name] = rows.length ? rows.reduce((sum, row) => sum + (row[name] ?? 0), 0) : null;
  }
  for (const name of GAUGES) {
    const known = rows.map((row) => row[name]).filter((value) => value !== null);
    bucket[name] = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }
  bucket.hitRate = bucket.looked_up ? bucket.hit / bucket.looked_up : null;
  bucket.ttftCold = weightedMedian(rows, "ttft_cold_s", "cold");
  bucket.ttftWarm = weightedMedian(rows, "ttft_warm_s", "warm");
  return bucket;
}

function weightedMedian(rows, value, weight) {
  const known = rows.filter((row) => row[value] !== null && row[weight]);
  known.sort((a, b) => a[value] - b[value]);
  let left = known.reduce((sum, row) => sum + row[weight], 0) / 2;
  for (const row of known) {
    left -= row[weight];
    if (left <= 0) return row[value];
  }
  return null;
}
