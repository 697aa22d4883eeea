// What the charts share: how request, limit and capacity are drawn (never by colour alone) and named.

import { element, shape } from "./dom.js";

const NAMES = { request: "request", limit: "limit", capacity: "usable memory of the card" };

export function legend(kinds) {
  return element("ul", { class: "legend" }, ...kinds.map((kind) =>
    element("li", {},
      shape("svg", { viewBox: "0 0 26 10", "aria-hidden": "true" }, shape("path", { class: `${kind}-line`, d: "M0 5H26" })),
      NAMES[kind])));
}

// A vertical mark from `top` to `bottom` at `x` with its text above, kept inside 0 … width.
export function mark(kind, x, top, bottom, text, width) {
  const atEnd = x + text.length * 6.9 + 8 > width;
  return [
    shape("path", { class: "halo", d: `M${x} ${top + 4}V${bottom}` }),
    shape("path", { class: `${kind}-line`, d: `M${x} ${top + 4}V${bottom}` }),
    shape("text", {
      class: `name ${kind}-name`, x: atEnd ? x - 6 : x + 6, y: top + 12, "text-anchor": atEnd ? "end" : "start",
    }, text),
  ];
}
