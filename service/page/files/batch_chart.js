// Memory against batch size: request and limit as lines, the card's capacity across, today's batch size marked.

import { shape, table } from "./dom.js";
import { linear, memoryTicks } from "./scale.js";
import { count, gib, mib } from "./words.js";

const HEIGHT = 280;
const TOP = 22;
const BOTTOM = HEIGHT - 40;
const LEFT = 58;

export function batchChart(curve, batchSize) {
  return (width) => {
    const { points, usableMib } = curve;
    const right = width - 10;
    const sizes = points.map((point) => point.batch_size);
    const x = logarithmic(sizes[0], sizes.at(-1), LEFT, right);
    const reached = Math.max(...points.map((point) => point.limit_mib ?? point.request_mib));
    const top = reached > usableMib ? Math.min(reached, usableMib * 1.25) : reached > usableMib * 0.4 ? usableMib * 1.1 : reached * 1.15;
    const y = linear(0, top, BOTTOM, TOP);
    const parts = [];
    for (const tick of memoryTicks(0, top, 6)) {
      parts.push(shape("path", { class: tick ? "grid" : "axis", d: `M${LEFT} ${Math.round(y(tick)) + 0.5}H${right}` }));
      parts.push(shape("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end" }, tick === 0 ? "0" : gib(tick)));
    }
    for (const size of batchTicks(sizes[0], sizes.at(-1), (right - LEFT) / 58)) {
      parts.push(shape("path", { class: "axis", d: `M${x(size)} ${BOTTOM}v4` }));
      parts.push(shape("text", { x: x(size), y: BOTTOM + 18, "text-anchor": "middle" }, short(size)));
    }
    parts.push(shape("text", { x: (LEFT + right) / 2, y: HEIGHT - 4, "text-anchor": "middle" }, "batch size (each step doubles it)"));
    if (batchSize >= sizes[0] && batchSize <= sizes.at(-1)) {
      const atEnd = x(batchSize) > width - 110;
      parts.push(shape("path", { class: "now-line", d: `M${x(batchSize)} ${TOP - 6}V${BOTTOM}` }));
      parts.push(shape("text", {
        class: "name", x: x(batchSize) + (atEnd ? -5 : 5), y: TOP - 8, "text-anchor": atEnd ? "end" : "start",
      }, `now: ${count(batchSize)}`));
    }
    for (const kind of ["limit", "request"]) {
      parts.push(shape("path", { class: `${kind}-line`, d: line(points, `${kind}_mib`, x, y, top) }));
    }
    for (const point of points.filter(({ batch_size: size }) => Number.isInteger(Math.log2(size)))) {
      for (const kind of ["limit", "request"]) {
        const amount = point[`${kind}_mib`];
        if (amount === null || amount > top) continue;
        const dot = { class: `dot ${kind}`, cx: x(point.batch_size), cy: y(amount), r: 3 };
        parts.push(shape("circle", dot, shape("title", {}, `batch ${count(point.batch_size)}: ${kind} ${mib(amount)}`)));
      }
    }
    if (usableMib <= top) {
      parts.push(shape("path", { class: "capacity-line", d: `M${LEFT} ${y(usableMib)}H${right}` }));
      parts.push(shape("text", { class: "name capacity-name", x: LEFT + 6, y: y(usableMib) - 6 }, `${curve.gpu}: ${gib(usableMib)}`));
    } else {
      parts.push(shape("text", { class: "name capacity-name", x: LEFT + 6, y: TOP + 12 }, `↑ ${curve.gpu}: ${gib(usableMib)}`));
    }
    const name = `Memory against batch size from ${sizes[0]} to ${sizes.at(-1)}, with the card's ${gib(usableMib)}`;
    return [shape("svg", { role: "img", "aria-label": name, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` }, ...parts)];
  };
}

export function batchTable(curve) {
  const chosen = curve.points.filter((point) => Number.isInteger(Math.log2(point.batch_size)));
  return table("Memory by batch size", ["batch size", "request", "limit"], chosen.map((point) =>
    [count(point.batch_size), mib(point.request_mib), point.limit_mib === null ? "none" : mib(point.limit_mib)]));
}

function logarithmic(from, to, left, right) {
  const place = linear(Math.log2(from), Math.log2(to), left, right);
  return (value) => place(Math.log2(value));
}

function batchTicks(from, to, most) {
  const powers = [];
  for (let size = 2 ** Math.ceil(Math.log2(from)); size <= to; size *= 2) powers.push(size);
  const step = Math.ceil(powers.length / most);
  return powers.filter((_, at) => at % step === 0);
}

const short = (size) => (size >= 2 ** 20 ? `${size / 2 ** 20} Mi` : size >= 2 ** 14 ? `${size / 1024} Ki` : count(size));

// A path through the points, cut where it leaves the chart and where there is no amount.
function line(points, field, x, y, top) {
  let path = "";
  let last = null;
  for (const point of points) {
    const amount = point[field];
    if (amount === null) { last = null; continue; }
    if (amount <= top) {
      path += `${last === null ? "M" : "L"}${x(point.batch_size)} ${y(amount)}`;
    } else if (last !== null && last[field] <= top) {
      // memory is linear in the batch size, so the crossing is found there and not on the logarithmic axis
      const size = last.batch_size + ((top - last[field]) / (amount - last[field])) * (point.batch_size - last.batch_size);
      path += `L${x(size)} ${y(top)}`;
    }
    last = point;
  }
  return path;
}
