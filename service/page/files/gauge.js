// One bar as long as the card's memory: filled up to the request, hatched up to the limit.

import { shape } from "./dom.js";
import { linear } from "./scale.js";
import { gib } from "./words.js";

const HEIGHT = 46;

export function gauge(answer, usableMib) {
  return (width) => {
    const furthest = Math.max(usableMib, answer.request_mib, answer.limit_mib ?? 0);
    const x = linear(0, furthest, 0.5, width - 0.5);
    const inside = (amount) => Math.max(2, x(Math.min(amount, furthest)) - 0.5);
    const overflows = furthest > usableMib;
    const parts = [shape("rect", { class: "track", x: 0.5, y: 16.5, width: x(usableMib) - 0.5, height: 16, rx: 3 })];
    if (answer.limit_mib !== null) {
      parts.push(shape("rect", { class: "margin", x: 0.5, y: 16.5, width: inside(answer.limit_mib), height: 16, rx: 3 }));
    }
    parts.push(shape("rect", { class: "used", x: 0.5, y: 16.5, width: inside(answer.request_mib), height: 16, rx: 3 }));
    if (answer.limit_mib !== null) {
      parts.push(shape("path", { class: "limit-line", d: `M${Math.max(3, x(answer.limit_mib))} 12V37` }));
    }
    if (overflows) parts.push(shape("path", { class: "capacity-line", d: `M${x(usableMib)} 8V41` }));
    const atCapacity = { y: overflows ? 9 : 45, class: "name capacity-name" };
    const middle = x(usableMib);
    parts.push(shape("text", { ...atCapacity, x: overflows ? middle - 5 : width, "text-anchor": "end" }, `usable: ${gib(usableMib)}`));
    if (!overflows) parts.push(shape("text", { x: 0, y: 45 }, "0"));
    const limit = answer.limit_mib === null ? "no limit known" : `limit ${gib(answer.limit_mib)}`;
    const text = `Request ${gib(answer.request_mib)}, ${limit}, of ${gib(usableMib)} usable on the card`;
    return [shape("svg", { role: "img", "aria-label": text, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` }, ...parts)];
  };
}
