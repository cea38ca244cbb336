// What is told of a node of the tree: in its box, beside the picture, and to a screen reader.

import { h } from "./dom.js";
import { ago, coarse, count, plural } from "./format.js";
import { oneLine, visible } from "./texts.js";
import { pathTo } from "./tree_layout.js";

const START_TOKENS = 24; // the server sends the text of so many of each node
const MOST_SESSIONS = 8;

/** Return all there is to say of a node; `loadedAt` is when it was asked for. */
export function facts(node, loadedAt) {
  const { source } = node;
  const isNode = node.kind === "run" || node.kind === "tail";
  const begins = pathTo(node).filter((one) => one.source.text !== undefined);
  return [
    h("h3", {}, title(node)),
    isNode
      ? h("div", { class: "node-text" },
          h("p", { class: "quiet" }, "Its text begins"),
          h("pre", { tabindex: "0" }, visible(source.text), cut(node)))
      : null,
    h("dl", { class: "facts" }, rows(node, isNode, loadedAt)),
    begins.length > 1
      ? h("details", {},
          h("summary", {}, `The ${count(begins.length)} pieces up to here`),
          h("ol", { class: "pieces" }, begins.map((one) =>
            h("li", {},
              h("span", { class: "quiet" }, `${plural(one.own, "token")} `),
              h("q", {}, oneLine(one.source.text), cut(one))))))
      : null,
  ];
}

function rows(node, isNode, loadedAt) {
  const { source } = node;
  const found = [];
  const add = (name, ...value) => found.push(h("dt", {}, name), h("dd", {}, ...value));
  const total = `${node.kind === "more" ? "about " : ""}${count(Math.round(node.total))}`;
  if (isNode) {
    add("Tokens", count(node.own), node.kind === "tail" ? ", a partly filled block" : null);
    if (node.children.length) add("With all below", total);
  } else {
    add("Tokens", total);
  }
  if (source.blocks !== undefined) add("Blocks", count(source.blocks));
  if (isNode) add("Found again", source.hits ? plural(source.hits, "time") : "never yet");
  if (source.age_s !== undefined) add("Last used", ago(loadedAt - source.age_s));
  if (source.pins !== undefined) {
    const used = Math.max(0, source.locks - source.pins);
    add("Pins", source.pins ? `${count(source.pins)}, on it or below` : "none");
    add("In use by", used ? plural(used, "request") : "no request");
  }
  if (isNode || node.kind === "namespace") {
    const names = source.sessions ?? [];
    const more = names.length - MOST_SESSIONS;
    add("Namespace", h("code", {}, pathTo(node)[1].source.namespace));
    add("Sessions",
      names.length
        ? names.slice(0, MOST_SESSIONS).map((id) => h("code", { class: "wrap" }, `${id} `))
        : "none end here",
      more > 0 ? `and ${count(more)} more` : null);
  }
  return found;
}

const cut = (node) => (node.own > START_TOKENS ? "…" : null);

/** Return a node's name, in one line. */
export function label(node) {
  switch (node.kind) {
    case "all": return "everything";
    case "namespace": return node.source.namespace;
    case "more": return `${count(node.source.count)} more`;
    case "small": return `${count(node.source.count)} small`;
    default: return oneLine(node.source.text) || "(no text)";
  }
}

function title(node) {
  switch (node.kind) {
    case "all": return "Everything that is cached";
    case "namespace": return "A namespace";
    case "more": return `${count(node.source.count)} nodes that were not asked for`;
    case "small": return `${count(node.source.count)} nodes too narrow to draw one by one`;
    case "tail": return "The end of a conversation";
    default: return node.children.length ? "A beginning that others continue" : "A run of blocks";
  }
}

/** Return marks for what a node's box can't say in words. */
export function marks(node) {
  const { pins = 0, locks = 0, sessions = [] } = node.source;
  const found = `${pins ? "◆" : ""}${locks > pins ? "●" : ""}${sessions.length ? "▸" : ""}`;
  return found && (node.kind === "run" || node.kind === "tail")
    ? h("span", { class: "cell-marks", "aria-hidden": "true" }, `${found} `)
    : null;
}

/** What a screen reader says of a node. */
export function spoken(node) {
  const parts = [label(node).slice(0, 80), plural(Math.round(node.total), "token")];
  const { source } = node;
  if (source.hits !== undefined) parts.push(plural(source.hits, "hit"));
  if (source.age_s !== undefined) parts.push(`used ${coarse(source.age_s)} ago`);
  if (source.pins) parts.push("pinned");
  if (source.sessions?.length) parts.push(plural(source.sessions.length, "session"));
  return parts.join(", ");
}
