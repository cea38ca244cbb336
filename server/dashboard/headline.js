// The numbers in one row, and what somebody should look at.

import { byId, h, put, setText } from "./dom.js";
import { coarse, count, percent, plural, seconds, short } from "./format.js";

const LATELY_S = 300;
const LONG_WAIT_S = 5;
const BIG_TURNOVER = 0.25;
const ENOUGH_TOKENS = 1000;

/** Draw the headline row for the last `spanS` seconds. */
export function drawHeadline(history, spanS, spanName, cache, health) {
  const sum = history.total(spanS);
  const tile = (name, value, note) => {
    setText(byId(`${name}-value`), value);
    setText(byId(`${name}-note`), note);
  };
  setText(byId("headline-span"), `Last ${spanName}`);
  const total = cache?.tokens;
  const all = total?.looked_up ? `${percent(total.hit / total.looked_up)} since the start` : null;
  if (sum.hitRate === null) {
    tile("reuse", "–", all ?? "no prompt in this time");
  } else {
    const parts = [`${short(sum.hit)} of ${short(sum.looked_up)}`, all];
    tile("reuse", percent(sum.hitRate), parts.filter(Boolean).join(" · "));
  }
  byId("reuse-bar").style.width = `${100 * (sum.hitRate ?? 0)}%`;
  tile("computed", short(sum.computed), total ? `${short(total.computed)} since the start` : "");
  const cost = cache?.scheduling?.step_cost_s?.token;
  if (cost && sum.hit !== null) {
    tile("saved", `≈ ${seconds(sum.hit * cost)}`, `at ${seconds(cost)} a token, as learned from steps`);
  } else {
    tile("saved", "–", "the cost of a token isn't learned yet");
  }
  drawLatency(sum, tile);
  const running = cache?.requests?.running ?? health?.engine?.num_running;
  const waiting = cache?.requests?.waiting ?? health?.engine?.num_waiting;
  const latest = history.total(3 * history.intervalS);
  const rate = latest.generated === null ? "–" : short(latest.generated / latest.seconds, 1);
  tile("now", running === undefined ? "–" : `${count(running)} running`, `${count(waiting)} waiting · ${rate} tokens/s out`);
}

function drawLatency({ ttftWarm: warm, ttftCold: cold, warm: numWarm, cold: numCold }, tile) {
  const numbers = `${count(numWarm)} warm, ${count(numCold)} cold`;
  if (warm === null && cold === null) tile("ttft", "–", "no first token in this time");
  else if (warm === null) tile("ttft", seconds(cold), `cold; none was warm · ${numbers}`);
  else if (cold === null) tile("ttft", seconds(warm), `warm; none was cold · ${numbers}`);
  else tile("ttft", seconds(warm), `warm, against ${seconds(cold)} cold · ${numbers}`);
}

/** Return what needs attention: `{level, text}`, the worst first. */
export function concerns(history, cache, health, requests) {
  const found = [];
  const bad = (text) => found.unshift({ level: "bad", text });
  const warn = (text) => found.push({ level: "warn", text });
  const engine = health?.engine;
  if (health?.status === "dead") bad("The engine has failed: no request is answered until the server is restarted.");
  if (health?.status === "draining") warn("The server is shutting down and takes no new requests.");
  if (engine?.state === "stuck") bad(`One step has been running for ${coarse(engine.seconds_in_step)}.`);
  const now = cache?.requests;
  if (now && now.waiting && now.oldest_wait_s > LONG_WAIT_S) {
    warn(`${plural(now.waiting, "request waits", "requests wait")}, the longest for ${coarse(now.oldest_wait_s)}.`);
  }
  const blocks = cache?.blocks;
  if (blocks && blocks.total.blocks && blocks.referenced.blocks === blocks.total.blocks) {
    warn("Every block of the pool is in use: new requests wait, or running ones are preempted.");
  }
  const pins = cache?.pins;
  if (pins?.max_blocks && pins.blocks > 0.95 * pins.max_blocks) {
    warn("Pins are at their limit: a new one makes the pin used longest ago lapse.");
  }
  const tiers = cache?.tiers ?? {};
  const errors = (tiers.offload_errors ?? 0) + (tiers.load_errors ?? 0);
  if (errors) warn(`${plural(errors, "copy", "copies")} to or from the tiers failed since the start.`);
  if (cache?.kv_events?.dropped) {
    warn(`${plural(cache.kv_events.dropped, "batch", "batches")} of KV events never sent.`);
  }
  lately(history, cache, warn);
  const failed = (requests?.recent ?? []).find((one) => one.state === "failed");
  if (failed) warn(`A recent request failed: ${failed.id}.`);
  return found;
}

/** Look at the last five minutes. */
function lately(history, cache, warn) {
  const recent = history.total(LATELY_S);
  const hour = history.total(3600);
  if (!recent.samples) return;
  if (recent.failed) warn(`${plural(recent.failed, "request")} failed or timed out in the last 5 minutes.`);
  if (recent.rejected) warn(`${plural(recent.rejected, "request was", "requests were")} refused in the last 5 minutes.`);
  if (recent.preempted) warn(`${plural(recent.preempted, "preemption")} in the last 5 minutes: the pool is too small for what runs.`);
  const total = cache?.blocks?.total?.blocks;
  if (total && recent.evicted > BIG_TURNOVER * total) {
    warn(`${count(recent.evicted)} blocks evicted in the last 5 minutes, ${percent(recent.evicted / total)} of the pool.`);
  }
  const enough = recent.looked_up > ENOUGH_TOKENS && hour.looked_up > 3 * recent.looked_up;
  if (enough && recent.hitRate < hour.hitRate / 2) {
    warn(`The hit rate fell to ${percent(recent.hitRate)}; it was ${percent(hour.hitRate)} over the hour.`);
  }
}

/** Draw the concerns, or say that there are none; the tab's title tells how many. */
export function drawConcerns(found) {
  const list = byId("concerns");
  document.title = found.length ? `(${found.length}) RadixKV` : "RadixKV";
  const text = found.map((one) => one.text).join("\n") || "calm";
  if (list.dataset.shown === text) return; // it is read out when it changes
  list.dataset.shown = text;
  list.classList.toggle("calm", found.length === 0);
  put(
    list,
    found.length
      ? found.map((one) => h("li", { class: one.level }, one.text))
      : h("li", {}, "Nothing needs attention."),
  );
}
