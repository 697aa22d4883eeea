// Short hands for the document: elements by id, and new ones without any HTML in strings.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return furnish(document.createElement(name), attributes, children);
}

export function shape(name, attributes = {}, ...children) {
  return furnish(document.createElementNS(SVG, name), attributes, children);
}

function furnish(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// A plain table: headings, rows of texts; all columns but the first are numbers.
export function table(caption, headings, rows) {
  const head = headings.map((text, at) => element("th", { scope: "col", class: at ? "count" : null }, text));
  const body = rows.map((row) =>
    element("tr", {}, ...row.map((text, at) =>
      at ? element("td", { class: "count" }, text) : element("th", { scope: "row" }, text))));
  return element("table", {},
    element("caption", { class: "unseen" }, caption),
    element("thead", {}, element("tr", {}, ...head)),
    element("tbody", {}, ...body));
}

// Draws `paint(width)` into `place`, and again when the width changes; returns nothing, the last call wins.
const painters = new WeakMap();
const watcher = new ResizeObserver((entries) => {
  for (const { target, contentRect } of entries) {
    const painter = painters.get(target);
    const width = Math.floor(contentRect.width);
    if (painter && width > 0 && width !== painter.width) {
      painter.width = width;
      target.replaceChildren(...painter.paint(width));
    }
  }
});

export function draw(place, paint) {
  const width = Math.floor(place.clientWidth);
  painters.set(place, { paint, width });
  if (width > 0) place.replaceChildren(...paint(width));
  watcher.observe(place);
}
