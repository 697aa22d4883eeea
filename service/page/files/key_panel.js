// Asks for an API key where the service wants one, and tells the tabs when there is a new one.

import { hasKey, useKey } from "./api.js";
import { byId } from "./dom.js";

const waiting = [];

export const onKey = (action) => waiting.push(action);

export const isKeyProblem = (error) => error.status === 401 || error.status === 403;

export function askForKey(problem) {
  byId("key-panel").hidden = false;
  if (!hasKey()) return;
  byId("key").setAttribute("aria-invalid", "true");
  byId("key-error").textContent = problem.message;
  byId("key-error").hidden = false;
}

byId("use-key").addEventListener("click", () => {
  useKey(byId("key").value.trim());
  byId("key").removeAttribute("aria-invalid");
  byId("key-error").hidden = true;
  byId("key-panel").hidden = true;
  for (const action of waiting) action();
});
byId("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault();
  byId("use-key").click();
});
