// Elements, made so that text can only ever become text: nothing here parses HTML.

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "style") Object.assign(element.style, value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(2).filter((child) => child !== null && child !== undefined));
  return element;
}

/** Return an HTML element; children are elements or texts, `style` is an object. */
export const h = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

/** Return an SVG element. */
export const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Return a table's cell; `label` names it where there is no room for a head. */
export const td = (label, ...content) =>
  h("td", { "data-label": label || null }, h("div", {}, ...content));

export const byId = (id) => document.getElementById(id);

/** Replace what is in an element. */
export const put = (element, ...children) =>
  element.replaceChildren(
    ...children.flat().filter((child) => child !== null && child !== undefined),
  );

/** Set an element's text, but leave it alone if it is there already: no needless announcements. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Read and write what is remembered between visits; a browser may refuse to remember. */
export const memory = {
  get(store, name) {
    try {
      return store().getItem(name);
    } catch {
      return null;
    }
  },
  set(store, name, value) {
    try {
      if (value === null) store().removeItem(name);
      else store().setItem(name, value);
    } catch {
      // It is forgotten with the page, then.
    }
  },
};
