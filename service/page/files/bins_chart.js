// The bins as bars: the part of the axis where the probability lies, with request, limit and capacity marked.

import { shape, table } from "./dom.js";
import { mark } from "./marks.js";
import { linear, memoryTicks } from "./scale.js";
import { binWidthMib } from "./shapes.js";
import { count, gib, mib, share } from "./words.js";

const HEIGHT = 250;
const TOP = 54;
const BOTTOM = HEIGHT - 26;
const SHOWN = 0.002; // bins less probable than this are left out at both ends
const LEAST_BINS = 8;

export function edges(bins, index) {
  const width = binWidthMib(bins);
  const lower = index * width;
  return [lower, index === bins.count - 1 ? null : lower + width];
}

export function binName(bins, index) {
  const [lower, upper] = edges(bins, index);
  return upper === null ? `${count(lower)} MiB or more` : `${count(lower)} to ${count(upper)} MiB`;
}

// First and last bin that the chart shows.
function shown(answer) {
  const { probabilities, count: bins } = answer.bins;
  const width = binWidthMib(answer.bins);
  const wanted = probabilities.map((probability, index) => (probability >= SHOWN ? index : -1)).filter((index) => index >= 0);
  const marked = [answer.request_mib, answer.limit_mib].filter((amount) => amount !== null);
  const held = marked.map((amount) => Math.min(bins - 1, Math.floor(amount / width)));
  let first = Math.max(0, Math.min(...wanted, ...held) - 1);
  let last = Math.min(bins - 1, Math.max(...wanted, ...held) + 1);
  while (last - first + 1 < Math.min(LEAST_BINS, bins)) {
    if (last < bins - 1) last += 1;
    if (first > 0 && last - first + 1 < LEAST_BINS) first -= 1;
  }
  return [first, last];
}

export function binsChart(answer, usableMib) {
  return (width) => {
    const { bins } = answer;
    const binWidth = binWidthMib(bins);
    const [first, last] = shown(answer);
    const from = first * binWidth;
    const to = (last + 1) * binWidth;
    const x = linear(from, to, 1, width - 1);
    const highest = Math.max(...bins.probabilities);
    const y = linear(0, Math.max(highest, 0.05), BOTTOM, TOP + 16);
    const gap = x(from + binWidth) - x(from) > 6 ? 1 : 0;
    const parts = [];
    const names = [];
    for (let index = first; index <= last; index += 1) {
      const probability = bins.probabilities[index];
      const left = x(index * binWidth) + gap;
      const wide = x((index + 1) * binWidth) - gap - left;
      const height = Math.max(probability > 0.0005 ? 1.5 : 0, BOTTOM - y(probability));
      const bar = { class: index === answer.bin.index ? "bar most" : "bar", x: left, y: BOTTOM - height, width: wide, height };
      parts.push(shape("rect", bar, shape("title", {}, `${binName(bins, index)}: ${share(probability)}`)));
      if (wide >= 40 && probability >= 0.005) {
        names.push(shape("text", { class: "count", x: left + wide / 2, y: BOTTOM - height - 5, "text-anchor": "middle" }, share(probability)));
      }
    }
    parts.push(shape("path", { class: "axis", d: `M0 ${BOTTOM}H${width}` }));
    for (const tick of memoryTicks(from, to, width / 74)) {
      const anchor = x(tick) < 20 ? "start" : x(tick) > width - 24 ? "end" : "middle";
      parts.push(shape("path", { class: "axis", d: `M${x(tick)} ${BOTTOM}v4` }));
      parts.push(shape("text", { x: x(tick), y: BOTTOM + 18, "text-anchor": anchor }, tick === 0 ? "0" : gib(tick)));
    }
    parts.push(...mark("request", x(answer.request_mib), 18, BOTTOM, `request ${count(answer.request_mib)}`, width));
    if (answer.limit_mib !== null) {
      parts.push(...mark("limit", x(Math.min(answer.limit_mib, to)), 34, BOTTOM, `limit ${count(answer.limit_mib)}`, width));
    }
    if (usableMib >= from && usableMib <= to) {
      parts.push(...mark("capacity", x(usableMib), 0, BOTTOM, `card ends at ${count(usableMib)}`, width));
    } else {
      const isBelow = usableMib < from;
      const text = isBelow ? `← card ends at ${gib(usableMib)}` : `card ends at ${gib(usableMib)} →`;
      parts.push(shape("text", { class: "name capacity-name", x: isBelow ? 0 : width, y: 12, "text-anchor": isBelow ? "start" : "end" }, text));
    }
    const name = `Bars of ${mib(binWidth)}; the most probable is ${binName(bins, answer.bin.index)} with ${share(answer.bin.probability)}`;
    parts.push(...names); // over the marks, so that both can be read
    return [shape("svg", { role: "img", "aria-label": name, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}` }, ...parts)];
  };
}

export function binsTable(answer) {
  const [first, last] = shown(answer);
  const indices = Array.from({ length: last - first + 1 }, (_, at) => first + at);
  return table("Probability of each bin", ["memory", "probability"],
    indices.map((index) => [binName(answer.bins, index), share(answer.bins.probabilities[index])]));
}
