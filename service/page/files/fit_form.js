// The first tab: a model by its name and how it is trained; asks while the reader types, and keeps the question in the address.

import { Problem, Unreachable, addressOf, ask, read } from "./api.js";
import { byId, element } from "./dom.js";
import { showFit } from "./fit_view.js";
import { askForKey, isKeyProblem, onKey } from "./key_panel.js";
import { copy } from "./recipes.js";
import { suggest } from "./suggestions.js";
import { count, gib, shortGpu } from "./words.js";

const TYPING_MS = 250; // how long a pause in typing lasts before the question is asked
const NUMBERS = ["sequence_length", "batch_size", "gradient_accumulation", "lora_rank"];
const WORDS = ["method", "precision", "optimizer", "kernels"];
const FIELDS = ["model", "gpu", "gpus", ...WORDS, ...NUMBERS, "checkpointing"];
const OPTION_NAMES = { accumulation: "gradient_accumulation" }; // of the command line → of the question

const field = (name) => byId(`fit-${name}`);

let waiting = 0; // timer of the next question
let running = null; // AbortController of the question that is under way

// The question as the service takes it; what has its default is left out, so that links are short.
function question() {
  const asked = { model: field("model").value.trim() };
  for (const name of WORDS) if (field(name).selectedIndex > 0) asked[name] = field(name).value;
  for (const name of NUMBERS) {
    const text = field(name).value.trim();
    if (text) asked[name] = Number(text);
    else if (field(name).validity.badInput) asked[name] = "";
  }
  if (!field("checkpointing").checked) asked.checkpointing = false;
  const gpus = Number(field("gpus").value);
  if (field("gpu").value) asked.gpu = gpus > 1 ? `${gpus}x${field("gpu").value}` : field("gpu").value;
  return asked;
}

function fillForm(values) {
  for (const [name, value] of Object.entries(values)) {
    if (!FIELDS.includes(name)) continue;
    const [, gpus, gpu] = name === "gpu" ? /^(?:(\d+)x)?(.*)$/.exec(value) : [];
    if (name === "checkpointing") field(name).checked = value !== "false";
    else if (name === "gpu") setGpu(gpu, gpus ?? "1");
    else setWord(name, value);
  }
  showWhatMatters();
}

// Names of GPUs are the same with spaces and with hyphens, in any case.
const hyphened = (name) => name.toLowerCase().replaceAll(/[ _]/g, "-");

function setGpu(gpu, gpus) {
  const known = [...field("gpu").options].find((option) => option.dataset.names?.split("|").includes(hyphened(gpu)));
  setWord("gpu", known?.value ?? gpu);
  setWord("gpus", gpus);
}

// A word that a list does not have is added, and the service says whether it is one.
function setWord(name, value) {
  const place = field(name);
  if (place.options && ![...place.options].some((option) => option.value === value)) place.append(element("option", { value }, value));
  place.value = value;
}

// Applies the options of the command line, as a suggested change states them.
function apply(options) {
  const values = {};
  for (const part of ` ${options}`.split(" --").slice(1)) {
    const [name, value = "true"] = part.split(" ");
    const plain = name.replaceAll("-", "_");
    values[OPTION_NAMES[plain] ?? plain] = value;
  }
  if (values.parallel && !values.gpu && values.gpus) setGpu(field("gpu").value, values.gpus);
  fillForm(values);
  later(0);
  byId("fit-answer").scrollIntoView({ block: "nearest" });
}

function showWhatMatters() {
  byId("fit-rank-field").hidden = field("method").value === "full";
  field("gpus").disabled = !field("gpu").value;
}

// Asking

function later(milliseconds) {
  clearTimeout(waiting);
  waiting = setTimeout(predict, milliseconds);
}

async function predict() {
  clearTimeout(waiting);
  running?.abort();
  running = new AbortController();
  const { signal } = running;
  clearErrors();
  const asked = question();
  const query = new URLSearchParams(asked).toString();
  history.replaceState(null, "", asked.model ? `?${query}` : location.pathname);
  if (!asked.model) return;
  try {
    byId("fit-status").textContent = "Asking …";
    const answer = await ask("v1/fit", asked, signal);
    if (signal.aborted) return;
    byId("key-panel").hidden = true;
    showFit(answer, asked, apply);
    byId("fit-result").classList.remove("stale");
    const verdict = { yes: "fits", unsure: "may not fit", no: "does not fit" }[answer.verdict] ?? "answered";
    byId("fit-status").textContent = `${answer.model} ${verdict}: ${gib(answer.expected_bytes / 2 ** 20)} expected, ${gib(answer.safe_bytes / 2 ** 20)} safe.`;
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  }
}

function clearErrors() {
  for (const name of FIELDS) {
    field(name).removeAttribute("aria-invalid");
    const place = byId(`fit-${name}-error`);
    if (place) place.hidden = true;
  }
  byId("fit-failure").hidden = true;
}

function showError(error) {
  byId("fit-result").classList.add("stale");
  byId("fit-status").textContent = "";
  if (error instanceof Problem && isKeyProblem(error)) {
    askForKey(error);
    return;
  }
  const problems = error instanceof Problem ? error.errors : [];
  const at = problems.find((each) => byId(`fit-${each.field}-error`));
  if (at?.field === "model" && !byId("fit-models").hidden) return; // the reader is still choosing
  if (at) {
    field(at.field).setAttribute("aria-invalid", "true");
    byId(`fit-${at.field}-error`).textContent = at.message;
    byId(`fit-${at.field}-error`).hidden = false;
    return;
  }
  const retry = error.retryAfter ? ` Try again in ${error.retryAfter} seconds.` : "";
  const title = error instanceof Unreachable ? "No connection" : error.title ?? "The page failed";
  byId("fit-failure").replaceChildren(element("strong", {}, `${title}. `), error.message + retry);
  byId("fit-failure").hidden = false;
}

// Lists that the service knows

async function findModels(text) {
  try {
    const { models } = await read(`v1/fit/models?${new URLSearchParams({ search: text })}`);
    return models.map(({ name, parameters }) => ({ name, words: size(parameters) }));
  } catch (error) {
    if (error instanceof Problem && isKeyProblem(error)) askForKey(error);
    return [];
  }
}

function size(parameters) {
  return parameters >= 1e9 ? `${(parameters / 1e9).toPrecision(3)} B` : `${count(parameters / 1e6)} M`;
}

export function fillFitGpus(gpus) {
  const chosen = field("gpu").value;
  const named = gpus.map(({ name, aliases, available_mib: usable }) =>
    element("option", { value: (aliases[0] ?? name).replaceAll(" ", "-"), "data-names": [name, ...aliases].map(hyphened).join("|") }, `${shortGpu(name)} (${gib(usable)})`));
  field("gpu").replaceChildren(field("gpu").options[0], ...named);
  setGpu(chosen, field("gpus").value);
}

// Wiring

suggest(field("model"), byId("fit-models"), findModels, () => later(0));
field("model").addEventListener("change", () => later(0));
for (const name of ["model", ...NUMBERS]) field(name).addEventListener("input", () => later(TYPING_MS));
for (const name of ["gpu", "gpus", "checkpointing", ...WORDS]) {
  field(name).addEventListener("change", () => {
    showWhatMatters();
    later(0);
  });
}
byId("fit-form").addEventListener("submit", (event) => {
  event.preventDefault();
  predict();
});
for (const button of document.querySelectorAll("[data-model]")) {
  button.addEventListener("click", () => {
    fillForm(Object.fromEntries(new URLSearchParams(button.dataset.model)));
    later(0);
  });
}
byId("fit-copy-link").addEventListener("click", async () => {
  const link = `${addressOf("")}${location.search}`;
  byId("fit-status").textContent = (await copy(link)) ? "Link copied: it holds the whole question." : "Copy the link from the address bar.";
});
onKey(predict);

export function openFitLink() {
  fillForm(Object.fromEntries(new URLSearchParams(location.search)));
  if (field("model").value) predict();
}
showWhatMatters();
