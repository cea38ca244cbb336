// The radix tree as a picture one can walk, with the mouse, a finger or the keyboard.

import { byId, h, put } from "./dom.js";
import { short } from "./format.js";
import { isMarking } from "./tables.js";
import { facts, label, marks, spoken } from "./tree_facts.js";
import { build, layout, pathTo } from "./tree_layout.js";

const ROW_PX = 30;
const MAX_ROWS = 14;
const MARKS_PX = 26;
const LABEL_PX = 64;
export const DETAILS = [
  { depth: 32, breadth: 32 },
  { depth: 64, breadth: 250 },
];
const AGES = [[10, "10 s"], [60, "1 min"], [600, "10 min"], [3600, "1 h"], [21600, "6 h"]];
const HITS = [[0, "none"], [1, "1"], [4, "2–4"], [19, "5–19"], [99, "20–99"]];

export class TreeView {
  #onMore;
  #model = null;
  #loadedAt = 0;
  #zoom = "all"; // key of the node that fills the width
  #bundle = null; // the node itself if it is a bundle, which no report has
  #selected = "all";
  #cells = [];
  #width = 0;
  #colour = "age";
  #wanted = null; // a session to be shown as soon as the tree is here
  detail = 0; // index into DETAILS

  /** `onMore` is called when more of the tree is wanted. */
  constructor(onMore) {
    this.#onMore = onMore;
    this.picture = byId("tree-picture");
    this.picture.addEventListener("keydown", (event) => this.#key(event));
    this.picture.addEventListener("click", (event) => this.#click(event));
    for (const button of byId("tree-colour").children) {
      button.addEventListener("click", () => this.#paint(button.dataset.colour));
    }
    byId("tree-out").addEventListener("click", () => this.#out());
    byId("tree-all").addEventListener("click", () => this.#zoomTo(this.#model.top));
    byId("tree-more").addEventListener("click", () => this.#more());
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && width !== this.#width) {
        this.#width = width;
        this.#draw();
      }
    }).observe(this.picture);
    this.#paint("age");
  }

  get path() {
    const { depth, breadth } = DETAILS[this.detail];
    return `cache/tree?depth=${depth}&breadth=${breadth}`;
  }

  update(report) {
    const before = this.#cells[0]?.node ?? null;
    this.#model = build(report);
    this.#loadedAt = Date.now() / 1000;
    if (this.#bundle) this.#refreshBundle();
    // What was looked at may have been evicted: what is left of the way to it is shown then.
    if (!this.#bundle) this.#zoom = this.#known(before)?.key ?? "all";
    this.#draw();
    this.#findWanted();
  }

  /** Select the node where a session's cached part ends, once the tree has come anew. */
  showSession(id) {
    this.#wanted = id;
    byId("tree-said").hidden = true;
    this.#onMore();
  }

  #findWanted() {
    const id = this.#wanted;
    if (id === null) return;
    this.#wanted = null;
    for (const node of this.#model.nodes.values()) {
      if (node.source.sessions?.includes(id)) {
        this.#zoomTo(node.kind === "namespace" ? node : node.parent, node);
        if (this.#selected !== node.key) this.#zoomTo(node); // too narrow beside its neighbours
        return;
      }
    }
    put(byId("tree-said"), `Session ${id} ends in no box: nothing of it is cached, or it isn't among the 100 used last, or below what is loaded.`);
    byId("tree-said").hidden = false;
  }

  #draw() {
    if (!this.#model || !this.#width) return;
    const root = this.#bundle ?? this.#model.nodes.get(this.#zoom);
    this.#cells = layout(root, this.#width, MAX_ROWS);
    if (!this.#cell(this.#selected)) this.#selected = root.key;
    const focused = this.picture.contains(document.activeElement);
    const empty = this.#model.top.total === 0;
    this.picture.style.height = `${ROW_PX * (1 + Math.max(...this.#cells.map((cell) => cell.row)))}px`;
    put(this.picture, this.#cells.map((cell) => this.#element(cell)));
    byId("tree-empty").hidden = !empty;
    byId("tree-body").hidden = empty;
    if (focused) this.#focus();
    this.#drawPath(root);
    this.#drawFacts();
    const elided = [...this.#model.nodes.values()].some((node) => node.kind === "more");
    byId("tree-more").hidden = !elided || this.detail + 1 >= DETAILS.length;
    byId("tree-out").disabled = byId("tree-all").disabled = root.key === "all";
  }

  #element({ node, row, x, width }) {
    const gap = width > 3 ? 1 : 0;
    const deeper = row + 1 === MAX_ROWS && node.children.length > 0;
    const element = h(
      "div",
      {
        class: `cell ${node.kind} ${this.#tone(node)}`,
        role: "treeitem",
        tabindex: node.key === this.#selected ? "0" : "-1",
        "aria-level": row + 1,
        "aria-selected": String(node.key === this.#selected),
        "aria-expanded": node.children.length ? String(!deeper) : null,
        "aria-label": spoken(node),
        "data-key": node.key,
        style: {
          left: `${x}px`, top: `${row * ROW_PX}px`, width: `${Math.max(1, width - gap)}px`,
        },
      },
      width >= MARKS_PX
        ? h("span", { class: "cell-text" }, marks(node), width >= LABEL_PX ? label(node) : null)
        : null,
      width >= 150 ? h("span", { class: "cell-size" }, short(Math.round(node.total)), deeper ? " ⋯" : null) : null,
    );
    return element;
  }

  #tone(node) {
    if (node.kind === "run" || node.kind === "tail") {
      const { age_s: age, hits } = node.source;
      const classes = this.#colour === "age" ? AGES : HITS;
      const value = this.#colour === "age" ? age : hits;
      const found = classes.findIndex(([limit]) =>
        this.#colour === "age" ? value < limit : value <= limit,
      );
      const level = found < 0 ? classes.length : found;
      const pinned = node.source.pins ? " has-pin" : "";
      return `${this.#colour}-${level}${pinned}`;
    }
    return "";
  }

  #paint(colour) {
    this.#colour = colour;
    for (const button of byId("tree-colour").children) {
      button.setAttribute("aria-pressed", String(button.dataset.colour === colour));
    }
    const names = colour === "age"
      ? [...AGES.map(([, name], index) => (index ? name : `under ${name}`)), "older"]
      : [...HITS.map(([, name]) => name), "100 or more"];
    put(
      byId("tree-legend"),
      h("span", {}, colour === "age" ? "last used" : "times found again"),
      names.map((name, level) =>
        h("span", { class: "legend-item" }, h("i", { class: `swatch ${colour}-${level}` }), name),
      ),
      h("span", { class: "legend-item" }, "◆ pinned"),
      h("span", { class: "legend-item" }, "● in use"),
      h("span", { class: "legend-item" }, "▸ a session ends here"),
    );
    this.#draw();
  }

  #cell(key) {
    return this.#cells.find((cell) => cell.node.key === key);
  }

  #select(node, { focus = true } = {}) {
    this.#selected = node.key;
    for (const element of this.picture.children) {
      const chosen = element.dataset.key === node.key;
      element.setAttribute("aria-selected", String(chosen));
      element.tabIndex = chosen ? 0 : -1;
    }
    if (focus) this.#focus();
    this.#drawFacts();
  }

  #focus() {
    const chosen = [...this.picture.children].find((one) => one.dataset.key === this.#selected);
    chosen?.focus({ preventScroll: true });
  }

  #zoomTo(node, selected = node) {
    if (node.kind === "more") {
      this.#more();
      return;
    }
    this.#zoom = node.key;
    this.#bundle = node.kind === "small" ? node : null;
    this.#selected = selected.key;
    this.#draw();
  }

  #out() {
    const root = this.#cells[0]?.node;
    if (root?.parent) this.#zoomTo(root.parent, root);
  }

  #more() {
    if (this.detail + 1 < DETAILS.length) {
      this.detail += 1;
      this.#onMore();
    }
  }

  /** Return the node of the model that an older one stands for, or else its nearest ancestor. */
  #known(node) {
    let at = node;
    while (at && !this.#model.nodes.has(at.key)) at = at.parent;
    return at && this.#model.nodes.get(at.key);
  }

  /** Make the bundle in view anew of those of its nodes that are still there. */
  #refreshBundle() {
    const { nodes } = this.#model;
    const members = this.#bundle.children.map((node) => nodes.get(node.key)).filter(Boolean);
    const parent = this.#known(this.#bundle.parent);
    if (!parent || !members.length) {
      this.#bundle = null;
      this.#zoom = "all";
      return;
    }
    const total = members.reduce((sum, node) => sum + node.total, 0);
    this.#bundle = {
      ...this.#bundle, parent, children: members, total, source: { count: members.length },
    };
  }

  #click(event) {
    const key = event.target.closest("[data-key]")?.dataset.key;
    const cell = key && this.#cell(key);
    if (!cell) return;
    // A second click goes in, or out if it is on the node that is in view already.
    if (key !== this.#selected) this.#select(cell.node);
    else if (cell.row === 0) this.#out();
    else this.#zoomTo(cell.node);
  }

  #key(event) {
    const cell = this.#cell(this.#selected);
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const row = this.#cells.filter((other) => other.row === cell.row);
    const place = row.indexOf(cell);
    const below = this.#cells.find(
      (other) => other.row === cell.row + 1 && other.x >= cell.x - 0.01 && other.x < cell.x + cell.width,
    );
    const actions = {
      ArrowDown: () => below && this.#select(below.node),
      ArrowUp: () => (cell.row === 0 ? this.#out() : this.#select(this.#above(cell).node)),
      ArrowRight: () => row[place + 1] && this.#select(row[place + 1].node),
      ArrowLeft: () => row[place - 1] && this.#select(row[place - 1].node),
      Enter: () => this.#zoomTo(cell.node),
      " ": () => this.#zoomTo(cell.node),
      Backspace: () => this.#out(),
      Escape: () => this.#out(),
      Home: () => this.#zoomTo(this.#model.top),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }

  #above(cell) {
    return this.#cells.find(
      (other) =>
        other.row === cell.row - 1 && other.x <= cell.x + 0.01 && cell.x < other.x + other.width,
    );
  }

  #drawPath(root) {
    put(
      byId("tree-path"),
      pathTo(root).map((node) =>
        h("li", {},
          h("button",
            {
              type: "button",
              "aria-current": node === root ? "true" : null,
              onclick: () => this.#zoomTo(node),
            },
            label(node),
          ),
        ),
      ),
    );
  }

  #drawFacts() {
    const node = this.#cell(this.#selected)?.node;
    if (!node) return;
    const place = byId("tree-facts");
    const same = place.dataset.of === node.key;
    if (!(same && isMarking(place))) {
      const open = same && place.querySelector("details")?.open;
      put(place, facts(node, this.#loadedAt));
      if (open && place.querySelector("details")) place.querySelector("details").open = true;
      place.dataset.of = node.key;
    }
    byId("tree-in").hidden = this.#cells[0].node === node || node.children.length === 0;
    byId("tree-in").onclick = () => this.#zoomTo(node);
  }
}
