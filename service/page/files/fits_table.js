// Where the job fits: one row per GPU and MIG profile, sorted by any column, the smallest first at the start.

import { element } from "./dom.js";
import { count, gib, share, shortGpu } from "./words.js";

// The words are those of gpumemnet/gpu/__init__.py.
const VERDICTS = { yes: ["✓ fits", 3], unsure: ["? may not fit", 2], unknown: ["– unknown", 1], no: ["✕ does not fit", 0] };
const TALLEST_PX = 430;

const COLUMNS = [
  ["device", "Device", (row) => row.name, ""],
  ["usable", "Usable", (row) => row.usableMib, "count"],
  ["verdict", "Fits?", (row) => VERDICTS[row.verdict][1] * 2 + row.probability, ""],
  ["probability", "Chance", (row) => (row.verdict === "unknown" ? -1 : row.probability), "count"],
];

export class FitsTable {
  constructor(place) {
    this.place = place;
    this.rows = [];
    this.kind = "gpu";
    this.sort = { column: "usable", descending: false };
    new ResizeObserver(() => this.cutBetweenRows()).observe(place);
  }

  show(rows) {
    this.rows = rows;
    this.paint();
  }

  only(kind) {
    this.kind = kind;
    this.paint();
  }

  paint() {
    const { column, descending } = this.sort;
    const value = COLUMNS.find(([name]) => name === column)[2];
    const chosen = this.rows.filter((row) => !this.kind || row.kind === this.kind);
    chosen.sort((one, other) => compare(value(one), value(other)) * (descending ? -1 : 1) || compare(one.name, other.name));
    this.place.replaceChildren(element("table", {},
      element("caption", { class: "unseen" }, "Where the job fits"),
      element("thead", {}, element("tr", {}, ...COLUMNS.map((entry) => this.heading(entry)))),
      element("tbody", {}, ...chosen.map(bodyRow))));
    this.cutBetweenRows();
  }

  // As high as whole rows are, so that none is cut.
  cutBetweenRows() {
    const content = this.place.firstElementChild;
    if (!content) return;
    const top = content.getBoundingClientRect().top;
    const bottoms = [...content.querySelectorAll("tbody tr")].map((row) => row.getBoundingClientRect().bottom - top);
    const border = this.place.offsetHeight - this.place.clientHeight;
    const highest = bottoms.filter((bottom) => bottom <= TALLEST_PX).at(-1);
    this.place.style.maxHeight = highest ? `${Math.ceil(highest) + border}px` : "";
  }

  heading([name, text, , alignment]) {
    const isSorted = this.sort.column === name;
    const button = element("button", { type: "button" }, text);
    button.addEventListener("click", () => {
      this.sort = { column: name, descending: isSorted && !this.sort.descending };
      this.paint();
      this.place.querySelector(`[data-column="${name}"] button`).focus();
    });
    const direction = this.sort.descending ? "descending" : "ascending";
    return element("th", { scope: "col", class: alignment || null, "data-column": name, "aria-sort": isSorted ? direction : null }, button);
  }
}

export function verdictPill(verdict) {
  return element("span", { class: `verdict ${verdict}` }, VERDICTS[verdict][0]);
}

// The smallest whole GPU and the smallest MIG profile that hold the job; and why a likely one may still not.
export function fitsLead(rows, coverage) {
  const isLikely = (row) => row.verdict === "unsure" && row.probability >= coverage;
  const why = rows.some(isLikely) ? " The limit decides what fits; the chance is that of the bars, which may be too sure." : "";
  return smallest(rows) + why;
}

function smallest(rows) {
  const bySize = rows.filter((row) => row.verdict === "yes").sort((one, other) => one.usableMib - other.usableMib);
  const named = [["gpu", "Smallest GPU"], ["mig", "smallest MIG profile"]].map(([kind, words]) => {
    const found = bySize.find((row) => row.kind === kind);
    return found ? `${words}: ${kind === "mig" ? `${found.name} of ${shortGpu(found.gpu)}` : shortGpu(found.name)} (${gib(found.usableMib)})` : null;
  }).filter(Boolean);
  const verdicts = rows.map((row) => row.verdict);
  if (named.length) return `${named.join("; ")}.`;
  if (verdicts.includes("unknown")) return "Unknown: without a limit nobody can say that it fits.";
  return verdicts.includes("unsure") ? "On the largest it may not fit." : "It does not fit any of them.";
}

function bodyRow(row) {
  return element("tr", { "data-verdict": row.verdict, "data-kind": row.kind },
    element("th", { scope: "row" }, shortGpu(row.name), row.note ? element("span", { class: "note" }, shortGpu(row.note)) : null),
    element("td", { class: "count" }, gib(row.usableMib)),
    element("td", {}, verdictPill(row.verdict)),
    row.verdict === "unknown"
      ? element("td", { class: "count", title: "not known: the job is unlike those that the model learned from" }, "–")
      : element("td", { class: "count", title: `${count(row.usableMib)} MiB` }, share(row.probability)));
}

function compare(one, other) {
  return typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other;
}
