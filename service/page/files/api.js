// Talks to the service that served the page.  Paths are relative, so the page also works behind a proxy's prefix.

const KEY_ITEM = "gpumemnet-api-key"; // of this tab alone: sessionStorage

// A refusal by the service: its problem document (RFC 9457).
export class Problem extends Error {
  constructor(document, retryAfter) {
    super(document.detail || document.title || `status ${document.status}`);
    this.status = document.status;
    this.title = document.title;
    this.errors = document.errors || [];
    this.retryAfter = retryAfter;
  }
}

export class Unreachable extends Error {}

export const hasKey = () => Boolean(sessionStorage.getItem(KEY_ITEM));

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY_ITEM, key);
  else sessionStorage.removeItem(KEY_ITEM);
}

export const read = (path, signal) => call(path, { signal });

export function ask(path, question, signal) {
  return call(path, { method: "POST", body: JSON.stringify(question), signal });
}

export const addressOf = (path) => new URL(path, document.baseURI).href;

async function call(path, options) {
  const headers = options.body === undefined ? {} : { "Content-Type": "application/json" };
  if (hasKey()) headers["Authorization"] = `Bearer ${sessionStorage.getItem(KEY_ITEM)}`;
  let response;
  let document;
  try {
    response = await fetch(path, { ...options, headers });
    document = await response.json().catch(() => null);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Unreachable("The service cannot be reached. Look whether it runs and whether this machine is online, then press Predict.");
  }
  if (response.ok && document !== null) return document;
  const described = document !== null && typeof document === "object" ? document : { title: response.statusText };
  throw new Problem({ ...described, status: response.status }, response.headers.get("Retry-After"));
}
