// The page, and its second tab: keeps form, text and link in step, asks the service after every change, and shows what it says.

import { showAnswer, showCurve, showKind, showRecipes, spoken } from "./answer_view.js";
import { Problem, Unreachable, ask, read } from "./api.js";
import { byId, element } from "./dom.js";
import { fillFitGpus, openFitLink } from "./fit_form.js";
import { BrokenJson, readJob, writeJob } from "./job.js";
import { askForKey, isKeyProblem, onKey } from "./key_panel.js";
import { fromFragment, toFragment } from "./permalink.js";
import { copy } from "./recipes.js";
import { curveOf, rowsOf, usableMib } from "./shapes.js";
import { showTab, shownTab } from "./tabs.js";
import { coverageWords, gib, shortGpu, withMib } from "./words.js";

const JOB_FIELDS = ["batch_size", "optimizer", "precision"]; // these stand in the job …
const OPTION_FIELDS = ["gpu", "coverage", "bin_width_mib"]; // … and these beside it
const TYPING_MS = 500; // how long a pause in typing lasts before the question is asked
const SLOW_MS = 700; // an answer that takes longer leaves the former one marked as such
const text = byId("job");

let waiting = 0; // timer of the next question
let running = null; // AbortController of the question that is under way
let shown = null; // what the page shows: {answer, question, …}
let others = {}; // options of a pasted request body that the form has no field for

// Form and text

function options() {
  const coverage = Number(byId("coverage").value);
  const width = byId("bin_width_mib").value;
  return {
    ...(byId("gpu").value ? { gpu: byId("gpu").value } : {}),
    ...(coverage ? { coverage } : {}),
    ...(width ? { bin_width_mib: Number(width) } : {}),
  };
}

function setOptions(question) {
  for (const name of OPTION_FIELDS) {
    if (!(name in question)) continue;
    const field = byId(name);
    const value = question[name] === null ? "" : String(question[name]);
    if (![...field.options].some((option) => option.value === value)) {
      field.append(element("option", { value }, name === "coverage" ? coverageWords(value) : name === "gpu" ? value : `${value} MiB`));
    }
    field.value = value;
  }
}

function fillForm(job) {
  for (const name of JOB_FIELDS) {
    const field = byId(name);
    const value = job[name] ?? "";
    field.value = value;
    if (field.value !== String(value)) field.value = ""; // a word that the list does not have
  }
}

function setJob(job, options = {}) {
  const { fits: _, ...rest } = options;
  setOptions(rest);
  others = Object.fromEntries(Object.entries(rest).filter(([name]) => !OPTION_FIELDS.includes(name)));
  text.value = writeJob(job);
  fillForm(job);
}

// The question in the text field and the form; a whole request body in the text gives its options too.
function readQuestion() {
  const { job, ...rest } = readJob(text.value);
  if (Object.keys(rest).length) setJob(job, rest);
  return { job, ...options(), ...others };
}

function onJobField(name) {
  try {
    const { job } = readJob(text.value);
    const { value } = byId(name);
    const changed = name === "batch_size" ? (value === "" ? null : Number(value)) : value;
    text.value = writeJob({ ...job, [name]: changed });
  } catch (error) {
    showError(error);
    return;
  }
  later(name === "batch_size" ? TYPING_MS : 0);
}

function onText() {
  try {
    fillForm(readJob(text.value).job);
  } catch {
    // said when the question is asked: nobody wants an error at every key
  }
  later(TYPING_MS);
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
  const slow = setTimeout(() => markStale(shown !== null), SLOW_MS);
  try {
    const question = readQuestion();
    byId("status").textContent = "Asking …";
    const answer = withMib(await ask("v1/predict", { ...question, fits: true }, signal));
    shown = { answer, question, usableMib: usableMib(answer), rows: rowsOf(answer) };
    clearTimeout(slow);
    nameOwnGpu(answer);
    showAnswer(shown);
    document.querySelector(".to-answer").hidden = false;
    showCopyBoxes();
    markStale(false);
    byId("status").textContent = spoken(answer);
    byId("key-panel").hidden = true;
    const fragment = await toFragment(question);
    if (signal.aborted) return;
    history.replaceState(null, "", `#${fragment}`);
    await predictSizes(question, answer.gpu, signal);
  } catch (error) {
    if (error.name !== "AbortError") showError(error);
  } finally {
    clearTimeout(slow);
  }
}

async function predictSizes(question, gpu, signal) {
  const { job, coverage, encoder } = question;
  let curve;
  try {
    curve = curveOf(await ask("v1/batch-sizes", { job, coverage, encoder, gpu }, signal), job.batch_size);
  } catch (error) {
    if (error.name === "AbortError") return;
    curve = error; // the prediction stands without it
  }
  showCurve(curve, job.batch_size);
}

function showCopyBoxes() {
  const size = Number(byId("shard_mib").value);
  if (shown) showRecipes(shown, Number.isInteger(size) && size > 0 ? size : 1024);
}

function markStale(isStale) {
  byId("result").classList.toggle("stale", isStale);
  byId("stale").hidden = !isStale;
}

// Errors

function clearErrors() {
  for (const name of [...JOB_FIELDS, ...OPTION_FIELDS, "job"]) {
    byId(name).removeAttribute("aria-invalid");
    byId(`${name}-error`).hidden = true;
  }
  byId("failure").hidden = true;
}

function atField(name, message) {
  byId(name).setAttribute("aria-invalid", "true");
  const place = byId(`${name}-error`);
  place.textContent = message;
  place.hidden = false;
  requestAnimationFrame(() => place.scrollIntoView({ block: "nearest" })); // once the status below has its lines
}

function showError(error) {
  markStale(shown !== null);
  byId("status").textContent = "";
  if (error instanceof BrokenJson) {
    atField("job", error.message);
    byId("status").textContent = "Not asked: the JSON is not valid.";
    return;
  }
  if (!(error instanceof Problem)) {
    fail(error instanceof Unreachable ? "No connection" : "The page failed", error.message);
    return;
  }
  if (isKeyProblem(error)) {
    askForKey(error);
    byId("status").textContent = "Not answered: an API key is needed.";
    return;
  }
  if (!error.errors.length) {
    fail(error.title, error.message + (error.retryAfter ? ` Try again in ${error.retryAfter} seconds.` : ""));
    return;
  }
  for (const { field, message } of error.errors) {
    const name = field.replace(/^job\./, "");
    if (JOB_FIELDS.includes(name) || OPTION_FIELDS.includes(name)) atField(name, message);
    else atField("job", `${field} ${message}`);
  }
  byId("status").textContent = "Not answered: see the field marked with ✕.";
}

function fail(title, message) {
  const place = byId("failure");
  place.replaceChildren(element("strong", {}, `${title}. `), message);
  place.hidden = false;
}

// Lists that the service knows

async function fillLists() {
  try {
    const [{ gpus }, { models }] = await Promise.all([read("v1/gpus"), read("v1/models")]);
    fillGpus(gpus);
    fillFitGpus(gpus);
    fillCoverages(models);
  } catch (error) {
    if (!(error instanceof Problem)) showError(error);
    else if (isKeyProblem(error)) askForKey(error);
  }
}

function fillGpus(gpus) {
  const chosen = byId("gpu").value;
  const own = byId("gpu").options[0];
  const named = gpus.map(({ name, available_mib: usable }) => element("option", { value: name }, `${name} (${gib(usable)})`));
  byId("gpu").replaceChildren(own, ...named);
  setOptions({ gpu: chosen });
}

// Which GPU answers are for where none is chosen; only an answer says it.
function nameOwnGpu({ gpu, gpu_source: source }) {
  if (source !== "request") byId("gpu").options[0].textContent = `${shortGpu(gpu)}, the service’s`;
}

function fillCoverages(models) {
  const chosen = byId("coverage").value;
  const coverages = [...new Set(models.flatMap((model) => model.coverages))].sort((one, other) => one - other);
  byId("coverage").replaceChildren(...coverages.map((coverage) => element("option", { value: coverage }, coverageWords(coverage))));
  setOptions({ coverage: chosen });
}

// Wiring

let picked = null; // the example asked for last

async function pickExample(name) {
  picked = name;
  try {
    const job = await read(`page/examples/${name}.json`);
    if (picked !== name) return;
    setJob(job);
  } catch (error) {
    showError(error);
    return;
  }
  await predict();
}

async function openLink() {
  const fragment = location.hash.slice(1);
  if (!fragment) return;
  showTab("job");
  if (fragment === "describe") return;
  try {
    const { job, ...rest } = await fromFragment(fragment);
    setJob(job, rest);
  } catch (error) {
    fail("No job in the link", error.message);
    return;
  }
  await predict();
}

for (const link of document.querySelectorAll('[href="#answer"]')) {
  link.addEventListener("click", (event) => {
    event.preventDefault(); // the fragment holds the job
    const place = byId(shownTab() === "job" ? "answer" : "fit-answer");
    place.focus();
    place.scrollIntoView();
  });
}
for (const button of document.querySelectorAll("[data-example]")) {
  button.addEventListener("click", () => pickExample(button.dataset.example));
}
for (const name of JOB_FIELDS) byId(name).addEventListener(name === "batch_size" ? "input" : "change", () => onJobField(name));
for (const name of OPTION_FIELDS) byId(name).addEventListener("change", () => later(0));
text.addEventListener("input", onText);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("job-form").requestSubmit();
});
byId("job-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  await predict();
  document.querySelector('[aria-invalid="true"]')?.focus();
});
byId("copy-link").addEventListener("click", async () => {
  const isCopied = await copy(location.href);
  byId("status").textContent = isCopied ? "Link copied: the job is in it, after the #." : "Copy the link from the address bar.";
});
byId("shard_mib").addEventListener("input", showCopyBoxes);
for (const button of document.querySelectorAll("[data-kind]")) {
  if (button.tagName !== "BUTTON") continue;
  button.addEventListener("click", () => {
    for (const other of button.parentElement.children) other.setAttribute("aria-pressed", String(other === button));
    showKind(button.dataset.kind);
  });
}
onKey(async () => {
  clearErrors();
  await fillLists();
  if (text.value.trim()) await predict();
});
addEventListener("hashchange", openLink);

fillForm({}); // nothing is chosen before there is a job
fillLists();
if (location.hash) openLink();
else openFitLink();
