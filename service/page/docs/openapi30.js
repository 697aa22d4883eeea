// OpenAPI 3.1 in the words of 3.0, as far as the service's description uses them: null as a type, const, exclusive bounds,
// prefixItems and examples of schemas.

export function inWordsOf30(description) {
  const { summary, ...info } = description.info;
  if (summary) info.description = [summary, info.description].filter(Boolean).join("\n\n");
  return { ...converted({ ...description, info }), openapi: "3.0.3" };
}

const VERBATIM = new Set(["example", "examples", "value", "default", "enum"]); // data, not schemas

function converted(node) {
  if (Array.isArray(node)) return node.map(converted);
  if (node === null || typeof node !== "object") return node;
  const copy = {};
  for (const [name, value] of Object.entries(node)) copy[name] = VERBATIM.has(name) ? value : converted(value);
  if ("identifier" in copy && "name" in copy) delete copy.identifier; // of a licence; 3.0 knows its URL alone
  return isSchema(node) ? schema(copy) : copy;
}

const isSchema = (node) => ["type", "anyOf", "oneOf", "allOf", "const", "prefixItems"].some((word) => isWord(node[word]));
const isWord = (value) => value !== undefined && (typeof value !== "object" || Array.isArray(value));

function schema(copy) {
  for (const word of ["anyOf", "oneOf"]) {
    if (!Array.isArray(copy[word])) continue;
    const others = copy[word].filter((choice) => choice.type !== "null");
    if (others.length === copy[word].length) continue;
    delete copy[word];
    copy.nullable = true;
    if (others.length === 1 && "$ref" in others[0]) copy.allOf = others;
    else if (others.length === 1) Object.assign(copy, { ...others[0], ...copy });
    else copy[word] = others;
  }
  if (Array.isArray(copy.type)) {
    copy.nullable = copy.type.includes("null");
    copy.type = copy.type.find((type) => type !== "null");
  }
  if ("const" in copy) {
    copy.enum = [copy.const];
    copy.type ??= { number: "integer" }[typeof copy.const] ?? typeof copy.const;
    delete copy.const;
  }
  for (const [bound, plain] of [["exclusiveMinimum", "minimum"], ["exclusiveMaximum", "maximum"]]) {
    if (typeof copy[bound] !== "number") continue;
    copy[plain] = copy[bound];
    copy[bound] = true;
  }
  if (Array.isArray(copy.prefixItems)) {
    copy.items = { anyOf: copy.prefixItems };
    copy.type ??= "array";
    delete copy.prefixItems;
  }
  if (Array.isArray(copy.examples)) {
    copy.example ??= copy.examples[0];
    delete copy.examples;
  }
  return copy;
}
