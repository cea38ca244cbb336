// Numbers, times and names as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const MISSING = "–";
const absent = (value) => value === null || value === undefined || Number.isNaN(value);

/** 1234 → "1,234" */
export const count = (value) => (absent(value) ? MISSING : whole.format(value));

/** 12345 → "12.3k"; below ten thousand as it is, below ten with so many decimals. */
export function short(value, digits = 0) {
  if (absent(value)) return MISSING;
  if (value < 10) return String(Number(value.toFixed(digits)));
  if (Math.abs(value) < 10_000) return whole.format(value);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${unit}`;
  }
  return MISSING;
}

/** 0.9231 → "92 %"; near the ends with a digit more, so that 0.999 is not all. */
export function percent(value) {
  if (absent(value)) return MISSING;
  const points = value * 100;
  if (points > 99 && points < 100) return `${Math.min(99.9, points).toFixed(1)} %`;
  if (points > 0 && points < 1) return `${Math.max(0.1, points).toFixed(1)} %`;
  return `${Math.round(points)} %`;
}

/** Seconds as "850 µs", "42 ms", "3.1 s", "12 min", "3.4 h" or "2.1 days". */
export function seconds(value) {
  if (absent(value)) return MISSING;
  if (value < 0.001) return value <= 0 ? "0 ms" : `${Math.round(value * 1e6)} µs`;
  if (value < 0.9995) return `${trim(value * 1000)} ms`;
  if (value < 99.5) return `${trim(value)} s`;
  if (value < 99.5 * 60) return `${trim(value / 60)} min`;
  if (value < 48 * 3600) return `${trim(value / 3600)} h`;
  return `${trim(value / 86400)} days`;
}

/** A point in time relative to now, both in seconds since 1970. */
export function ago(time, now = Date.now() / 1000) {
  if (absent(time)) return MISSING;
  const away = now - time;
  if (Math.abs(away) < 1.5) return "now";
  return away > 0 ? `${coarse(away)} ago` : `in ${coarse(-away)}`;
}

/** Return how long it is until a point in time: "for 12 min". */
export const lasting = (time, now = Date.now() / 1000) =>
  absent(time) ? MISSING : `for ${coarse(Math.max(0, time - now))}`;

/** Seconds without fractions: "45 s", "12 min", "3 h". */
export function coarse(value) {
  if (absent(value)) return MISSING;
  if (value < 99.5) return `${Math.round(value)} s`;
  if (value < 99.5 * 60) return `${Math.round(value / 60)} min`;
  if (value < 48 * 3600) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} days`;
}

export function bytes(value) {
  if (absent(value)) return MISSING;
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (value >= size) return `${trim(value / size)} ${unit}`;
  }
  return `${whole.format(value)} B`;
}

/** "14:03:27", or "14:03" without the seconds. */
export function clock(time, withSeconds = true) {
  if (absent(time)) return MISSING;
  const options = { hour: "2-digit", minute: "2-digit", hour12: false };
  if (withSeconds) options.second = "2-digit";
  return new Date(time * 1000).toLocaleTimeString("en-GB", options);
}

export const plural = (number, one, many = `${one}s`) =>
  `${count(number)} ${number === 1 ? one : many}`;

/** The beginning of a long id. */
export const head = (id, length = 13) =>
  id.length > length ? `${id.slice(0, length)}…` : id;

function trim(value) {
  const digits = Math.abs(value) < 9.95 ? 1 : 0;
  return value.toFixed(digits).replace(/\.0$/, "");
}
