// Where the blocks are: the pool by state, the tiers below it, pins and namespaces.

import { byId, h, put, td } from "./dom.js";
import { bytes, count, head, lasting, percent, plural, short } from "./format.js";

/** Draw the pool from the answers of `/admin/cache` and `/admin/engine`; the latter may be null. */
export function drawPool(cache, engine) {
  const { total, free, cached, referenced } = cache.blocks;
  const pinned = Math.min(referenced.blocks, cache.pins?.blocks ?? 0);
  const size = cache.bytes_per_block;
  const parts = [
    ["pinned", "pinned", pinned, "kept until their time is over; some may be in use, too"],
    ["running", "running", referenced.blocks - pinned, "held by requests"],
    ["evictable", "reused", cached.blocks, "cached, and free for whoever needs them"],
    ["free", "free", free.blocks, "hold nothing"],
  ];
  put(
    byId("pool-bars"),
    bar("Blocks by state", parts, total.blocks, size, cache.block_size),
    tierBars(cache.tiers ?? {}, size),
  );
  const kv = engine?.kv;
  const used = kv?.utilisation ?? null;
  const facts = [
    ["KV utilisation", used === null ? "nothing runs" : percent(used), "slots of running requests' blocks that hold a token"],
    ["Waste", used === null ? "–" : `${percent(1 - used)}, ${count(kv.slots_allocated - kv.tokens_stored)} slots`, "slots of those blocks that are still empty"],
    ["Shared", kv?.tokens_stored ? `${(kv.tokens_referenced / kv.tokens_stored).toFixed(2)} ×` : "–", "tokens running requests refer to, for each one stored"],
    ["Block", `${count(cache.block_size)} tokens, ${bytes(size)}`, ""],
    ["Tree", `${count(cache.tree.nodes)} nodes, ${count(cache.tree.leaves)} evictable leaves`, ""],
    ["Evicted", `${count(cache.evicted_blocks)} blocks`, "since the start"],
    ["Copied on write", `${count(cache.copied_blocks)} blocks`, "since the start"],
    ["Preemptions", count(cache.preemptions), "since the start"],
  ];
  put(byId("pool-facts"), facts.map(([name, value, note]) =>
    h("div", { title: note || null }, h("dt", {}, name), h("dd", {}, value))));
  drawNamespaces(cache.namespaces ?? {});
}

function bar(title, parts, total, blockBytes, blockSize) {
  const said = parts.map(([name, , number]) => `${name} ${count(number)}`).join(", ");
  return h(
    "div",
    { class: "pool" },
    h("div", { class: "pool-head" },
      h("h3", {}, title),
      h("span", { class: "quiet" }, `${count(total)} blocks · ${bytes(total * blockBytes)}`,
        blockSize ? ` · ${short(total * blockSize)} tokens` : ""),
    ),
    h("div", { class: "stack", role: "img", "aria-label": `${title}: ${said}, of ${count(total)} blocks` },
      parts.filter(([, , number]) => number > 0).map(([, tone, number]) =>
        h("i", { class: tone, style: { flexGrow: String(number) } })),
    ),
    h("ul", { class: "legend" }, parts.map(([name, tone, number, note]) =>
      h("li", { title: note }, h("i", { class: `swatch ${tone}` }), `${name} `,
        h("b", {}, count(number)), h("span", { class: "quiet" }, ` ${total ? percent(number / total) : "–"}`)))),
  );
}

function tierBars(tiers, blockBytes) {
  const named = [["host", "Host memory"], ["disk", "Disk"]].filter(([name]) => tiers[name]);
  if (!named.length) return h("p", { class: "quiet" }, "No tier below the pool: evicted blocks are gone. --host-cache-memory and --disk-cache keep them.");
  return named.map(([name, title]) => {
    const { blocks, capacity_blocks: capacity } = tiers[name];
    const element = bar(title, [["kept", "reused", blocks, ""], ["free", "free", Math.max(0, capacity - blocks), ""]], capacity, blockBytes, 0);
    const extra = [];
    if (name === "disk") {
      extra.push(`${plural(tiers.disk.queued_blocks ?? 0, "block")} to be written`);
      if (tiers.disk.writes_dropped) extra.push(`${count(tiers.disk.writes_dropped)} writes dropped`);
    }
    const rate = tiers.load_bytes_per_s?.[name];
    if (rate) extra.push(`loads ${bytes(rate)}/s`);
    if (extra.length) element.append(h("p", { class: "quiet" }, extra.join(" · ")));
    return element;
  });
}

/** Draw the list of pins from `/admin/cache/pins`. */
export function drawPins({ data, usage }) {
  const note = usage?.max_blocks
    ? `${count(usage.blocks)} of at most ${count(usage.max_blocks)} blocks; ${count(usage.lapsed)} gave way, ${count(usage.expired)} ran out`
    : "Pins are off.";
  const heads = ["pin", "asked for by", "namespace", "tokens", "lasts"];
  put(
    byId("pins"),
    h("p", { class: "quiet" }, note),
    data.length
      ? h("table", { class: "rows" },
          h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, data.slice(0, 50).map((pin) =>
            h("tr", {},
              [h("code", {}, pin.id), h("span", { title: pin.source }, head(pin.source, 22)), h("code", { class: "wrap" }, pin.namespace), count(pin.pinned_tokens), lasting(pin.expires)]
                .map((cell, index) => td(heads[index], cell)),
            ))),
        )
      : h("p", { class: "quiet" }, "Nothing is pinned."),
    data.length > 50 ? h("p", { class: "quiet" }, `and ${count(data.length - 50)} more`) : null,
  );
}

function drawNamespaces(namespaces) {
  const names = Object.entries(namespaces).sort(([, a], [, b]) => b.looked_up - a.looked_up);
  const heads = ["namespace", "requests", "looked up", "reused", "blocks", "pinned", "quota"];
  put(
    byId("namespaces"),
    names.length
      ? h("table", { class: "rows" },
          h("thead", {}, h("tr", {}, heads.map((name) => h("th", { scope: "col" }, name)))),
          h("tbody", {}, names.slice(0, 20).map(([name, one]) =>
            h("tr", {},
              [
                h("code", {}, name), count(one.requests), short(one.looked_up), percent(one.hit_rate),
                count(one.blocks), count(one.pinned_blocks), quota(one.quota),
              ].map((cell, index) => td(heads[index], cell)),
            ))),
        )
      : h("p", { class: "quiet" }, "No prompt yet."),
    names.length > 20 ? h("p", { class: "quiet" }, `and ${count(names.length - 20)} more`) : null,
  );
}

function quota(one) {
  if (!one) return "none";
  const used = `${count(one.used_blocks)} of ${count(one.limit_blocks)}`;
  return one.excess_blocks ? `${used}, ${count(one.excess_blocks)} over` : used;
}
