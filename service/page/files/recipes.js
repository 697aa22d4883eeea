// What to paste into each scheduler.  Systems that enforce the amount take the limit, and so does Slurm, whose shards are all that
// keeps jobs of one card apart; KAI packs by the request;
// without a limit there is no number to give, and the box says so.

import { addressOf, hasKey } from "./api.js";
import { element } from "./dom.js";
import { count } from "./words.js";

const NO_LIMIT = "No number: the job is unlike those that the model learned from, so there is no limit to vouch for. Ask for a whole GPU, or use the site's default.";

// {name, title, takes, text, note}; `text` is null where no number may be offered.
export function recipes(answer, question, shardMib) {
  const isKnown = answer.limit_mib !== null;
  const { request_mib: request, limit_mib: limit } = answer;
  const shards = Math.ceil(limit / shardMib);
  const scheduler = (name, title, takes, text, note) => ({ name, title, takes, text: isKnown ? text : null, note });
  return [
    scheduler("hami", "HAMi", "limit", `resources:\n  limits:\n    nvidia.com/gpu: 1\n    nvidia.com/gpumem: ${limit}`, "MiB for each GPU; enforced, so it takes the limit."),
    scheduler("volcano", "Volcano", "limit", `resources:\n  limits:\n    volcano.sh/vgpu-number: 1\n    volcano.sh/vgpu-memory: ${limit}`, "Enforced by its device plugin, so it takes the limit."),
    scheduler("kai", "KAI", "request", `metadata:\n  annotations:\n    gpu-memory: "${request}"`, "NVIDIA KAI scheduler, MiB; for packing only, nothing enforces it."),
    scheduler("sbatch", "Slurm", "limit", `#SBATCH --gres=shard:${shards}\n# gpumemnet: request ${request} MiB, limit ${limit} MiB`, `${count(shards)} × ${count(shardMib)} MiB; nothing enforces it, so jobs that share a card need their limits. --mem-per-gpu is host memory: not for this.`),
    { name: "curl", title: "curl", takes: "this question", text: curl(question), note: "Asks the service the same again." },
  ];
}

export function recipeBox(recipe) {
  const header = element("header", {},
    element("h4", {}, recipe.title),
    element("span", { class: "takes" }, recipe.text === null ? "no limit" : `takes the ${recipe.takes}`.replace("the this", "this")));
  const box = element("section", { class: recipe.name === "curl" ? "recipe wide" : "recipe", "data-recipe": recipe.name, "aria-label": recipe.title }, header);
  if (recipe.text === null) {
    box.append(element("p", { class: "refusal" }, NO_LIMIT));
    return box;
  }
  const text = element("pre", { tabindex: "0" }, element("code", {}, recipe.text));
  const button = element("button", { type: "button", "aria-label": `Copy for ${recipe.title}` }, "Copy");
  button.addEventListener("click", async () => {
    button.textContent = (await copy(recipe.text, text)) ? "Copied" : "Select and copy";
    setTimeout(() => { button.textContent = "Copy"; }, 1600);
  });
  header.append(button);
  box.append(text, element("p", {}, recipe.note));
  return box;
}

// Copies, also where the page came without encryption and browsers withhold the clipboard; says whether it worked.
export async function copy(text, shown = null) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    if (shown === null) return false;
    const range = document.createRange();
    range.selectNodeContents(shown);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    return document.execCommand("copy");
  }
}

function curl(question) {
  const body = JSON.stringify(question).replaceAll("'", "'\\''");
  const key = hasKey() ? `  -H "Authorization: Bearer $GPUMEMNET_API_KEY" \\\n` : "";
  return `curl -s '${addressOf("v1/predict")}' \\\n  -H 'Content-Type: application/json' \\\n${key}  -d '${body}'`;
}
