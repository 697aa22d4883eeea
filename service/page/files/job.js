// The job's text: read with a message that says where it is broken, written with one layer to a line.

export class BrokenJson extends Error {}

// {job, …options} from what stands in the text field: a job, or a whole request body.
export function readJob(text) {
  if (!text.trim()) throw new BrokenJson("There is no job yet: pick an example or paste one.");
  let document;
  try {
    document = JSON.parse(text);
  } catch (error) {
    throw new BrokenJson(`This is not valid JSON${place(error.message, text)}`);
  }
  if (document === null || typeof document !== "object" || Array.isArray(document)) {
    throw new BrokenJson("A job is a JSON object: it begins with { and ends with }.");
  }
  return "job" in document && !("family" in document) ? document : { job: document };
}

function place(message, text) {
  const found = /position (\d+)/.exec(message);
  const at = found ? Number(found[1]) : /end of JSON|end of data/i.test(message) ? text.trimEnd().length : null;
  if (at === null) return `: ${message}`;
  const before = text.slice(0, at).split("\n");
  const what = at >= text.trimEnd().length ? "it ends too early" : `unexpected ${JSON.stringify(text[at])}`;
  return `: line ${before.length}, column ${before.at(-1).length + 1}, ${what}.`;
}

export function writeJob(job) {
  const entries = Object.entries(job).map(([name, value]) => {
    const written = name === "layers" && Array.isArray(value) && value.length ? writeLayers(value) : JSON.stringify(value);
    return `  ${JSON.stringify(name)}: ${written}`;
  });
  return `{\n${entries.join(",\n")}\n}\n`;
}

function writeLayers(layers) {
  const rows = layers.map((layer) => `    ${JSON.stringify(layer).replaceAll(",", ", ").replaceAll('":', '": ')}`);
  return `[\n${rows.join(",\n")}\n  ]`;
}
