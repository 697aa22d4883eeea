// The service's documents in the form that the page draws.

import { count } from "./words.js";

const MIB = 2 ** 20;

export function binWidthMib(bins) {
  return bins.width_bytes / MIB;
}

// What a row of `fits` is about: its name, its kind, and what a job can use there.
export function rowsOf(answer) {
  return (answer.fits ?? []).map((fit) => ({
    name: fit.mig === null ? fit.gpu : fit.mig,
    note: fit.mig === null ? null : fit.gpu,
    gpu: fit.gpu,
    kind: fit.mig === null ? "gpu" : "mig",
    usableMib: fit.available_mib,
    verdict: fit.verdict,
    probability: fit.probability,
  }));
}

// What the card of the answer offers: from the table, or else the edge at which the last bin begins.
export function usableMib(answer) {
  const card = rowsOf(answer).find((row) => row.kind === "gpu" && row.gpu === answer.gpu);
  return card ? card.usableMib : (answer.bins.count - 1) * binWidthMib(answer.bins);
}

// The part of the curve that is worth a look: up to twice what fits, and past today's batch size.
export function curveOf(sizes, batchSize) {
  const largest = sizes.likely_batch ?? 1;
  const end = Math.min(sizes.max_batch, 2 ** Math.ceil(Math.log2(Math.max(2 * largest, 2 * batchSize, 16))));
  return {
    gpu: sizes.gpu,
    usableMib: sizes.available_mib,
    points: sizes.curve.filter((point) => point.batch_size <= end),
    safeBatch: sizes.safe_batch,
    words: curveWords(sizes),
  };
}

function curveWords(sizes) {
  const { gpu, safe_batch: safe, likely_batch: likely, max_batch: most } = sizes;
  const named = (batch) => (batch === most ? `${count(batch)} or more` : count(batch));
  if (likely === null) return `Not even a batch of 1 fits ${gpu}.`;
  if (sizes.reasons.length && safe === null) {
    return `The request fits ${gpu} up to a batch of ${named(likely)}. There is no limit to vouch for it, at any batch size.`;
  }
  if (safe === null) return `A batch of ${named(likely)} may fit ${gpu}, but no batch size stays below its limit.`;
  const next = sizes.curve.find((point) => point.batch_size > safe);
  const why = next && next.limit_mib === null ? " Above it the job is unlike what the model learned from, and there is no limit." : "";
  const more = likely > safe ? `${why} The request would fit up to ${named(likely)}.` : why;
  return `Largest batch on ${gpu}: ${named(safe)}, by the limit.${more}`;
}
