// The job in the URL's fragment, which browsers never send: a link holds the whole question, and no log sees it.

const COMPRESSED = "z";
const PLAIN = "p";
const LARGEST_CHARACTERS = 4_000_000; // as much as the service accepts

export async function toFragment(question) {
  const bytes = new TextEncoder().encode(JSON.stringify(question));
  if (typeof CompressionStream === "undefined") return PLAIN + encode(bytes);
  const stream = new Blob([bytes]).stream().pipeThrough(new CompressionStream("deflate-raw"));
  return COMPRESSED + encode(new Uint8Array(await new Response(stream).arrayBuffer()));
}

// The question, or an Error in words for the reader.
export async function fromFragment(fragment) {
  try {
    const bytes = decode(fragment.slice(1));
    const text = fragment[0] === COMPRESSED ? await inflate(bytes) : new TextDecoder().decode(bytes);
    const question = JSON.parse(text);
    if (question === null || typeof question !== "object" || typeof question.job !== "object") throw new Error("no job");
    return question;
  } catch {
    throw new Error("The link holds no job that can be read: it may have been cut off.");
  }
}

async function inflate(bytes) {
  const reader = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw")).getReader();
  const decoder = new TextDecoder();
  let text = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return text + decoder.decode();
    text += decoder.decode(value, { stream: true });
    if (text.length > LARGEST_CHARACTERS) throw new Error("too large");
  }
}

function encode(bytes) {
  let binary = "";
  for (const byte of bytes) binary += String.fromCharCode(byte);
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function decode(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
}
