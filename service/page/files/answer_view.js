// Shows one answer: the numbers and what they mean, then the bins, the devices and the copy boxes.

import { batchChart, batchTable } from "./batch_chart.js";
import { binName, binsChart, binsTable, edges } from "./bins_chart.js";
import { byId, draw, element } from "./dom.js";
import { FitsTable, fitsLead, verdictPill } from "./fits_table.js";
import { gauge } from "./gauge.js";
import { legend } from "./marks.js";
import { recipeBox, recipes } from "./recipes.js";
import { capital, count, coverageWords, gib, labelWords, mib, percent, share } from "./words.js";

const fits = new FitsTable(byId("fits-table"));

// `shown` is {answer, question, usableMib, rows}.
export function showAnswer(shown) {
  const { answer, usableMib } = shown;
  byId("no-answer").hidden = true;
  byId("result").hidden = false;
  byId("expected-word").textContent = answer.in_support ? "Expected on" : "A guess, from outside what the model learned, for";
  byId("number").classList.toggle("guess", !answer.in_support);
  byId("answer-gpu").textContent = answer.gpu;
  const card = shown.rows.find((row) => row.kind === "gpu" && row.gpu === answer.gpu);
  byId("answer-verdict").replaceChildren(...(card ? [verdictPill(card.verdict)] : []));
  byId("expected").textContent = mib(answer.request_mib);
  byId("expected-more").textContent = `${gib(answer.request_mib)}, ${percent(answer.request_mib / usableMib)} of the card`;
  byId("request").textContent = mib(answer.request_mib);
  byId("request-meaning").textContent = answer.in_support
    ? `Set this much aside when placing the job; it takes more about as often as less.${startupWords(answer)}`
    : "From a formula for the layers alone: nothing has checked it on jobs like this one.";
  showLimit(answer, usableMib);
  showOrigin(answer);
  draw(byId("gauge"), gauge(answer, usableMib));
  byId("bins-lead").textContent =
    `Most probable: ${binName(answer.bins, answer.bin.index)} (${share(answer.bin.probability)}).${limitBesideBins(answer)}`;
  draw(byId("bins-chart"), binsChart(answer, usableMib));
  byId("bins-table").replaceChildren(binsTable(answer));
  byId("fits-lead").textContent = fitsLead(shown.rows, answer.coverage);
  fits.show(shown.rows);
  const { request_mib: _request, limit_mib: _limit, ...sent } = answer; // without what the page adds
  byId("raw").textContent = JSON.stringify(sent, null, 2).replace(/\[[\d.,eE\s+-]+\]/g, (list) => list.replace(/\s+/g, " "));
}

export const showKind = (kind) => fits.only(kind);

export function showRecipes({ answer, question, usableMib }, shardMib) {
  const over = byId("over-capacity");
  over.hidden = (answer.limit_mib ?? 0) <= usableMib;
  over.textContent = `The limit is more than the ${mib(usableMib)} that a job can use of ${answer.gpu}: choose a larger card above.`;
  byId("recipes").replaceChildren(...recipes(answer, question, shardMib).map(recipeBox));
}

export function spoken(answer) {
  const limit = answer.limit_mib === null ? "no limit: the job is outside the model's support" : `limit ${mib(answer.limit_mib)}`;
  return `Answered: ${mib(answer.request_mib)} expected, ${limit}, on ${answer.gpu}.`;
}

// `curve` is as shapes.js makes it, or an Error that says why there is none.
export function showCurve(curve, batchSize) {
  const isCurve = !(curve instanceof Error) && curve.points.length > 1;
  byId("batch-details").hidden = !isCurve;
  if (!isCurve) {
    byId("batch-legend").replaceChildren();
    byId("batch-lead").textContent = curve instanceof Error ? `Not answered: ${curve.message}` : "The service named too few batch sizes to draw.";
    draw(byId("batch-chart"), () => []);
    return;
  }
  byId("batch-lead").textContent = curve.words;
  const hasLimit = curve.points.some((point) => point.limit_mib !== null);
  byId("batch-legend").replaceChildren(legend(hasLimit ? ["request", "limit", "capacity"] : ["request", "capacity"]));
  draw(byId("batch-chart"), batchChart(curve, batchSize));
  byId("batch-table").replaceChildren(batchTable(curve));
}

function startupWords({ startup_peak_bytes: peak }) {
  if (peak !== null) return "";
  return " In the first step cuDNN's search takes more of what is free and gives it back; how much is not known.";
}

function showLimit(answer, usableMib) {
  const { limit_mib: limit, request_mib: request } = answer;
  byId("limit").textContent = limit === null ? "None" : mib(limit);
  if (limit === null) {
    byId("limit-meaning").textContent = "Not given, because nothing vouches for it. Do not use the expected memory as a cap.";
  } else {
    const over = limit > usableMib ? ` That is more than the card's ${count(usableMib)} MiB.` : "";
    const added = ` It is ${count(limit - request)} MiB above the request.`;
    byId("limit-meaning").textContent = `Cap the job here, not lower: ${coverageWords(answer.coverage)} like it stay below.${added}${over}`;
  }
  const reasons = byId("reasons");
  reasons.hidden = answer.in_support;
  const unlike = "unlike the jobs that the model learned from";
  reasons.querySelector("h3").textContent = limit === null ? `No limit: ${unlike}` : capital(unlike);
  reasons.querySelector("ul").replaceChildren(...answer.reasons.map((reason) => element("li", {}, capital(reason))));
}

// Why the limit lies where it does: it is no quantile of the bars.
function limitBesideBins(answer) {
  const { limit_mib: limit, bins } = answer;
  if (limit === null) return " The job is unlike those that the model learned from, so nothing says how far the bars can be trusted.";
  let below = 0;
  const last = bins.probabilities.findIndex((probability) => (below += probability) >= answer.coverage);
  const upper = last < 0 ? null : edges(bins, last)[1];
  if (upper === null || upper >= limit) return "";
  return ` The bars put ${coverageWords(answer.coverage)} below ${mib(upper)}. The limit is higher: it is set by how far the model` +
    " was off on jobs that it had not seen, and the bars are its own opinion.";
}

function showOrigin(answer) {
  const { model } = answer;
  byId("traced").hidden = answer.label_source !== "traced";
  byId("traced-limit").hidden = answer.limit_mib === null;
  const release = answer.release ? `, release ${answer.release}` : "";
  const id = answer.prediction_id ? ` Prediction ${answer.prediction_id}.` : "";
  byId("origin").textContent =
    `Model ${model.name}, version ${model.version}${release}, sha256 ${model.sha256.slice(0, 12)}…; learned from ${labelWords(answer.label_source)}.${id}`;
}
