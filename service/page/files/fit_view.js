// Shows the answer to a question by a model's name: the verdict, what the memory is made of, and what would fit.

import { byId, draw, element } from "./dom.js";
import { verdictPill } from "./fits_table.js";
import { gauge } from "./gauge.js";
import { copy } from "./recipes.js";
import { count, coverageWords, gib, mib, percent, share, shortGpu } from "./words.js";

const MIB = 2 ** 20;
const PARTS = {
  base_weights_bytes: "Base weights",
  adapters_bytes: "Adapters",
  gradients_bytes: "Gradients",
  optimizer_bytes: "Optimizer",
  activations_bytes: "Activations",
  logits_bytes: "Logits and loss",
  workspace_bytes: "Workspace",
  fragmentation_bytes: "Fragmentation",
  context_bytes: "CUDA context",
};
const OPTION_OF = { gradient_accumulation: "accumulation" };

const inMib = (bytes) => Math.ceil(bytes / MIB);
const inGib = (bytes) => gib(inMib(bytes));

// `apply(options)` puts the options of a change into the form.
export function showFit(answer, question, apply) {
  byId("fit-empty").hidden = true;
  byId("fit-result").hidden = false;
  byId("fit-title").textContent = answer.model;
  byId("fit-verdict").replaceChildren(...(answer.verdict ? [verdictPill(answer.verdict)] : []));
  byId("fit-expected").textContent = inGib(answer.expected_bytes);
  byId("fit-expected-more").textContent = answer.available_bytes
    ? `expected, ${percent(answer.expected_bytes / answer.available_bytes)} of what a job can use`
    : "expected";
  byId("fit-safe").textContent = `${inGib(answer.safe_bytes)} (${mib(inMib(answer.safe_bytes))})`;
  byId("fit-safe-meaning").textContent = `${coverageWords(answer.coverage).replace("jobs", "published readings")} lie below it.`;
  byId("fit-card").textContent = answer.gpu ? shortGpu(answer.gpu) : "No GPU chosen";
  byId("fit-card-meaning").textContent = cardWords(answer);
  byId("fit-gauge").hidden = !answer.gpu;
  if (answer.gpu) {
    const amounts = { request_mib: inMib(answer.expected_bytes), limit_mib: inMib(answer.safe_bytes) };
    draw(byId("fit-gauge"), gauge(amounts, Math.floor(answer.available_bytes / MIB)));
  }
  byId("fit-training").textContent = trainingWords(answer);
  showParts(answer);
  showTable(answer, question);
  showChanges(answer, apply);
  showNotes(answer);
  const command = commandOf(question);
  byId("fit-command").textContent = command;
  byId("fit-copy-command").onclick = async () => {
    const isCopied = await copy(command, byId("fit-command"));
    byId("fit-copy-command").textContent = isCopied ? "Copied" : "Select and copy";
    setTimeout(() => { byId("fit-copy-command").textContent = "Copy"; }, 1600);
  };
  byId("fit-raw").textContent = JSON.stringify(answer, null, 2);
}

function cardWords(answer) {
  const smallest = answer.smallest_gpu ? `The smallest GPU that holds the job: ${answer.smallest_gpu}.` : "No single GPU of the catalogue holds the job.";
  if (!answer.gpu) return smallest;
  const gpus = answer.method.gpus > 1 ? `${answer.method.gpus} of them, by ${answer.method.parallel}; ` : "";
  return `${gpus}${inGib(answer.available_bytes)} usable${gpus ? " on each" : ""}. ${smallest}`;
}

function trainingWords({ method, parameters, trained_parameters: trained, blocks, table_by: by }) {
  const repeated = blocks.filter(([times]) => times > 1).map(([times, name]) => `${times} × ${name}`);
  const sample = by.includes("tokens") ? `${method.batch_size} × ${count(method.sequence_length)} tokens` : `${count(method.batch_size)} images`;
  const how = [
    method.method === "full" ? "full fine-tuning" : `${method.method}, rank ${method.lora_rank}`,
    sample, method.precision, method.optimizer,
    method.checkpointing ? "checkpointing" : "no checkpointing",
    ...(method.kernels === "none" ? [] : [`${method.kernels} kernels`]),
    ...(method.gradient_accumulation > 1 ? [`${method.gradient_accumulation} batches accumulated`] : []),
  ];
  return `${count(parameters / 1e6)} million parameters${repeated.length ? ` (${repeated.join(", ")})` : ""}, ${percent(trained / parameters)} of them trained: ${how.join(", ")}.`;
}

function showParts(answer) {
  const parts = Object.entries(answer.parts).filter(([, bytes]) => bytes > 0);
  const largest = Math.max(...parts.map(([, bytes]) => bytes));
  byId("fit-parts-lead").textContent = `At the peak, in the ${answer.moment}.`;
  byId("fit-parts").replaceChildren(...parts.map(([name, bytes]) => {
    const bar = element("span", { class: "part-bar", "aria-hidden": "true" }, element("span"));
    bar.firstChild.style.width = `${Math.max((100 * bytes) / largest, 0.5)}%`;
    return element("li", {}, element("span", { class: "part-name" }, PARTS[name] ?? name), bar,
      element("span", { class: "part-amount" }, `${inGib(bytes)} `, element("span", { class: "note" }, share(bytes / answer.expected_bytes))));
  }));
}

function showTable(answer, question) {
  const sizes = Object.keys(answer.table[0]?.safe_bytes ?? {});
  const isAsked = (row) => row.method === answer.method.method && row.checkpointing === answer.method.checkpointing;
  const asked = String(answer.table_by.includes("tokens") ? answer.method.sequence_length : answer.method.batch_size);
  const head = ["Method", "Checkpoints", ...sizes.map((size) => count(size))];
  byId("fit-table-lead").textContent =
    `Safe GiB by ${answer.table_by}, all else equal.${answer.gpu ? ` ✓ fits ${question.gpu}.` : ""} ${limitWords(answer)}`;
  byId("fit-table").replaceChildren(element("table", {},
    element("caption", { class: "unseen" }, "What would fit"),
    element("thead", {}, element("tr", {}, ...head.map((text, at) => element("th", { scope: "col", class: at > 1 ? "count" : null }, text)))),
    element("tbody", {}, ...answer.table.map((row) => element("tr", {},
      element("th", { scope: "row" }, row.method),
      element("td", {}, row.checkpointing ? "on" : "off"),
      ...sizes.map((size) => cell(row.safe_bytes[size], answer.available_bytes, isAsked(row) && size === asked)))))));
}

function cell(bytes, available, isAsked) {
  const fits = available === null ? null : bytes <= available;
  const digits = bytes < 100 * 2 ** 30 ? 1 : 0;
  const words = (bytes / 2 ** 30).toLocaleString("en-GB", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const kind = fits === null ? "" : fits ? " fits" : " over";
  return element("td", { class: `count${kind}${isAsked ? " asked" : ""}` },
    fits === null ? words : `${words} ${fits ? "✓" : "✕"}`, isAsked ? element("span", { class: "unseen" }, " (asked)") : null);
}

function limitWords(answer) {
  const words = [];
  if (answer.largest_batch !== null) words.push(answer.largest_batch ? `Largest batch: ${count(answer.largest_batch)}.` : "No batch fits.");
  if (answer.longest_sequence) words.push(`Longest sample: ${count(answer.longest_sequence)} tokens.`);
  if (answer.fewest_gpus > 1) words.push(`Fewest of this GPU: ${answer.fewest_gpus}, sharded by FSDP2.`);
  return words.join(" ");
}

function showChanges(answer, apply) {
  byId("fit-changes-panel").hidden = answer.fits;
  byId("fit-changes-lead").textContent = answer.changes.length ? "The cheapest first." : "None of those known here: a smaller model, or more GPUs.";
  byId("fit-changes").replaceChildren(...answer.changes.map((change) => {
    const button = element("button", { type: "button", "aria-label": `Apply: ${change.text}` }, "Apply");
    button.addEventListener("click", () => apply(change.options));
    return element("li", {}, element("span", {}, change.text, element("span", { class: "note" }, `safe ${inGib(change.safe_bytes)} · ${change.options}`)), button);
  }));
}

function showNotes(answer) {
  const notes = [...answer.notes];
  if (answer.attention) notes.unshift(`Attention: ${answer.attention}`);
  notes.push(`Sizes from ${answer.source}; total of parameters ${answer.checked}. Answered from rules, without a run (${answer.depth}).`);
  byId("fit-notes").replaceChildren(...notes.map((note) => element("li", {}, note)));
}

function commandOf({ model, checkpointing, ...options }) {
  const parts = Object.entries(options).map(([name, value]) => `--${(OPTION_OF[name] ?? name).replaceAll("_", "-")} ${value}`);
  if (checkpointing === false) parts.push("--no-checkpointing");
  return ["gpumemnet fit", model, ...parts].join(" ");
}
